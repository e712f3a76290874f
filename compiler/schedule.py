"""Pass `schedule`: tasks -> programs, one for each SM, by a cost model over the target.

Within a layer every SM walks the ops in the same order:

    router, qkv, attention, ffn_up, merge, out, ffn_down, residual

- The router leads: its logits decide which experts to stream, the longest chain of a layer.
- Attention follows qkv at once; its pages stream while the routing is being decided.
- The merge of attention splits takes one warp while the others multiply expert tiles.
- `out` needs nothing that is late by then, so it covers the way of the experts' hidden states.

What is left to choose is who takes which tile. The ring lets an SM run up to its depth ahead, so
bytes need to be level over a few layers, not within each one: tiles go to the SM that has streamed
least so far, under a limit per op that keeps any one op from ending late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mkc.compiler.ops import expected_active
from mkc.compiler.place import CONSUMER_WARPS
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.target import Target
from mkc.compiler.tile import FRAGMENT_BYTES, Tiling

Programs = tuple[tuple[Entry, ...], ...]


@dataclass(slots=True)
class _SmProgram:
    """A program under construction: `streamed` bytes so far and the next warp in turn."""

    sm: int
    entries: list[Entry] = field(default_factory=list)
    streamed: float = 0.0
    warp: int = 0

    def add(self, kind: EntryKind, layer: int = 0, tile: int = 0, tasks: int = 1) -> None:
        """Appends an entry whose `tasks` tasks go to the next warps in turn."""
        self.entries.append(Entry(kind, layer, tile, self.warp))
        self.warp = (self.warp + tasks) % CONSUMER_WARPS

    def add_shared(self, kind: EntryKind, layer: int = 0, tile: int = 0) -> None:
        """Appends an entry that all consumer warps work on together."""
        self.entries.append(Entry(kind, layer, tile, 0))


def schedule(tiling: Tiling, target: Target, batch: int = 1) -> Programs:
    """Tile counts -> programs, levelled for steps of `batch` rows with uniform routing."""
    sms = [_SmProgram(sm) for sm in range(target.sms)]
    for tile in range(tiling.hidden_tiles):
        owner_of(sms, tile).add_shared(EntryKind.EMBED, 0, tile)
    for layer in range(len(tiling.layers)):
        _schedule_layer(tiling, sms, layer, batch)
    _schedule_head(tiling, sms)
    return tuple(tuple(program.entries) for program in sms)


def owner_of(sms: list[_SmProgram], tile: int) -> _SmProgram:
    """The SM that owns a tile of residual rows, in every layer."""
    return sms[tile % len(sms)]


def _schedule_layer(tiling: Tiling, sms: list[_SmProgram], layer: int, batch: int) -> None:
    ffn = tiling.layers[layer]
    row_bytes = tiling.hidden_tiles * FRAGMENT_BYTES
    for program in sms:
        program.add_shared(EntryKind.STAGE, layer)
    if ffn.routed:
        router_tiles = -(-ffn.matrices // 16)
        order = _least_streamed(sms)
        for tile in range(router_tiles):
            program = order[tile % len(sms)]
            program.add_shared(EntryKind.ROUTER, layer, tile)
            program.streamed += row_bytes

    limit = -(-tiling.qkv_tiles // len(sms))
    taken = [0] * len(sms)
    for tile in range(tiling.qkv_tiles):
        candidates = [program for program in sms if taken[program.sm] < limit]
        program = min(candidates, key=lambda p: (p.streamed, p.sm))
        taken[program.sm] += 1
        program.add(EntryKind.QKV, layer, tile)
        program.streamed += row_bytes

    for program in sms:
        rank = (program.sm + 37 * layer) % len(sms)
        program.add(EntryKind.ATTENTION, layer, rank, tasks=batch)

    active = expected_active(ffn.matrices, ffn.slots, batch)
    tasks = active * ffn.width_tiles
    for rank, program in enumerate(_least_streamed(sms)):
        share = max(0, -(-(round(tasks) - rank) // len(sms)))
        program.add(EntryKind.FFN_UP, layer, rank, tasks=share)
        program.streamed += share * 2 * row_bytes

    for unit in range(tiling.merge_units):
        sms[(unit + layer) % len(sms)].add(EntryKind.MERGE, layer, unit, tasks=batch)

    for tile in range(tiling.hidden_tiles):
        program = owner_of(sms, tile)
        program.add_shared(EntryKind.OUT, layer, tile)
        program.add_shared(EntryKind.FFN_DOWN, layer, tile)
        program.add_shared(EntryKind.RESIDUAL, layer, tile)
        down_fragments = active * ffn.width_tiles
        program.streamed += (tiling.attention_tiles + down_fragments) * FRAGMENT_BYTES


def _schedule_head(tiling: Tiling, sms: list[_SmProgram]) -> None:
    layer = len(tiling.layers)
    for program in sms:
        program.add_shared(EntryKind.STAGE, layer)
    for rank, program in enumerate(_least_streamed(sms)):
        program.add_shared(EntryKind.HEAD, layer, rank)
    for program in sms:
        program.add_shared(EntryKind.SAMPLE, layer)


def _least_streamed(sms: list[_SmProgram]) -> list[_SmProgram]:
    return sorted(sms, key=lambda program: (program.streamed, program.sm))
