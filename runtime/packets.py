"""Packets: what one SM hands to another, each item with the epoch of the step that wrote it.

The device keeps a packet's epoch in the same atomic word as its values. Here an item of a packet
set has one epoch, and every access is checked: a read finds exactly what it asks for, and nothing
is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mkc.compiler.errors import CheckError
from mkc.compiler.place import PacketSet
from mkc.compiler.program import Entry

Floats = npt.NDArray[np.float32]
Index = tuple[Any, ...]
"""Selects items of a packet set: an int, slice or int array for each axis, as numpy indexes."""


@dataclass(frozen=True, slots=True)
class Site:
    """An entry of a program: where something went wrong."""

    sm: int
    place: int
    entry: Entry

    def __str__(self) -> str:
        entry = self.entry
        return (
            f"SM {self.sm}, entry {self.place} "
            f"({entry.kind.name} layer {entry.layer} tile {entry.tile})"
        )


class DeadlockError(CheckError):
    """No SM can go on: every one that has not ended waits for packets that nobody writes.

    `waits` maps each stuck SM to what it waits for.
    """

    def __init__(self, waits: dict[int, str]) -> None:
        shared: dict[str, list[int]] = {}
        for sm, wait in waits.items():
            shared.setdefault(wait, []).append(sm)
        lines = [f"SM {_spans(sms)}: {wait}" for wait, sms in shared.items()]
        super().__init__("MKC611", "\n  ".join(["the programs deadlock:", *lines]))
        self.waits = waits


class UnwrittenPacketError(CheckError):
    """A task reads an item that was not written in this epoch, or that a later one replaced."""

    def __init__(self, site: Site, item: str, found: int, wanted: int) -> None:
        super().__init__(
            "MKC612", f"{site} reads {item} of epoch {wanted}, which holds epoch {found}"
        )


class RewrittenPacketError(CheckError):
    """A task writes an item that has been written in this epoch or a later one."""

    def __init__(self, site: Site, item: str, found: int, wanted: int) -> None:
        super().__init__(
            "MKC613", f"{site} writes {item} of epoch {wanted}, which holds epoch {found}"
        )


class PacketStore:
    """The items of one packet set: `values` [*shape, width] and `epochs` [*shape], 0 = never."""

    def __init__(self, packet_set: PacketSet, width: int, dtype: npt.DTypeLike = np.float32):
        self.packet_set = packet_set
        self.values: npt.NDArray[Any] = np.zeros((*packet_set.shape, width), dtype=dtype)
        self.epochs = np.zeros(packet_set.shape, dtype=np.int64)
        self.writes = 0

    def write(self, site: Site, index: Index, epoch: int, values: npt.ArrayLike) -> None:
        """Writes items. Raises RewrittenPacketError if one of them has this epoch already."""
        found = self.epochs[index]
        if not (found < epoch).all():
            item, holds = self._first(index, found >= epoch)
            raise RewrittenPacketError(site, item, holds, epoch)
        self.values[index] = values
        self.epochs[index] = epoch
        self.writes += 1

    def read(self, site: Site, index: Index, epoch: int) -> npt.NDArray[Any]:
        """Values [*selected, width] of items.

        Raises UnwrittenPacketError unless all of them have this epoch.
        """
        found = self.epochs[index]
        if not (found == epoch).all():
            item, holds = self._first(index, found != epoch)
            raise UnwrittenPacketError(site, item, holds, epoch)
        values: npt.NDArray[Any] = self.values[index]
        return values

    def first_missing(self, index: Index, epoch: int) -> str | None:
        """The first of the items that does not have `epoch`, None if all have."""
        missing = self.epochs[index] != epoch
        return self._first(index, missing)[0] if np.any(missing) else None

    def _first(self, index: Index, selected: Any) -> tuple[str, int]:
        """Name and epoch of the first item of `index` for which `selected` holds."""
        flat = np.arange(self.epochs.size).reshape(self.epochs.shape)[index]
        item = int(np.extract(selected, flat)[0])
        place = [int(i) for i in np.unravel_index(item, self.epochs.shape)]
        named = ", ".join(f"{a} {i}" for a, i in zip(self.packet_set.axes, place, strict=True))
        return f"{self.packet_set.name}[{named}]", int(self.epochs.flat[item])


@dataclass(slots=True)
class Wait:
    """What a task needs before it can go on: items of one store with an epoch."""

    site: Site
    store: PacketStore
    index: Index
    epoch: int
    seen: int = -1

    def is_over(self) -> bool:
        """Whether all items are there; looks again only after a write to the store.

        Raises UnwrittenPacketError if one of them holds a later epoch, so that it never will be.
        """
        if self.seen == self.store.writes:
            return False
        self.seen = self.store.writes
        found = self.store.epochs[self.index]
        if (found == self.epoch).all():
            return True
        if (found > self.epoch).any():
            self.store.read(self.site, self.index, self.epoch)
        return False

    def __str__(self) -> str:
        entry = self.site.entry
        missing = self.store.first_missing(self.index, self.epoch)
        return (
            f"{entry.kind.name} layer {entry.layer} tile {entry.tile} (entry {self.site.place}) "
            f"waits for {missing} of epoch {self.epoch}"
        )


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as text such as `0, 3-7`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
