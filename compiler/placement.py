"""Why entries sit where they do: the scheduler's choice seen again, from the programs alone.

The scheduler gives a tile to the SM that has streamed least so far; what each SM had streamed when
a tile was placed follows from the entries before it. Bytes are those of a step of one row with
uniform routing, without K and V pages, as the scheduler counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.tile import FRAGMENT_BYTES
from mkc.compiler.traffic import active_matrices

BY_BYTES = (EntryKind.ROUTER, EntryKind.QKV, EntryKind.FFN_UP, EntryKind.HEAD)
"""Kinds whose tiles or ranks are given out by bytes streamed."""

_RULES = {
    EntryKind.EMBED: "residual tile {tile} has an owner, SM {tile} mod {sms}, where its sum stays",
    EntryKind.STAGE: "every SM brings each layer's whole input to its shared memory",
    EntryKind.ROUTER: "router tiles go first, to the SMs that have streamed least",
    EntryKind.QKV: "to the SM that has streamed least, among those below the op's limit of tiles",
    EntryKind.ATTENTION: "every SM has a rank, another in each layer; splits are dealt to ranks "
    "when lengths are known",
    EntryKind.FFN_UP: "ranks go by bytes streamed, least first; tiles are dealt to ranks when the "
    "routing is known",
    EntryKind.MERGE: "merge tasks are dealt to SMs in turn, from another one in each layer",
    EntryKind.HEAD: "ranks go by bytes streamed, least first; each takes every {sms}th tile",
    EntryKind.SAMPLE: "every SM sends its best token; SM 0 chooses among them",
}


def placement_rule(plan: Plan, entry: Entry) -> str:
    """The rule by which an entry's SM was chosen, as a sentence."""
    owned = (EntryKind.OUT, EntryKind.FFN_DOWN, EntryKind.RESIDUAL)
    kind = EntryKind.EMBED if entry.kind in owned else entry.kind
    return _RULES[kind].format(tile=entry.tile, sms=plan.target.sms)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An SM when a tile was placed: bytes it had streamed, tiles of the op that it had."""

    sm: int
    streamed: int
    tiles: int


def candidates(plan: Plan, entry: Entry) -> list[Candidate]:
    """All SMs when an entry of one of the BY_BYTES kinds was placed, least streamed first."""
    found = []
    for sm, program in enumerate(plan.programs):
        streamed, tiles = 0.0, 0
        for other in program:
            if (other.kind, other.layer) == (entry.kind, entry.layer):
                if other.tile < entry.tile and entry.kind == EntryKind.QKV:
                    streamed += entry_bytes(plan, other)
                    tiles += 1
                continue
            if other.layer > entry.layer or _is_after(plan, other, entry):
                break
            streamed += entry_bytes(plan, other)
        found.append(Candidate(sm, round(streamed), tiles))
    return sorted(found, key=lambda candidate: (candidate.streamed, candidate.sm))


def _is_after(plan: Plan, other: Entry, entry: Entry) -> bool:
    """Whether an entry of the same layer was placed after this one: kinds are placed in order."""
    return other.layer == entry.layer and other.kind > entry.kind


def entry_bytes(plan: Plan, entry: Entry) -> float:
    """Weights that an entry streams in a step of one row with uniform routing."""
    tiling, sms = plan.tiling, plan.target.sms
    row_bytes = tiling.hidden_tiles * FRAGMENT_BYTES
    match entry.kind:
        case EntryKind.ROUTER | EntryKind.QKV:
            return row_bytes
        case EntryKind.OUT:
            return tiling.attention_tiles * FRAGMENT_BYTES
        case EntryKind.HEAD:
            return len(range(entry.tile, tiling.vocab_tiles, sms)) * row_bytes
        case EntryKind.FFN_UP | EntryKind.FFN_DOWN:
            layer = tiling.layers[entry.layer]
            tiles = active_matrices(layer, 1) * layer.width_tiles
            if entry.kind == EntryKind.FFN_DOWN:
                return tiles * FRAGMENT_BYTES
            return max(0, -(-(round(tiles) - entry.tile) // sms)) * 2 * row_bytes
    return 0.0
