"""Proof that the dynamic rules part the work, against statements that do not use them.

What a step does follows from lengths and routing by the functions in `rules`. Here they are held
against what they are for:

- attention: for every KV head of a row, the chunks of all ranks' splits, in the order of the
  splits, are the chunks that hold a token in the window, each once, and no split is without one
  (the warp of the last pair of chunks finishes a split, so a split without chunks would never be
  sent). Shown for lengths around every edge of pages, chunks and window that the first pages have,
  and of a longest row. A rule depends on a length by its page count, its window edge and its last
  page, and on the page count only through `n * pages // splits`, which parts any count of pages;
- experts: for every number of active experts that a layer can have, the ranks' tasks are all tiles
  of all active experts, each once, and experts are walked in one order that holds each chosen one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mkc.compiler import rules
from mkc.compiler.plan import Plan
from mkc.compiler.proof import Property, VerifyError
from mkc.compiler.rules import AttentionUnit
from mkc.compiler.tile import FRAGMENT_EDGE, PAGE_TOKENS

Units = Callable[[int, int, Sequence[int | None], int | None, int, int], list[AttentionUnit]]
EDGE_PAGES = 4


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules under proof."""

    attention_units: Units = rules.attention_units
    chunk_span: Callable[[AttentionUnit, int, int | None, int], tuple[int, int]] = rules.chunk_span
    first_token: Callable[[int, int | None], int] = rules.first_token
    active_experts: Callable[[Sequence[Sequence[int]]], list[int]] = rules.active_experts
    ffn_up_tasks: Callable[[int, int, int, int], list[tuple[int, int]]] = rules.ffn_up_tasks


def check_rules(plan: Plan, under_proof: Rules | None = None) -> list[Property]:
    """Shows that the rules part the work of every op with dynamic tasks.

    Raises VerifyError MKC302 (a task is done twice or not at all) or MKC304 (a split that would
    never end).
    """
    chosen = under_proof or Rules()
    splits = sum(_check_window(plan, chosen, window) for window in _windows(plan))
    tasks = sum(
        _check_experts(plan, chosen, matrices, width)
        for matrices, width in {(layer.matrices, layer.width_tiles) for layer in plan.tiling.layers}
    )
    _check_lists(plan, chosen)
    return [
        Property(
            "attention tokens",
            "for lengths around every edge of page, chunk and window, the splits of a KV head hold "
            "each chunk with a visible token once, none is empty, and the last has the new token",
            splits,
        ),
        Property(
            "expert tasks",
            "for every number of active experts, the tasks of all ranks are the tiles of all "
            "active experts, each once",
            tasks,
        ),
    ]


def _windows(plan: Plan) -> list[int | None]:
    return list(dict.fromkeys(layer.window for layer in plan.spec.layers))


def edge_positions(last: int, window: int | None) -> list[int]:
    """Positions at which a rule could go wrong: both sides of the edges of tiles and pages, for the
    new token and for the oldest in the window."""
    starts = {page * PAGE_TOKENS for page in range(EDGE_PAGES)}
    starts |= {tile * FRAGMENT_EDGE for tile in range(PAGE_TOKENS // FRAGMENT_EDGE)}
    starts |= {last, last // PAGE_TOKENS * PAGE_TOKENS, last // 2, last // 3}
    if window is not None:
        starts |= {window + start for start in set(starts)}
    found = {start + near for start in starts for near in (-2, -1, 0, 1)}
    return sorted(position for position in found if 0 <= position <= last)


def _check_window(plan: Plan, chosen: Rules, window: int | None) -> int:
    tiling = plan.tiling
    tiles = rules.tiles_of_chunk(tiling.chunk_fragments, tiling.head_tiles)
    tokens, total = tiles * FRAGMENT_EDGE, 0
    for position in edge_positions(plan.spec.max_positions - 1, window):
        oldest = 0 if window is None else max(0, position + 1 - window)
        if chosen.first_token(position, window) != oldest:
            raise VerifyError(
                "MKC302", f"at position {position} with window {window} token {oldest} is the first"
            )
        total += _check_position(
            plan, chosen, window, position, range(oldest, position + 1), tokens
        )
    return total


def _check_position(
    plan: Plan, chosen: Rules, window: int | None, position: int, visible: range, tokens: int
) -> int:
    tiling, sms = plan.tiling, plan.target.sms
    heads: dict[int, list[AttentionUnit]] = {}
    for rank in range(sms):
        for unit in chosen.attention_units(
            rank, sms, [position], window, tiling.kv_heads, tiling.max_splits
        ):
            heads.setdefault(unit.kv_head, []).append(unit)
    where = f"at position {position} with window {window}"
    if sorted(heads) != list(range(tiling.kv_heads)):
        raise VerifyError("MKC302", f"{where} the KV heads {sorted(heads)} are attended to")
    count = 0
    for head, units in heads.items():
        units.sort(key=lambda unit: unit.split)
        if [unit.split for unit in units] != list(range(len(units))):
            raise VerifyError("MKC302", f"{where} the splits of KV head {head} are not numbered")
        at = visible.start // tokens
        for unit in units:
            begin, end = chosen.chunk_span(unit, position, window, tokens)
            if end <= begin:
                raise VerifyError("MKC304", f"{where} split {unit.split} has no chunk")
            if begin != at:
                raise VerifyError(
                    "MKC302", f"{where} split {unit.split} begins at chunk {begin}, not {at}"
                )
            if unit.is_last != (unit is units[-1]):
                raise VerifyError("MKC302", f"{where} split {unit.split} has the new token's mark")
            at = end
        if at != (visible.stop - 1) // tokens + 1:
            raise VerifyError("MKC302", f"{where} the splits of KV head {head} end at chunk {at}")
        count += len(units)
    return count


def _check_experts(plan: Plan, chosen: Rules, matrices: int, width: int) -> int:
    sms, total = plan.target.sms, 0
    for active in range(matrices + 1):
        done = Counter(
            task for rank in range(sms) for task in chosen.ffn_up_tasks(rank, sms, active, width)
        )
        if len(done) != active * width or set(done.values()) - {1}:
            raise VerifyError("MKC302", f"of {active} active experts {len(done)} tiles are done")
        if any(not (0 <= index < active and 0 <= tile < width) for index, tile in done):
            raise VerifyError("MKC302", f"a tile of more than {active} active experts is done")
        total += len(done)
    return total


def _check_lists(plan: Plan, chosen: Rules) -> None:
    for layer in plan.tiling.layers:
        for rows in _choices(layer.matrices, layer.slots, plan.tiling.max_rows):
            wanted = {expert for row in rows for expert in row}
            if chosen.active_experts(rows) != sorted(wanted):
                raise VerifyError("MKC302", f"rows that chose {rows} do not walk {sorted(wanted)}")


def _choices(matrices: int, slots: int, max_rows: int) -> Iterator[list[list[int]]]:
    """Rows that choose as unlike, as alike, and as partly alike as they can; and no rows."""
    for stride in (slots, 0, 1):
        yield [
            sorted({(row * stride + slot) % matrices for slot in range(slots)})
            for row in range(max_rows)
        ]
    yield []
