"""The prefix cache: which blocks hold the K and V of which beginnings of token sequences.

A block of 64 tokens is known under a key that hashes its tokens and all tokens before it, from a
tenant's salt on. A prompt is looked up block by block, so it finds what it shares with any earlier
sequence, prompts and generated tokens alike, wherever the two part.

Layers that see all tokens need every block of the prefix; a group of sliding layers needs only
those that the window behind the prefix touches. Such a window is kept while there is room and never
computed out of order: where it is gone, the prefix counts up to the last place whose windows are
all there, and the tokens from there on are computed again. Windows that were hit, that end a
prompt, or that lie where two prompts part are the last to be taken (`PagePool.keep`); so the second
prompt behind a long shared beginning may compute it again, the third does not.

Blocks of a sequence are released from its end to its beginning, and a sequence holds its prefix as
long as what follows it: so the least recently used block that nobody holds is always the end of
all prefixes it is part of, and taking it never leaves a prefix with a hole in the layers that see
all tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from mkc.compiler.rules import first_token
from mkc.compiler.tile import PAGE_TOKENS
from mkc.runtime.pages import PageLeak, PagePool

NO_BLOCK = -1
KEY_BYTES = 16


def root_key(salt: bytes) -> bytes:
    """What the first block's key continues; tenants with different salts share nothing."""
    return hashlib.blake2b(salt, digest_size=KEY_BYTES).digest()


def next_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block of `tokens` behind the block of key `previous`."""
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def block_keys(
    tokens: Sequence[int], salt: bytes = b"", page_tokens: int = PAGE_TOKENS
) -> list[bytes]:
    """Keys of all whole blocks of a sequence."""
    keys, key = [], root_key(salt)
    for end in range(page_tokens, len(tokens) + 1, page_tokens):
        key = next_key(key, tokens[end - page_tokens : end])
        keys.append(key)
    return keys


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix of `blocks` blocks that every group can continue from.

    known: blocks that the layers which see all tokens have, more than `blocks` where a window is
    gone.
    """

    blocks: int
    known: int


class PrefixCache:
    """Lookup over the pools of all KV groups; `windows` has each group's, None for all tokens."""

    def __init__(
        self,
        pools: Sequence[PagePool],
        windows: Sequence[int | None],
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self.pools, self.windows, self.page_tokens = pools, windows, page_tokens
        self._parents: dict[bytes, bytes] = {}

    def match(self, keys: Sequence[bytes], length: int) -> Hit:
        """The longest prefix of a prompt of `length` tokens, `keys` those of its whole blocks.

        The prompt's last token is fed again in any case, so its block may be part of the prefix.
        """
        best, known = 0, 0
        present = [0] * len(self.pools)  # blocks in a row that a group has up to here
        for index, key in enumerate(keys):
            for group, pool in enumerate(self.pools):
                present[group] = present[group] + 1 if pool.find(key) is not None else 0
            if any(
                window is None and count == 0
                for window, count in zip(self.windows, present, strict=True)
            ):
                break
            known = index + 1
            if all(
                count >= known - self.first_page(window, known, length)
                for window, count in zip(self.windows, present, strict=True)
            ):
                best = known
        return Hit(best, known)

    def first_page(self, window: int | None, blocks: int, length: int) -> int:
        """The first page that a prompt of `length` tokens needs behind a prefix of `blocks`."""
        position = min(blocks * self.page_tokens, length - 1)
        return first_token(position, window) // self.page_tokens

    def take(self, keys: Sequence[bytes], blocks: int, length: int) -> list[list[int]]:
        """Holds a prefix that `match` found: per group the block of each page, -1 before its
        window. Windows taken are kept longer than others."""
        tables = []
        for pool, window in zip(self.pools, self.windows, strict=True):
            first = self.first_page(window, blocks, length)
            table = [NO_BLOCK] * first
            for key in keys[first:blocks]:
                block = pool.find(key)
                if block is None:
                    raise PageLeak("a prefix that was found is gone")
                pool.share(block)
                if window is not None:
                    pool.keep(key)
                table.append(block)
            tables.append(table)
        return tables

    def register(
        self,
        tables: Sequence[list[int]],
        page: int,
        key: bytes,
        parent: bytes,
        boundaries: Sequence[int] = (),
        adopt: bool = False,
    ) -> bool:
        """Makes a sequence's page known, in each group that it has a block for.

        parent: the key of the page before, which the sequence holds under that key. boundaries:
        numbers of blocks behind which other sequences are likely to go on; their windows are kept.
        Where another sequence has made the same tokens known for layers that see all tokens, this
        one takes that block in place of its own if it is to `adopt` it. If not, returns False and
        changes nothing: what follows must not be made known either, since this sequence does not
        hold its whole prefix.
        """
        groups = list(zip(self.pools, self.windows, tables, strict=True))
        known = [pool.find(key) if window is None else None for pool, window, _ in groups]
        is_new = [block in (None, table[page]) for block, table in zip(known, tables, strict=True)]
        if not (adopt or all(is_new)):
            return False
        for (pool, window, table), other in zip(groups, known, strict=True):
            if other is not None:
                if other != table[page]:
                    pool.share(other)
                    pool.release(table[page])
                    table[page] = other
                continue
            if table[page] != NO_BLOCK and pool.find(key) is None:
                pool.register(table[page], key)
            if window is None:
                self._note_parent(pool, key, parent)
            elif any(self._window_start(window, end) <= page < end for end in boundaries):
                pool.keep(key)
        return True

    def _window_start(self, window: int, blocks: int) -> int:
        return first_token(blocks * self.page_tokens, window) // self.page_tokens

    def _note_parent(self, pool: PagePool, key: bytes, parent: bytes) -> None:
        """Remembers a block's parent for `check`, and forgets those of blocks that are gone."""
        self._parents[key] = parent
        if len(self._parents) > 2 * pool.blocks:
            self._parents = {k: p for k, p in self._parents.items() if pool.find(k) is not None}

    def check(self, roots: Sequence[bytes]) -> None:
        """Raises PageLeak if a group that sees all tokens knows a block but not its parent."""
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is not None:
                continue
            self._parents = {k: p for k, p in self._parents.items() if pool.find(k) is not None}
            for parent in self._parents.values():
                if parent not in roots and pool.find(parent) is None:
                    raise PageLeak("a prefix is known without its beginning")

    def forget(self) -> None:
        """Frees all blocks that are only known."""
        for pool in self.pools:
            pool.forget_idle()
        self._parents.clear()
