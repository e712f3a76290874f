"""`PagePool`: who holds which block of one KV group, by reference counts.

A block holds the pages of 64 tokens in all layers of its group. It is free, held by one or more
sequences, or idle: held by none, but still known under a key (see `prefix.py`) and so ready to be
held again. Allocation takes free blocks first, then idle ones, the least recently used first.

A block that has a key or a second holder is never written: `make_private` says which block to write
instead. Blocks are numbers; their bytes are moved by whoever calls.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class OutOfPages(Exception):
    """No block is free or idle. Caught by the scheduler, which then makes room or waits."""


class PageLeak(Exception):
    """The pool contradicts itself or its holders: a fault of mkc."""


class PagePool:
    """Blocks 0 to `blocks` - 1 of one KV group."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(reversed(range(blocks)))
        self._holders = [0] * blocks
        self._keys: list[bytes | None] = [None] * blocks
        self._by_key: dict[bytes, int] = {}
        self._is_kept = [False] * blocks
        # Least recently used first; kept ones are taken only when there is no other.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_kept: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give at once."""
        return len(self._free) + len(self._idle) + len(self._idle_kept)

    @property
    def available_plain(self) -> int:
        """Those of them that `keep` was not asked for."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that have a key."""
        return len(self._by_key)

    def allocate(self) -> int:
        """A block without key, held once. Raises OutOfPages."""
        if self._free:
            block = self._free.pop()
        elif self._idle or self._idle_kept:
            block, _ = (self._idle or self._idle_kept).popitem(last=False)
            self._forget(block)
        else:
            raise OutOfPages
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block that is held or idle."""
        if self._holders[block] == 0:
            if self._keys[block] is None:
                raise PageLeak(f"block {block} is free and cannot be shared")
            self._idle.pop(block, None)
            self._idle_kept.pop(block, None)
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the last one leaves the block idle if it has a key, free if not."""
        if self._holders[block] == 0:
            raise PageLeak(f"block {block} is released more often than it was held")
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._lay_idle(block)

    def make_private(self, block: int) -> int:
        """The block that a holder of `block` may write: itself, or a new one that the caller copies
        it to. The holder then holds the new one in its place. Raises OutOfPages."""
        if self._holders[block] == 1 and self._keys[block] is None:
            return block
        private = self.allocate()
        self.release(block)
        return private

    def is_held(self, block: int) -> bool:
        """Whether anybody holds the block."""
        return self._holders[block] > 0

    def find(self, key: bytes) -> int | None:
        """The block known under a key."""
        return self._by_key.get(key)

    def register(self, block: int, key: bytes) -> bool:
        """Makes a held block known, from now on never written; False if another has the key."""
        if key in self._by_key:
            return self._by_key[key] == block
        if self._holders[block] == 0 or self._keys[block] is not None:
            raise PageLeak(f"block {block} cannot be given a key")
        self._keys[block] = key
        self._by_key[key] = block
        return True

    def keep(self, key: bytes) -> None:
        """Among idle blocks, the one known under a key is taken after those without this mark."""
        block = self._by_key.get(key)
        if block is None:
            return
        self._is_kept[block] = True
        if block in self._idle:
            del self._idle[block]
            self._lay_idle(block)

    def forget_idle(self) -> None:
        """Frees all idle blocks."""
        for block in [*self._idle, *self._idle_kept]:
            self._forget(block)
            self._free.append(block)
        self._idle.clear()
        self._idle_kept.clear()

    def check(self, held: Iterable[int]) -> None:
        """Raises PageLeak unless the pool is whole and `held`, one mention for each holder of each
        block, is all that is held."""
        counts = Counter(held)
        states = Counter([*self._free, *self._idle, *self._idle_kept])
        for block in range(self.blocks):
            holders, key = self._holders[block], self._keys[block]
            if holders != counts[block]:
                raise PageLeak(f"block {block} has {holders} holders, {counts[block]} are known")
            if states[block] != (holders == 0):
                raise PageLeak(f"block {block} with {holders} holders is listed {states[block]}x")
            if key is not None and self._by_key.get(key) != block:
                raise PageLeak(f"block {block} has the key of another block")
            is_idle = block in self._idle or block in self._idle_kept
            if holders == 0 and is_idle != (key is not None):
                raise PageLeak(f"block {block} is idle without a key, or free with one")
            if is_idle and self._is_kept[block] != (block in self._idle_kept):
                raise PageLeak(f"block {block} is in the wrong order of idle blocks")
        if len(self._by_key) != sum(key is not None for key in self._keys):
            raise PageLeak("a key leads to a block that does not have it")

    def _lay_idle(self, block: int) -> None:
        """Notes a block as idle. Of more kept ones than half the pool the oldest loses its mark."""
        order = self._idle_kept if self._is_kept[block] else self._idle
        order[block] = None
        if len(self._idle_kept) > self.blocks // 2:
            oldest, _ = self._idle_kept.popitem(last=False)
            self._is_kept[oldest] = False
            self._idle[oldest] = None

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
        self._keys[block] = None
        self._is_kept[block] = False
