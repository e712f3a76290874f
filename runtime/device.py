"""`Device`: rows, pages and steps as the scheduler uses them.

`ExecutorDevice` is the one for kernel and interpreter; tests have one whose steps cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from mkc.runtime.request import Sampling


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence at positions `start` on; tables: per KV group the block of each page,
    all pages of these tokens and of those that they see among them."""

    tokens: Seq[int]
    start: int
    tables: Seq[Seq[int]]


class Device(Protocol):
    """Rows, pages and steps, as the scheduler uses them. Calls take effect in the order made."""

    max_rows: int

    def prefill(self, pieces: Seq[Piece]) -> None:
        """Stores the K and V of all pieces' tokens in their pages."""
        ...

    def start_row(
        self,
        row: int,
        token: int,
        position: int,
        limit: int,
        tables: Seq[Seq[int]],
        sampling: Sampling,
    ) -> None:
        """Makes a row live; see `StepState.start_row`."""
        ...

    def set_block(self, row: int, group: int, page: int, block: int) -> None:
        """Gives a row one more page."""
        ...

    def move_row(self, source: int, target: int) -> None:
        """Puts a row in another's place, as it is after all steps queued so far."""
        ...

    def stop_row(self, row: int) -> None:
        """Makes a row idle from the next step on."""
        ...

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copies a block's bytes."""
        ...

    def save(self, blocks: Seq[Seq[int]]) -> Any:
        """The bytes of blocks of each group, kept elsewhere."""
        ...

    def load(self, saved: Any, blocks: Seq[Seq[int]]) -> None:
        """Puts saved bytes into other blocks, as many of each group."""
        ...

    def step(self, rows: int) -> Callable[[], list[int]]:
        """Queues a step over the first `rows` rows. The result waits for it, and gives each row's
        token or raises what went wrong."""
        ...
