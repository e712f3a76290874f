"""A `Device` whose steps cost nothing and whose tokens tell whether pages are what they should be.

A page's slots hold the (position, token) that were stored there. The next token of a row is a hash
of all that the row sees in its pages, group by group, so a page that is shared, reused, trimmed or
restored wrongly changes the tokens; `expected_tokens` says what they are without any pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mkc.compiler.rules import first_token
from mkc.runtime.device import Piece
from mkc.runtime.executor import IDLE_ROW
from mkc.runtime.paging import Paging
from mkc.runtime.request import Sampling

Slot = tuple[int, int]
VOCABULARY = 7
BAD_TOKEN = 99  # a prompt with it cannot be prefilled


def next_token(seen: Sequence[Sequence[Slot]]) -> int:
    value = 1
    for group in seen:
        for position, token in group:
            value = (value * 31 + position * 7 + token + 3) % 1_000_003
    return value // 13 % VOCABULARY


def expected_tokens(
    prompt: Sequence[int], length: int, windows: Sequence[int | None], stops: frozenset[int]
) -> list[int]:
    """What a request's tokens are when it is alone, up to a stop token or `length` in all."""
    tokens = list(prompt)
    while len(tokens) < length:
        slots = list(enumerate(tokens))
        seen = [slots[first_token(len(tokens) - 1, window) :] for window in windows]
        tokens.append(next_token(seen))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class FakeDevice:
    """Does everything at once when it is asked to, as a stream does in the end.

    Stores only in blocks that `paging` has as one sequence's own. `fail_steps`: numbers of steps
    whose results raise.
    """

    def __init__(
        self, paging: Paging, max_rows: int, fail_steps: frozenset[int] = frozenset()
    ) -> None:
        self.max_rows, self._paging, self._fail_steps = max_rows, paging, fail_steps
        self._size = paging.page_tokens
        self.pools: list[list[list[Slot | None]]] = [
            [[None] * self._size for _ in range(pool.blocks)] for pool in paging.pools
        ]
        self.rows: list[dict[str, int] | None] = [None] * max_rows
        self.tables: list[list[list[int]]] = [[[] for _ in paging.pools] for _ in range(max_rows)]
        self.steps = 0
        self.prefilled = 0

    def prefill(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            assert BAD_TOKEN not in piece.tokens, "a token that cannot be"
            for offset, token in enumerate(piece.tokens):
                self._check_old(piece.tables, piece.start + offset)
                self._store(piece.tables, piece.start + offset, token)
            self.prefilled += len(piece.tokens)

    def start_row(
        self,
        row: int,
        token: int,
        position: int,
        limit: int,
        tables: Sequence[Sequence[int]],
        sampling: Sampling,
    ) -> None:
        assert self.rows[row] is None
        self.rows[row] = {"token": token, "position": position, "limit": limit, "active": 1}
        self.tables[row] = [list(table) for table in tables]

    def set_block(self, row: int, group: int, page: int, block: int) -> None:
        assert len(self.tables[row][group]) == page
        self.tables[row][group].append(block)

    def move_row(self, source: int, target: int) -> None:
        values = self.rows[source]
        assert values is not None
        self.rows[target] = dict(values)
        self.tables[target] = [list(table) for table in self.tables[source]]

    def stop_row(self, row: int) -> None:
        self.rows[row] = None

    def copy_block(self, group: int, source: int, target: int) -> None:
        self.pools[group][target] = list(self.pools[group][source])

    def save(self, blocks: Sequence[Sequence[int]]) -> list[list[list[Slot | None]]]:
        return [
            [list(pool[block]) for block in group]
            for pool, group in zip(self.pools, blocks, strict=True)
        ]

    def load(self, saved: list[list[list[Slot | None]]], blocks: Sequence[Sequence[int]]) -> None:
        for pool, group, contents in zip(self.pools, blocks, saved, strict=True):
            for block, slots in zip(group, contents, strict=True):
                pool[block] = list(slots)

    def step(self, rows: int) -> Callable[[], list[int]]:
        self.steps += 1
        step = self.steps
        tokens = [self._feed(row) for row in range(rows)]

        def result() -> list[int]:
            if step in self._fail_steps:
                raise ArithmeticError(f"step {step}")
            return tokens

        return result

    def _feed(self, row: int) -> int:
        values = self.rows[row]
        assert values is not None, f"row {row} takes part in a step and is idle"
        if not values["active"]:
            return IDLE_ROW
        position, tables = values["position"], self.tables[row]
        self._store(tables, position, values["token"])
        seen = [
            [
                self._slot(group, tables[group], p)
                for p in range(first_token(position, w), position + 1)
            ]
            for group, w in enumerate(self._paging.windows)
        ]
        values["token"] = next_token(seen)
        values["position"] += 1
        values["active"] = int(values["position"] < values["limit"])
        return values["token"]

    def _store(self, tables: Sequence[Sequence[int]], position: int, token: int) -> None:
        page, slot = divmod(position, self._size)
        for group, table in enumerate(tables):
            pool, block = self._paging.pools[group], table[page]
            assert pool.make_private(block) == block, "a block that others see is written"
            self.pools[group][block][slot] = (position, token)

    def _check_old(self, tables: Sequence[Sequence[int]], position: int) -> None:
        """All that a prompt's token sees has been stored."""
        for group, window in enumerate(self._paging.windows):
            for seen in range(first_token(position, window), position):
                assert self._slot(group, tables[group], seen)[0] == seen

    def _slot(self, group: int, table: Sequence[int], position: int) -> Slot:
        page, slot = divmod(position, self._size)
        assert table[page] >= 0, f"page {page} of group {group} is gone"
        found = self.pools[group][table[page]][slot]
        return (-1, -1) if found is None else found
