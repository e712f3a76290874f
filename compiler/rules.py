"""The dynamic choices of a step, as pure functions of values that every SM sees.

Row lengths and routing are known only when a step runs. What each SM then does follows from these
rules, so no queue and no host work exist. `templates/rules.cuh` states the same rules in CUDA; the
interpreter, the proofs and the simulator use the ones here.

All results depend on a row's own length and routing alone, apart from *where* work is done: a row
gets the same bits whatever its neighbours are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mkc.compiler.tile import FRAGMENT_EDGE, PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class AttentionUnit:
    """One split of one row's attention under one KV head: pages [first_page, end_page).

    Positions are those of the row's tokens; `is_last` marks the split that holds the new token.
    """

    row: int
    kv_head: int
    split: int
    first_page: int
    end_page: int
    is_last: bool


def first_token(position: int, window: int | None) -> int:
    """The oldest token that a query at `position` sees; the window includes the query itself."""
    return 0 if window is None else max(0, position - window + 1)


def page_span(position: int, window: int | None) -> tuple[int, int]:
    """(first page, number of pages) that a query at `position` reads, its own page included."""
    first = first_token(position, window) // PAGE_TOKENS
    return first, position // PAGE_TOKENS - first + 1


def split_count(position: int | None, window: int | None, max_splits: int) -> int:
    """Splits of each KV head of a row: one per page, at most `max_splits`; 0 for an idle row."""
    if position is None:
        return 0
    return min(page_span(position, window)[1], max_splits)


def attention_units(
    rank: int,
    sms: int,
    positions: Sequence[int | None],
    window: int | None,
    kv_heads: int,
    max_splits: int,
) -> list[AttentionUnit]:
    """The splits of all rows that the SM of this rank works on, in ring order; None = idle row.

    A row's splits are dealt to consecutive ranks, the next row going on where the last one ended.
    kv_heads * max_splits <= sms, so a rank has at most one split of a row.
    """
    units = []
    base = 0
    for row, position in enumerate(positions):
        splits = split_count(position, window, max_splits)
        unit = (rank - base) % sms
        base += kv_heads * splits
        if position is None or unit >= kv_heads * splits:
            continue
        first, pages = page_span(position, window)
        kv_head, split = divmod(unit, splits)
        units.append(
            AttentionUnit(
                row,
                kv_head,
                split,
                first + split * pages // splits,
                first + (split + 1) * pages // splits,
                split == splits - 1,
            )
        )
    return units


def top_experts(logits: Sequence[float], count: int) -> list[int]:
    """The `count` largest logits' ids, ascending by id; ties go to the lower id."""
    order = sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))
    return sorted(order[:count])


def active_experts(chosen: Sequence[Sequence[int]]) -> list[int]:
    """Experts that any row chose, ascending: the order in which all phases of an FFN walk them."""
    return sorted({expert for row in chosen for expert in row})


def ffn_up_tasks(rank: int, sms: int, active: int, width_tiles: int) -> list[tuple[int, int]]:
    """(index of the active expert, tile) of each gate-and-up task of the SM of this rank."""
    return [divmod(task, width_tiles) for task in range(rank, active * width_tiles, sms)]


def tiles_of_chunk(chunk_fragments: int, head_tiles: int) -> int:
    """16-token tiles of K or V in a chunk, a page at most."""
    return min(chunk_fragments // head_tiles, PAGE_TOKENS // FRAGMENT_EDGE)


def chunk_span(
    unit: AttentionUnit, position: int, window: int | None, chunk_tokens: int
) -> tuple[int, int]:
    """[begin, end): chunks of a split with a token that the row sees, from the row's first on.

    Each stands for a chunk of K and one of V, which follow one another in the ring.
    """
    page_chunks = PAGE_TOKENS // chunk_tokens
    begin = max(unit.first_page * page_chunks, first_token(position, window) // chunk_tokens)
    return begin, min(unit.end_page * page_chunks, position // chunk_tokens + 1)
