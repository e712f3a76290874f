"""Runs artifacts: on the GPU, on the CPU interpreter, and as a plain torch reference.

`Engine` serves requests over either; it is imported when it is asked for, as it needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkc.runtime.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from mkc.runtime.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
