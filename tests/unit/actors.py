"""A step of a plan as its warps do it: consumers, producer and helpers of every SM, wait by wait.

The model has the kernel's waits and nothing of its arithmetic. Every word of memory that warps
share holds the name of what lies in it, and whoever reads it says what it should be: a chunk that
has not landed or was overwritten, a sum that was not collected, a state that was not taken, a
routing of another layer, all end in `ModelError`, and so does a deadlock. `faults` names rules to
break, one by one: a model that finds no fault in them would be worth nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from actor_world import Actor, Barrier, Condition, Fabric, Meeting, demand
from mkc.compiler.place import CONSUMER_WARPS, HELPER_WARPS, SCRATCH_WORDS_PER_PARCEL, scratch_words
from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.rules import (
    AttentionUnit,
    active_experts,
    attention_units,
    chunk_span,
    split_count,
    tiles_of_chunk,
)
from mkc.compiler.slices import Slicing, TileStream, slicing_of, tile_stream
from mkc.compiler.tile import FRAGMENT_EDGE, MERGE_DIMS

FAULTS = (
    "arrivals",  # the first sharer of a chunk gives it back with one arrival less, the rest too
    "active",  # the producer counts one active expert more
    "shift",  # the producer's stream of an FFN begins a chunk late
    "slot",  # the producer does not wait for room in the ring
    "window",  # nor for the chunk a window before
    "issued",  # a warp does not look whether its chunk was sent for
    "landed",  # nor whether it has landed
    "empty share",  # a warp gives back a chunk that it has nothing in without waiting for it
    "depth",  # sums are opened a tile too early
    "collected",  # or without waiting at all
    "deposited",  # sums are collected before all parts are there
    "lent",  # a state is absorbed before it is lent
    "taken",  # scratch is used before the state in it was taken
    "routing",  # consumers use a routing that may not be ready
    "begun",  # a routing table is filled again while a warp may use it
    "helpers meet",  # a routing is published before all rows' experts are in it
)


@dataclass
class Case:
    """A step: positions of the rows (None: idle), the experts each chose by layer, and the ring."""

    plan: Plan
    positions: Sequence[int | None]
    chosen: dict[int, list[list[int]]]
    slots: int
    window: int
    faults: frozenset[str] = frozenset()

    @cached_property
    def live(self) -> list[int]:
        return [row for row, position in enumerate(self.positions) if position is not None]

    @cached_property
    def streams(self) -> dict[tuple[int, int], tuple[Slicing, TileStream]]:
        return {}

    def stream(self, k_blocks: int, per_k: int = 1) -> tuple[Slicing, TileStream]:
        key = (k_blocks, per_k)
        if key not in self.streams:
            slicing = slicing_of(k_blocks, per_k, self.plan.tiling.chunk_fragments)
            self.streams[key] = slicing, tile_stream(slicing)
        return self.streams[key]

    def experts(self, layer: int) -> list[int]:
        """Active matrices of a layer's FFN."""
        if self.plan.tiling.layers[layer].routed:
            return active_experts([self.chosen[layer][row] for row in self.live])
        return [0] if self.live else []

    def members(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """(row, place of the expert among the row's own) of all rows that use it."""
        if not self.plan.tiling.layers[layer].routed:
            return [(row, 0) for row in self.live]
        chosen = self.chosen[layer]
        return [(row, chosen[row].index(expert)) for row in self.live if expert in chosen[row]]

    def units(self, layer: int, rank: int) -> Iterable[tuple[AttentionUnit, int]]:
        """Splits of a rank and their pairs of chunks."""
        tiling, window = self.plan.tiling, self.plan.spec.layers[layer].window
        tokens = FRAGMENT_EDGE * tiles_of_chunk(tiling.chunk_fragments, tiling.head_tiles)
        for unit in attention_units(
            rank,
            self.plan.target.sms,
            self.positions,
            window,
            tiling.kv_heads,
            tiling.max_splits,
        ):
            begin, end = chunk_span(unit, self.positions[unit.row] or 0, window, tokens)
            yield unit, end - begin


@dataclass
class Block:
    """One SM: its shared memory and its actors."""

    case: Case
    sm: int
    program: tuple[Entry, ...]
    fabric: Fabric
    chance: random.Random
    partials: dict[tuple[int, ...], int]
    merged: dict[tuple[int, ...], int]
    holds: dict[int, tuple[int, object, bool]] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)
    issued: int = 0
    routed_layers: int = 0
    residual: dict[int, int] = field(default_factory=dict)
    norm: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        slots = self.case.slots
        self.full = [Barrier(1) for _ in range(slots)]
        self.empty = [Barrier(CONSUMER_WARPS) for _ in range(slots)]
        self.deposited = [Barrier(CONSUMER_WARPS) for _ in range(2)]
        self.collected = [Barrier(1) for _ in range(2)]
        self.parts: list[list[tuple[int, bool]]] = [[(-1, True)] * CONSUMER_WARPS for _ in range(2)]
        self.tiles_collected = 0
        self.begun = [0] * (CONSUMER_WARPS + 1)
        self.lent, self.taken = [0] * CONSUMER_WARPS, [0] * CONSUMER_WARPS
        self.states: list[int | None] = [None] * CONSUMER_WARPS
        self.tables: list[tuple[int, int]] = [(-1, 0), (-1, 0)]
        self.inputs = [-1] * CONSUMER_WARPS
        self.opened = [0] * CONSUMER_WARPS
        self.next_chunk = [0] * CONSUMER_WARPS
        self.consumers_meet = Meeting(CONSUMER_WARPS)
        self.helpers_meet = Meeting(HELPER_WARPS)
        self.tiling = self.case.plan.tiling

    def unless(self, fault: str, condition: Condition) -> Condition | None:
        """The condition, or none if the rule is broken."""
        return None if fault in self.case.faults else condition

    def is_routed(self, layer: int) -> bool:
        return layer < len(self.tiling.layers) and self.tiling.layers[layer].routed

    def use_table(self, layer: int, routed: int) -> list[int]:
        """A layer's active experts, from the table of the `routed`-th routed layer."""
        if self.is_routed(layer):
            table = self.tables[routed & 1]
            demand(table == (layer, len(self.case.positions)), f"layer {layer} uses {table}")
        return self.case.experts(layer)

    # ---- the ring
    def issue(self, label: object) -> Actor:
        case, number = self.case, self.issued
        slot, phase, before = number % case.slots, number // case.slots, number - case.window
        yield self.unless("slot", lambda: self.empty[slot].is_over(phase & 1 ^ 1))
        if before >= 0:
            oldest, parity = self.full[before % case.slots], before // case.slots & 1
            yield self.unless("window", lambda: oldest.is_over(parity))
        demand(self.left.get(slot, 0) == 0, f"chunk {number} overwrites one that is in use")
        demand(len(self.in_flight) < case.window, "more chunks in flight than the window")
        self.holds[slot], self.left[slot] = (number, label, False), CONSUMER_WARPS
        self.full[slot].expect()
        self.in_flight.append(number)
        yield None
        self.issued += 1

    def land(self) -> Actor:
        while True:
            yield lambda: bool(self.in_flight)
            number = self.in_flight.pop(self.chance.randrange(len(self.in_flight)))
            slot = number % self.case.slots
            self.holds[slot] = (*self.holds[slot][:2], True)
            self.full[slot].land()

    def take(self, number: int, label: object) -> Actor:
        slot, parity = number % self.case.slots, number // self.case.slots & 1
        yield self.unless("issued", lambda: self.issued > number)
        yield self.unless("landed", lambda: self.full[slot].is_over(parity))
        self.check(number, label)
        yield None

    def check(self, number: int, label: object) -> None:
        held = self.holds.get(number % self.case.slots)
        demand(held == (number, label, True), f"{label} as chunk {number} finds {held}")

    def give(self, number: int, label: object, arrivals: int) -> None:
        slot = number % self.case.slots
        self.check(number, label)
        if "arrivals" in self.case.faults and self.left[slot] == CONSUMER_WARPS:
            arrivals = max(1, arrivals - 1) if arrivals > 1 else 2
        self.left[slot] -= arrivals
        self.empty[slot].arrive(arrivals)

    def multiply(
        self, warp: int, stream: TileStream, label: tuple[object, ...], at: int, span: range
    ) -> Actor:
        """`multiply_slice`: fragments `span` of the warp's slice of the tile whose first chunk is
        number `at`."""
        shares = stream.shares[warp]
        for share in shares:
            first = share.begin - shares[0].begin
            last, number = first + share.size, at + share.chunk
            if share.size and not (first < span.stop and last > span.start):
                continue
            name = (*label, share.chunk)
            if share.size or "empty share" not in self.case.faults:
                yield from self.take(number, name)
                if last <= span.stop:
                    self.give(number, name, share.arrivals)
            else:
                slot = number % self.case.slots
                self.empty[slot].arrive(share.arrivals)
                self.left[slot] = self.left.get(slot, 0) - share.arrivals
            yield None

    # ---- sums of a tile
    def open(self, warp: int) -> Actor:
        tile = self.opened[warp]
        barrier, parity = self.collected[tile & 1], tile >> 1 & 1 ^ 1
        if "depth" in self.case.faults:
            yield lambda: self.tiles_collected >= tile - 2
        else:
            yield self.unless("collected", lambda: barrier.is_over(parity))
        held = self.parts[tile & 1][warp]
        demand(held[1] or held[0] == tile, f"the sums of tile {held[0]} are not collected yet")
        self.parts[tile & 1][warp] = (tile, False)
        yield None

    def close(self, warp: int) -> None:
        self.deposited[self.opened[warp] & 1].arrive()
        self.opened[warp] += 1

    def collect(self, warp: int) -> Actor:
        tile = self.opened[warp] - 1
        barrier, parity = self.deposited[tile & 1], tile >> 1 & 1
        yield self.unless("deposited", lambda: barrier.is_over(parity))
        for other in range(CONSUMER_WARPS):
            held = self.parts[tile & 1][other]
            demand(held == (tile, False), f"sums of tile {tile}: warp {other} has {held}")
            self.parts[tile & 1][other] = (tile, True)
        self.tiles_collected += 1
        self.collected[tile & 1].arrive()
        yield None

    # ---- warps
    def producer(self) -> Actor:
        case, tiling, routed = self.case, self.tiling, 0
        for index, entry in enumerate(self.program):
            layer, kind = entry.layer, entry.kind
            if kind == EntryKind.STAGE and layer < len(tiling.layers):
                self.begun[CONSUMER_WARPS] = layer + 1
                routed += self.is_routed(layer)
            if kind == EntryKind.ATTENTION:
                for unit, pairs in case.units(layer, entry.tile):
                    for chunk in range(2 * pairs):
                        yield from self.issue((index, unit.row, chunk))
                continue
            is_ffn = kind in (EntryKind.FFN_UP, EntryKind.FFN_DOWN)
            if is_ffn and self.is_routed(layer):
                wanted = routed
                yield lambda wanted=wanted: self.routed_layers >= wanted  # type: ignore[misc]
            tiles, stream = self.tiles_of(entry)
            if is_ffn and "active" in case.faults:
                tiles = range(len(tiles) + 1)
            for tile in range(len(tiles)):
                if is_ffn:
                    self.use_table(layer, routed)
                for chunk in range(len(stream.chunks)):
                    if not (is_ffn and "shift" in case.faults and tile == chunk == 0):
                        yield from self.issue((index, tile, chunk))

    def tiles_of(self, entry: Entry) -> tuple[Sequence[int], TileStream]:
        """The tiles that an entry streams."""
        case, tiling, sms = self.case, self.tiling, self.case.plan.target.sms
        match entry.kind:
            case EntryKind.FFN_UP:
                width = tiling.layers[entry.layer].width_tiles
                last = len(case.experts(entry.layer)) * width
                return range(entry.tile, last, sms), case.stream(tiling.hidden_tiles, 2)[1]
            case EntryKind.FFN_DOWN:
                width = tiling.layers[entry.layer].width_tiles
                return range(len(case.experts(entry.layer))), case.stream(width)[1]
            case EntryKind.OUT:
                return range(1 if case.live else 0), case.stream(tiling.attention_tiles)[1]
            case EntryKind.HEAD:
                tiles = range(entry.tile, tiling.vocab_tiles, sms)
                return tiles, case.stream(tiling.hidden_tiles)[1]
            case EntryKind.ROUTER | EntryKind.QKV:
                return range(1), case.stream(tiling.hidden_tiles)[1]
        return (), case.stream(tiling.hidden_tiles)[1]

    def helper(self, helper: int) -> Actor:
        rows, routed = len(self.case.positions), 0
        for entry in self.program:
            layer = entry.layer
            if entry.kind == EntryKind.STAGE and self.is_routed(layer):
                routed += 1
                yield from self.route(helper, layer, routed)
            elif entry.kind == EntryKind.MERGE:
                for row in range(rows):
                    if (entry.warp + row) % HELPER_WARPS == helper:
                        yield from self.merge(layer, entry.tile, row)

    def route(self, helper: int, layer: int, routed: int) -> Actor:
        rows, slot = len(self.case.positions), routed & 1
        experts = self.tiling.layers[layer].matrices
        tiles = range(-(-experts // FRAGMENT_EDGE))
        for row in range(helper, rows, HELPER_WARPS):
            if row in self.case.live:
                yield self.fabric.wait([("router_logits", layer, tile) for tile in tiles])
            yield self.unless("begun", lambda: min(self.begun) >= layer)
            done = self.tables[slot][1] if self.tables[slot][0] == layer else 0
            self.tables[slot] = (layer, done + 1)
            yield None
        if self.tiling.max_rows > 1 and "helpers meet" not in self.case.faults:
            yield from self.helpers_meet.sync()
        if helper == 0:
            self.routed_layers = routed

    def merge(self, layer: int, tile: int, row: int) -> Actor:
        tiling, head = self.tiling, tile // self.tiling.merge_parts
        window = self.case.plan.spec.layers[layer].window
        kv_head = head // tiling.group
        splits = range(split_count(self.case.positions[row], window, tiling.max_splits))
        yield self.fabric.wait([("partials", layer, row, kv_head, split) for split in splits])
        for split in splits:
            held = self.partials[layer & 1, row, kv_head, split]
            demand(held == layer, f"the merge of layer {layer} finds the partials of {held}")
        yield None
        for split in splits:
            held = self.partials[layer & 1, row, kv_head, split]
            demand(held == layer, f"the merge of layer {layer} finds the partials of {held}")
        key = (layer, row, kv_head)
        self.merged[key] = self.merged.get(key, 0) + 1
        tiles = MERGE_DIMS // FRAGMENT_EDGE
        first = head * tiling.head_tiles + tile % tiling.merge_parts * tiles
        for part in range(first, first + tiles):
            self.fabric.send("merged", layer, part, row)

    def scratch(self, warp: int) -> Actor:
        """`Consumer::scratch`: waits until the state that lies in it was taken."""
        yield self.unless("taken", lambda: self.taken[warp] == self.lent[warp])
        demand(self.states[warp] is None, f"scratch of warp {warp} has a state that is needed")

    @property
    def scratch_parcels(self) -> int:
        return scratch_words(self.tiling, self.tiling.max_rows) // SCRATCH_WORDS_PER_PARCEL
