"""Model descriptions shipped with mkc."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def shipped_models() -> dict[str, Path]:
    """Name (the file's stem) -> path of each description in this package, sorted by name."""
    folder = Path(str(files(__name__)))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
