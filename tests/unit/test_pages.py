"""The page pool and the prefix cache, against models of what they should be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mkc.runtime.pages import OutOfPages, PageLeak, PagePool
from mkc.runtime.prefix import PrefixCache, block_keys

BLOCKS = 5


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, write, name and leave blocks in any order."""

    held: Bundle[int] = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(BLOCKS)
        self.holders: Counter[int] = Counter()
        self.keys: dict[bytes, int] = {}

    @rule(target=held)
    def allocate(self) -> int:
        available = self.pool.available
        if available == 0:
            with pytest.raises(OutOfPages):
                self.pool.allocate()
            return -1
        block = self.pool.allocate()
        assert self.holders[block] == 0
        self.keys = {key: other for key, other in self.keys.items() if other != block}
        self.holders[block] = 1
        assert self.pool.available == available - 1
        return block

    @rule(target=held, block=held)
    def share(self, block: int) -> int:
        if self.holders[block]:
            self.pool.share(block)
            self.holders[block] += 1
            return block
        return -1

    @rule(block=consumes(held))
    def release(self, block: int) -> None:
        if self.holders[block]:
            self.pool.release(block)
            self.holders[block] -= 1

    @rule(block=held, key=st.sampled_from([b"a", b"b", b"c"]))
    def register(self, block: int, key: bytes) -> None:
        if self.holders[block] and block not in self.keys.values():
            assert self.pool.register(block, key) == (key not in self.keys)
            self.keys.setdefault(key, block)

    @rule(target=held, key=st.sampled_from([b"a", b"b", b"c"]), keep=st.booleans())
    def find(self, key: bytes, keep: bool) -> int:
        block = self.pool.find(key)
        assert block == self.keys.get(key)
        if keep:
            self.pool.keep(key)
        if block is None:
            return -1
        self.pool.share(block)
        self.holders[block] += 1
        return block

    @rule(target=held, block=consumes(held))
    def write(self, block: int) -> int:
        if not self.holders[block]:
            return -1
        is_own = self.holders[block] == 1 and block not in self.keys.values()
        if not is_own and self.pool.available == 0:
            with pytest.raises(OutOfPages):
                self.pool.make_private(block)
            return block
        private = self.pool.make_private(block)
        assert (private == block) == is_own
        if not is_own:
            assert self.holders[private] == 0
            self.keys = {key: other for key, other in self.keys.items() if other != private}
            self.holders[block] -= 1
            self.holders[private] = 1
        return private

    @rule()
    def forget(self) -> None:
        self.pool.forget_idle()
        self.keys = {key: block for key, block in self.keys.items() if self.holders[block]}

    @invariant()
    def is_whole(self) -> None:
        self.pool.check(self.holders.elements())
        assert self.pool.available == BLOCKS - sum(1 for n in self.holders.values() if n)
        assert self.pool.cached == len(self.keys)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
)


def test_idle_blocks_are_taken_least_recently_used_first_and_kept_ones_last() -> None:
    pool = PagePool(4)
    for block, key in enumerate((b"a", b"b", b"c", b"d")):
        assert pool.allocate() == block
        pool.register(block, key)
    pool.keep(b"a")
    for block in (0, 2, 1, 3):
        pool.release(block)
    assert pool.available_plain == 3
    assert [pool.allocate() for _ in range(4)] == [2, 1, 3, 0]
    assert all(pool.find(key) is None for key in (b"a", b"b", b"c", b"d"))


def test_at_most_half_of_a_pool_is_kept() -> None:
    pool = PagePool(4)
    for block, key in enumerate((b"a", b"b", b"c")):
        pool.register(pool.allocate(), key)
        pool.keep(key)
        pool.release(block)
    assert pool.available_plain == 2
    assert [pool.allocate() for _ in range(4)] == [3, 0, 1, 2]


def test_what_contradicts_itself_is_a_leak() -> None:
    pool = PagePool(2)
    block = pool.allocate()
    with pytest.raises(PageLeak, match="block 0 has 1 holders, 0 are known"):
        pool.check([])
    pool.release(block)
    with pytest.raises(PageLeak, match="more often"):
        pool.release(block)
    with pytest.raises(PageLeak, match="free and cannot be shared"):
        pool.share(block)


def test_keys_depend_on_all_tokens_before_them_and_on_the_salt() -> None:
    keys = block_keys(list(range(12)), page_tokens=4)
    assert len(keys) == 3
    assert keys[:2] == block_keys(list(range(11)), page_tokens=4)
    changed = block_keys([1, *range(1, 12)], page_tokens=4)
    assert not set(keys) & set(changed)
    assert not set(keys) & set(block_keys(list(range(12)), b"tenant", 4))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    present=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8),
    window=st.integers(1, 14),
    rest=st.integers(0, 3),
)
def test_a_prefix_is_the_longest_that_every_group_can_continue(
    present: list[tuple[bool, bool]], window: int, rest: int
) -> None:
    """Against the definition, token by token."""
    size = 4
    length = len(present) * size + rest
    keys = block_keys([7] * length, page_tokens=size)
    pools = [PagePool(10), PagePool(10)]
    for key, found in zip(keys, present, strict=True):
        for pool, is_there in zip(pools, found, strict=True):
            if is_there:
                pool.register(pool.allocate(), key)
    best = 0
    for blocks in range(len(keys) + 1):
        position = min(blocks * size, length - 1)  # the next token to be stored
        full = range(blocks * size)
        seen = range(max(0, position - window + 1), blocks * size)
        if all(present[t // size][0] for t in full) and all(present[t // size][1] for t in seen):
            best = blocks
    hit = PrefixCache(pools, (None, window), size).match(keys, length)
    assert hit.blocks == best
    assert hit.known >= best
