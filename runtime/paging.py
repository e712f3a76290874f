"""`Paging`: the pages of sequences: what each holds, needs next, and gives back."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from mkc.compiler.rules import first_token
from mkc.compiler.tile import PAGE_TOKENS
from mkc.runtime.pages import OutOfPages, PagePool
from mkc.runtime.prefix import NO_BLOCK, Hit, PrefixCache, block_keys, next_key, root_key
from mkc.runtime.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way.

    tokens: the prompt and what was decoded. length: tokens at which it ends. order: its place among
    all requests. stored: tokens whose K and V lie in its pages. tables: per KV group the block of
    each page, -1 where there is none (any more). row: its place in the batch, None unless it
    decodes; queued: steps under way that it is part of. known: its first blocks that the prefix
    cache knows; is_registering: whether it is told of more. saved: its pages' bytes, kept by the
    device while it is preempted. passed: times that later requests were admitted before it.
    """

    request: Request
    tokens: list[int]
    length: int
    order: int
    keys: list[bytes]
    tables: list[list[int]]
    stored: int = 0
    row: int | None = None
    queued: int = 0
    known: int = 0
    is_registering: bool = True
    was_preempted: bool = False
    boundaries: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    passed: int = 0
    saved: Any = None
    is_finished: bool = False

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.tokens)

    @property
    def is_ready(self) -> bool:
        """Whether all tokens but the one to be fed next are stored."""
        return self.stored == len(self.tokens) - 1


class Paging:
    """Pools of all KV groups, and the sequences' use of them."""

    def __init__(
        self,
        blocks: Seq[int],
        windows: Seq[int | None],
        prefix_cache: bool = True,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self.windows, self.page_tokens = tuple(windows), page_tokens
        self.pools = [PagePool(count) for count in blocks]
        self.cache = PrefixCache(self.pools, self.windows, page_tokens)
        self.prefix_cache = prefix_cache
        self._roots: set[bytes] = set()

    def longest(self) -> int:
        """Tokens of the longest sequence that the pools hold when it is alone; the last of them is
        never stored."""
        pages = 1 << 40
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is None or pool.blocks < self._window_pages(window):
                pages = min(pages, pool.blocks)
        return pages * self.page_tokens + 1

    def open(self, request: Request, length: int, order: int) -> Sequence:
        """A sequence without pages."""
        keys = block_keys(request.tokens, request.salt, self.page_tokens)
        self._roots.add(root_key(request.salt))
        tables: list[list[int]] = [[] for _ in self.pools]
        sequence = Sequence(request, list(request.tokens), length, order, keys, tables)
        sequence.is_registering = self.prefix_cache
        return sequence

    def match(self, sequence: Sequence) -> Hit:
        """The prefix of a prompt that is known."""
        if not self.prefix_cache:
            return Hit(0, 0)
        return self.cache.match(sequence.keys, sequence.prompt_length)

    def needed(self, sequence: Sequence, blocks: int) -> list[int]:
        """Blocks, free or idle, that a prompt takes from each pool behind a prefix of `blocks`.

        All of them where layers see all tokens; elsewhere as many as the window needs at once.
        """
        length, counts = sequence.prompt_length, []
        pages = (length - 1) // self.page_tokens + 1
        for pool, window in zip(self.pools, self.windows, strict=True):
            first = self.cache.first_page(window, blocks, length)
            found = [pool.find(key) for key in sequence.keys[first:blocks]]
            idle = sum(block is not None and not pool.is_held(block) for block in found)
            new = pages - blocks + (1 if self._is_whole(length, blocks) else 0)
            if window is not None:
                new = min(new, max(1, self._window_pages(window) - len(found)))
            counts.append(idle + new)
        return counts

    def start(self, sequence: Sequence, hit: Hit, blocks: int) -> list[tuple[int, int, int]]:
        """Gives a sequence the first `blocks` blocks of what `match` found.

        Returns blocks to copy, (group, source, target): the prompt's last token is fed again, and
        if its block is part of the prefix the sequence needs one of its own.
        """
        length = sequence.prompt_length
        sequence.tables = self.cache.take(sequence.keys, blocks, length)
        sequence.stored = sequence.cached_tokens = min(blocks * self.page_tokens, length - 1)
        sequence.known = blocks
        sequence.boundaries = [length // self.page_tokens]
        if hit.known > blocks:
            sequence.boundaries.append(hit.known)
        copies = []
        if self._is_whole(length, blocks):
            sequence.known = blocks - 1
            for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
                shared = table[-1]
                table[-1] = pool.make_private(shared)
                if table[-1] != shared:
                    copies.append((group, shared, table[-1]))
        return copies

    def fit(self, sequence: Sequence, end: int) -> int:
        """The last position up to `end` that a sequence can be extended to at once.

        It takes no blocks that are kept if it gets any further without them.
        """
        plain = [pool.available_plain for pool in self.pools]
        for available in (plain, [pool.available for pool in self.pools]):
            counts = zip(sequence.tables, available, strict=True)
            pages = min(len(table) + count for table, count in counts)
            if pages * self.page_tokens > sequence.stored:
                return min(end, pages * self.page_tokens)
        return sequence.stored

    def extend(self, sequence: Sequence, end: int) -> list[tuple[int, int, int]]:
        """Gives a sequence the pages of its tokens before `end`: (group, page, block) of new ones.

        Raises OutOfPages, and changes nothing, if a pool lacks blocks.
        """
        pages = -(-end // self.page_tokens)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            if pages - len(table) > pool.available:
                raise OutOfPages
        added = []
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            while len(table) < pages:
                table.append(pool.allocate())
                added.append((group, len(table) - 1, table[-1]))
        return added

    def advance(self, sequence: Sequence, stored: int) -> bool:
        """Notes that a sequence has `stored` tokens in its pages: whole blocks become known, and
        pages behind a window are given back. Returns whether any was."""
        sequence.stored = stored
        self._register(sequence)
        is_any = False
        for pool, window, table in zip(self.pools, self.windows, sequence.tables, strict=True):
            page = min(first_token(stored, window) // self.page_tokens, len(table)) - 1
            while page >= 0 and table[page] != NO_BLOCK:
                pool.release(table[page])
                table[page] = NO_BLOCK
                page -= 1
                is_any = True
        return is_any

    def release(self, sequence: Sequence) -> None:
        """Gives all pages of a sequence back, its end first."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            for block in reversed(table):
                if block != NO_BLOCK:
                    pool.release(block)
            table.clear()
        sequence.known = 0

    def held(self, sequence: Sequence) -> list[list[int]]:
        """Per group the blocks that a sequence holds, oldest first."""
        return [[b for b in table if b != NO_BLOCK] for table in sequence.tables]

    def can_take(self, counts: Seq[int], spare: int) -> bool:
        """Whether each pool has so many blocks and `spare` more."""
        pairs = zip(self.pools, counts, strict=True)
        return all(pool.available >= count + spare for pool, count in pairs)

    def take(self, first_pages: Seq[int], counts: Seq[int]) -> list[list[int]]:
        """Tables with new blocks for `counts` pages of each group, from its first page on."""
        return [
            [NO_BLOCK] * first + [pool.allocate() for _ in range(count)]
            for pool, first, count in zip(self.pools, first_pages, counts, strict=True)
        ]

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises PageLeak unless these sequences hold exactly what is held."""
        held = [self.held(sequence) for sequence in sequences]
        for group, pool in enumerate(self.pools):
            pool.check([block for tables in held for block in tables[group]])
        self.cache.check(list(self._roots))

    def _register(self, sequence: Sequence) -> None:
        size = self.page_tokens
        while sequence.is_registering and (sequence.known + 1) * size <= sequence.stored:
            page, keys = sequence.known, sequence.keys
            parent = keys[page - 1] if page else root_key(sequence.request.salt)
            if page == len(keys):
                keys.append(next_key(parent, sequence.tokens[page * size : (page + 1) * size]))
            sequence.is_registering = self.cache.register(
                sequence.tables,
                page,
                keys[page],
                parent,
                sequence.boundaries,
                adopt=sequence.row is None and not sequence.was_preempted,
            )
            sequence.known += sequence.is_registering

    def _is_whole(self, length: int, blocks: int) -> bool:
        """Whether a prefix is the whole prompt."""
        return blocks * self.page_tokens >= length

    def _window_pages(self, window: int) -> int:
        """Pages that a window touches at most."""
        return -(-window // self.page_tokens) + 1
