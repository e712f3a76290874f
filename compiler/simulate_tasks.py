"""A step's tasks: a plan's programs unfolded for given row lengths and routing, for the simulator.

`BEHAVIOUR` says of each kind of entry who works on it, which packets it reads and writes and what
the producer waits for; the functions at the end say which tasks an entry stands for. Whoever
changes a kind in the kernel changes its row and its function here.

Packets are followed as *signals*, groups that are waited for together: a layer's whole input, the
Q, K and V tiles of one KV head, the hidden states of one expert.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mkc.compiler.place import (
    CONSUMER_WARPS,
    PARCEL_PACKETS,
    SCRATCH_WORDS_PER_PARCEL,
    scratch_words,
)
from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.rules import (
    AttentionUnit,
    attention_units,
    ffn_up_tasks,
    first_token,
    split_count,
)
from mkc.compiler.tile import FRAGMENT_BYTES, FRAGMENT_EDGE, PAGE_TOKENS, Tiling

LANES = 32
HELPER_WARPS = 3
"""Warps that route and merge beside the consumer warps; they are numbered after those."""
LOADS_AT_ONCE = {EntryKind.STAGE: 8, EntryKind.OUT: 6, EntryKind.FFN_DOWN: 6}
"""Loads of a packet for each lane that a warp has on their way at once while it gathers inputs."""
SPLITS_A_ROUND = 8
"""Attention splits whose partials a merge has on their way at once."""
NONE = -1
ALL = tuple(range(CONSUMER_WARPS))


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How the kernel does one kind of entry.

    reads, writes: packet sets; collects: the task's warp waits for the sums of all warps that took
    part and adds them up; routed: the producer cannot send for its chunks before the experts are
    known; attends: its chunks cost what attention costs, not what a product costs; helps: helper
    warps do it, beside whatever the consumer warps do.
    """

    collects: bool = False
    reads: str | None = None
    writes: str | None = None
    routed: bool = False
    attends: bool = False
    helps: bool = False


BEHAVIOUR: dict[EntryKind, Behaviour] = {
    EntryKind.EMBED: Behaviour(writes="layer_input"),
    EntryKind.STAGE: Behaviour(reads="layer_input"),
    EntryKind.ROUTER: Behaviour(collects=True, writes="router_logits"),
    EntryKind.QKV: Behaviour(collects=True, writes="qkv"),
    EntryKind.ATTENTION: Behaviour(collects=True, reads="qkv", writes="partials", attends=True),
    EntryKind.FFN_UP: Behaviour(True, reads="router_logits", writes="hidden", routed=True),
    EntryKind.MERGE: Behaviour(reads="partials", writes="merged", helps=True),
    EntryKind.OUT: Behaviour(reads="merged"),
    EntryKind.FFN_DOWN: Behaviour(reads="hidden", routed=True),
    EntryKind.RESIDUAL: Behaviour(collects=True, writes="layer_input"),
    EntryKind.HEAD: Behaviour(collects=True),
    EntryKind.SAMPLE: Behaviour(collects=True, writes="candidates"),
}


class Piece(NamedTuple):
    """Neighbouring chunks of a task, moved as one; `each` bytes for each of `warps` warps from
    `warp` on."""

    bytes: int
    chunks: int
    warp: int
    warps: int
    each: int


class Run(NamedTuple):
    """Pieces whose inputs are gathered together.

    signal: what they wait for; gathers: rounds of small loads in which each of `warps`, the warps
    that take part, brings its inputs.
    """

    signal: int
    gathers: int
    warps: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()


class Work(NamedTuple):
    """What a task does, apart from where it stands.

    part: tells the tasks of one entry apart (a row, a vocabulary tile, a place among the active
    experts' tiles); warp: who does or finishes it; runs: in order, one without pieces for a task
    that streams nothing, none if it has nothing to gather either; writes: the signal it adds to.
    """

    part: int = 0
    warp: int = 0
    runs: tuple[Run, ...] = ()
    writes: int = NONE


class SimTask(NamedTuple):
    """One task. entry_index: its entry's place in the program; gate: the signal without which the
    producer cannot send for its chunks; the other fields are those of `Work`."""

    sm: int
    entry_index: int
    entry: Entry
    gate: int
    part: int
    warp: int
    runs: tuple[Run, ...]
    writes: int


class ActiveExpert(NamedTuple):
    """An expert that some row chose, and how many rows did; a dense FFN is expert 0 of all rows."""

    expert: int
    rows: int


Routing = tuple[tuple[ActiveExpert, ...], ...]
"""The active experts of each layer, ascending."""


class Signal(NamedTuple):
    """Packets of `set` that are waited for together. `part` is a KV head, row x KV heads + KV head,
    a group of experts, or 0 for all of a layer's."""

    set: str
    layer: int
    part: int


@dataclass(slots=True)
class StepTasks:
    """A step's tasks by SM, in program order; its signals, and how many tasks write each."""

    lengths: tuple[int, ...]
    routing: Routing
    programs: list[list[SimTask]] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)


def draw_routing(plan: Plan, batch: int, seed: int) -> Routing:
    """Experts that `batch` rows choose: uniform, independent of each other and of the layer."""
    draw = random.Random(seed)
    layers = []
    for layer in plan.tiling.layers:
        rows = [0] * layer.matrices
        for _ in range(batch):
            for expert in draw.sample(range(layer.matrices), layer.slots):
                rows[expert] += 1
        layers.append(tuple(ActiveExpert(expert, n) for expert, n in enumerate(rows) if n))
    return tuple(layers)


def unfold(plan: Plan, lengths: Sequence[int], routing: Routing, piece_bytes: int) -> StepTasks:
    """Programs -> the tasks of a step whose rows see `lengths` tokens, their new one included.

    piece_bytes: upper bound of what the simulator moves as one; a chunk is never cut.
    """
    step = _Step(plan, tuple(lengths), routing, piece_bytes)
    for sm, program in enumerate(plan.programs):
        tasks: list[SimTask] = []
        for index, entry in enumerate(program):
            gate = NONE
            if BEHAVIOUR[entry.kind].routed and plan.tiling.layers[entry.layer].routed:
                gate = step.signal("router_logits", entry.layer)
            for work in _UNFOLD[entry.kind](step, sm, entry):
                tasks.append(SimTask(sm, index, entry, gate, *work))
        step.tasks.programs.append(tasks)
    return step.tasks


@dataclass(frozen=True, slots=True)
class Slicing:
    """How warps share a tile along K, as `slicing_of` in templates/slices.cuh has it.

    fragments: of the tile; slice: of each warp's part; sharers: slices in a chunk, 1 if a slice
    takes several chunks.
    """

    fragments: int
    slice: int
    sharers: int

    @staticmethod
    def of(k_blocks: int, per_k: int, chunk_fragments: int) -> Slicing:
        """Of a tile with `per_k` fragments for each of `k_blocks` steps along K."""
        part, sharers = -(-k_blocks // CONSUMER_WARPS) * per_k, CONSUMER_WARPS
        while sharers > 1 and part * sharers > chunk_fragments:
            sharers //= 2
        return Slicing(k_blocks * per_k, part, sharers)

    def slices(self) -> Iterator[tuple[int, int]]:
        """(first warp, fragments) of each run of slices that shares chunks."""
        run = self.slice * self.sharers
        for number, begin in enumerate(range(0, self.fragments, run)):
            yield number * self.sharers, min(run, self.fragments - begin)


def page_chunk_tokens(tiling: Tiling) -> int:
    """Tokens of a chunk of K or V: whole tiles of 16, at most a page."""
    tiles = max(1, tiling.chunk_fragments // tiling.head_tiles)
    return FRAGMENT_EDGE * min(tiles, PAGE_TOKENS // FRAGMENT_EDGE)


def chunk_pairs(unit: AttentionUnit, position: int, window: int | None, chunk_tokens: int) -> int:
    """Chunks of K, and as many of V, that a split streams: those with a token its row sees."""
    page_chunks = PAGE_TOKENS // chunk_tokens
    first = max(unit.first_page * page_chunks, first_token(position, window) // chunk_tokens)
    return min(unit.end_page * page_chunks, position // chunk_tokens + 1) - first


class _Step:
    """What the functions of all kinds share: sizes, signals by name, pieces of tiles."""

    def __init__(
        self, plan: Plan, lengths: tuple[int, ...], routing: Routing, piece_bytes: int
    ) -> None:
        self.plan, self.tiling, self.sms = plan, plan.tiling, plan.target.sms
        self.rows, self.positions = len(lengths), [length - 1 for length in lengths]
        self.routing = routing
        self.tasks = StepTasks(lengths, routing)
        self.piece_bytes = piece_bytes
        memory = next(shared for shared in plan.layout.shared if shared.rows >= self.rows)
        self.scratch_parcels = scratch_words(plan.tiling, memory.rows) // SCRATCH_WORDS_PER_PARCEL
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._pieces: dict[tuple[int, int], tuple[Piece, ...]] = {}
        self._works: dict[tuple[EntryKind, int], Work] = {}
        self._units: dict[int | None, list[list[AttentionUnit]]] = {}
        self._groups: dict[int, list[list[int]]] = {}

    def signal(self, name: str, layer: int, part: int = 0) -> int:
        """The number of a signal, given at its first mention."""
        key = (name, layer, part)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.tasks.signals)
            self.tasks.signals.append(Signal(*key))
            self.tasks.writers.append(0)
        return number

    def written(self, name: str, layer: int, part: int = 0) -> int:
        """The same, for one more task that writes it."""
        number = self.signal(name, layer, part)
        self.tasks.writers[number] += 1
        return number

    def slicing(self, k_blocks: int, per_k: int = 1) -> Slicing:
        """How warps share a tile."""
        return Slicing.of(k_blocks, per_k, self.tiling.chunk_fragments)

    def tile(self, k_blocks: int, per_k: int = 1) -> tuple[Piece, ...]:
        """The pieces of a tile: whole slices as far as they fit, parts of a slice otherwise."""
        found = self._pieces.get((k_blocks, per_k))
        if found is None:
            pieces: list[Piece] = []
            for warp, fragments in self.slicing(k_blocks, per_k).slices():
                pieces += self._slice(warp, fragments, self.slicing(k_blocks, per_k).sharers)
            found = self._pieces[k_blocks, per_k] = _joined(pieces, self.piece_bytes)
        return found

    def _slice(self, warp: int, fragments: int, sharers: int) -> Iterator[Piece]:
        size = self.tiling.chunk_fragments
        for begin in range(0, fragments, size):
            nbytes = min(size, fragments - begin) * FRAGMENT_BYTES
            yield Piece(nbytes, 1, warp, sharers, nbytes // sharers)

    def pairs(self, count: int, chunk_bytes: int, warp: int) -> tuple[Piece, ...]:
        """`count` pairs of a chunk of K and one of V, dealt to warps from `warp` on."""
        pieces = [
            Piece(2 * chunk_bytes, 2, (warp + pair) % CONSUMER_WARPS, 1, 2 * chunk_bytes)
            for pair in range(count)
        ]
        return _joined(pieces, self.piece_bytes)

    def same_for_all(self, entry: Entry, make: Callable[[], Work]) -> Work:
        """The work of an entry that is alike on all SMs, made once for each layer."""
        key = entry.kind, entry.layer
        if key not in self._works:
            self._works[key] = make()
        return self._works[key]._replace(warp=entry.warp)

    def units(self, rank: int, window: int | None) -> list[AttentionUnit]:
        """The attention splits of the SM of that rank."""
        if window not in self._units:
            tiling = self.tiling
            fixed = (self.positions, window, tiling.kv_heads, tiling.max_splits)
            self._units[window] = [attention_units(r, self.sms, *fixed) for r in range(self.sms)]
        return self._units[window][rank]

    def expert_groups(self, layer: int) -> list[list[int]]:
        """Places of active experts by group: those whose hidden states fit a warp's scratch."""
        if layer not in self._groups:
            width = self.slicing(self.tiling.layers[layer].width_tiles).slice
            groups: list[list[int]] = []
            room = 0
            for place, expert in enumerate(self.routing[layer]):
                room -= expert.rows * width
                if room < 0 or not groups:
                    groups.append([])
                    room = self.scratch_parcels - expert.rows * width
                groups[-1].append(place)
            self._groups[layer] = groups
        return self._groups[layer]

    def group_of_expert(self, layer: int) -> list[int]:
        """The group of each active expert, by its place."""
        return [n for n, group in enumerate(self.expert_groups(layer)) for _ in group]

    def rounds(self, kind: EntryKind, parcels: int) -> int:
        """Rounds of loads in which one warp gathers so many parcels."""
        return -(-parcels * PARCEL_PACKETS // (LOADS_AT_ONCE[kind] * LANES))

    def rounds_of_members(self, kind: EntryKind, members: int, slice_tiles: int) -> int:
        """The same for a slice of several rows' values, as much as fits scratch at a time."""
        most = max(1, min(slice_tiles, self.scratch_parcels // members))
        parts = [min(most, slice_tiles - begin) for begin in range(0, slice_tiles, most)]
        return sum(self.rounds(kind, members * part) for part in parts)


def _joined(pieces: Iterable[Piece], limit: int) -> tuple[Piece, ...]:
    """Neighbours as one within `limit` bytes: chunks of the same warps, then equal parts of warps
    that follow each other."""

    def same_warps(a: Piece, b: Piece) -> Piece | None:
        is_alike = (a.warp, a.warps) == (b.warp, b.warps)
        return a._replace(each=a.each + b.each) if is_alike else None

    def next_warps(a: Piece, b: Piece) -> Piece | None:
        is_next = (a.warp + a.warps, a.each) == (b.warp, b.each)
        return a._replace(warps=a.warps + b.warps) if is_next else None

    found = list(pieces)
    for join in (same_warps, next_warps):
        merged = found[:1]
        for piece in found[1:]:
            size, chunks = merged[-1].bytes + piece.bytes, merged[-1].chunks + piece.chunks
            both = join(merged[-1], piece) if size <= limit else None
            if both is None:
                merged.append(piece)
            else:
                merged[-1] = both._replace(bytes=size, chunks=chunks)
        found = merged
    return tuple(found)


def _embed(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    """The token's number, then its embedding: two loads, one behind the other."""
    yield Work(
        warp=entry.warp, runs=(Run(NONE, 2, (entry.warp,)),), writes=step.written("layer_input", 0)
    )


def _stage(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    """Rows are brought whole, as many at once as there are loads for."""
    row_loads = -(-step.slicing(step.tiling.hidden_tiles).slice * PARCEL_PACKETS // LANES)
    rounds = -(-step.rows // max(1, LOADS_AT_ONCE[EntryKind.STAGE] // row_loads))
    yield Work(runs=(Run(step.signal("layer_input", entry.layer), rounds, ALL),))


def _router(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    run = Run(NONE, 0, ALL, step.tile(step.tiling.hidden_tiles))
    writes = step.written("router_logits", entry.layer)
    yield Work(warp=entry.warp, runs=(run,), writes=writes)


def _qkv(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    tiling = step.tiling
    head = entry.tile // tiling.head_tiles
    is_query = head < tiling.query_heads
    kv_head = head // tiling.group if is_query else (head - tiling.query_heads) % tiling.kv_heads
    run = Run(NONE, 0, ALL, step.tile(tiling.hidden_tiles))
    writes = step.written("qkv", entry.layer, kv_head)
    yield Work(warp=entry.warp, runs=(run,), writes=writes)


def _attention(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    """This SM's splits: one round of loads for the queries, one for the new token's K and V. The
    warp of a split's last pair of chunks adds up the others' parts."""
    tiling, layer = step.tiling, entry.layer
    window = step.plan.spec.layers[layer].window
    tokens = page_chunk_tokens(tiling)
    chunk_bytes = tokens // FRAGMENT_EDGE * tiling.head_tiles * FRAGMENT_BYTES
    warp = entry.warp
    for unit in step.units(entry.tile, window):
        pairs = chunk_pairs(unit, step.positions[unit.row], window, tokens)
        run = Run(
            step.signal("qkv", layer, unit.kv_head),
            1 + unit.is_last,
            tuple((warp + n) % CONSUMER_WARPS for n in range(min(pairs, CONSUMER_WARPS))),
            step.pairs(pairs, chunk_bytes, warp),
        )
        warp = (warp + pairs) % CONSUMER_WARPS
        yield Work(
            part=unit.row,
            warp=(warp - 1) % CONSUMER_WARPS,
            runs=(run,),
            writes=step.written("partials", layer, unit.row * tiling.kv_heads + unit.kv_head),
        )


def _ffn_up(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    tiling, layer = step.tiling, entry.layer
    ffn = tiling.layers[layer]
    waits = step.signal("router_logits", layer) if ffn.routed else NONE
    runs = (Run(waits, 0, ALL, step.tile(tiling.hidden_tiles, 2)),)
    group_of = step.group_of_expert(layer)
    tasks = ffn_up_tasks(entry.tile, step.sms, len(step.routing[layer]), ffn.width_tiles)
    for number, (active, tile) in enumerate(tasks):
        yield Work(
            part=active * ffn.width_tiles + tile,
            warp=(entry.warp + number) % CONSUMER_WARPS,
            runs=runs,
            writes=step.written("hidden", layer, group_of[active]),
        )


def _merge(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    """Helper warps take the rows in turn."""
    tiling, layer = step.tiling, entry.layer
    kv_head = entry.tile // tiling.merge_parts // tiling.group
    window = step.plan.spec.layers[layer].window
    for row, position in enumerate(step.positions):
        splits = split_count(position, window, tiling.max_splits)
        signal = step.signal("partials", layer, row * tiling.kv_heads + kv_head)
        warp = CONSUMER_WARPS + (entry.warp + row) % HELPER_WARPS
        yield Work(
            part=row,
            warp=warp,
            runs=(Run(signal, -(-splits // SPLITS_A_ROUND), (warp,)),),
            writes=step.written("merged", layer, kv_head),
        )


def _out(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    yield step.same_for_all(entry, lambda: _out_work(step, entry.layer))


def _out_work(step: _Step, layer: int) -> Work:
    """A piece waits for the merged values of the KV head that the last of its warps needs."""
    tiling = step.tiling
    slicing = step.slicing(tiling.attention_tiles)
    gathers = step.rounds_of_members(EntryKind.OUT, step.rows, slicing.slice)
    runs = []
    for piece in step.tile(tiling.attention_tiles):
        last = min((piece.warp + piece.warps) * slicing.slice, tiling.attention_tiles) - 1
        kv_head = last // (tiling.group * tiling.head_tiles)
        own = tuple(range(piece.warp, piece.warp + piece.warps))
        runs.append(Run(step.signal("merged", layer, kv_head), gathers, own, (piece,)))
    return Work(runs=tuple(runs))


def _ffn_down(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    yield step.same_for_all(entry, lambda: _ffn_down_work(step, entry.layer))


def _ffn_down_work(step: _Step, layer: int) -> Work:
    """A group of experts waits for the hidden states of all of them."""
    width = step.tiling.layers[layer].width_tiles
    runs = []
    for number, group in enumerate(step.expert_groups(layer)):
        rows = sum(step.routing[layer][place].rows for place in group)
        gathers = step.rounds_of_members(EntryKind.FFN_DOWN, rows, step.slicing(width).slice)
        signal = step.signal("hidden", layer, number)
        runs.append(Run(signal, gathers, ALL, step.tile(width) * len(group)))
    return Work(runs=tuple(runs))


def _residual(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    yield Work(warp=entry.warp, writes=step.written("layer_input", entry.layer + 1))


def _head(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    runs = (Run(NONE, 0, ALL, step.tile(step.tiling.hidden_tiles)),)
    tiles = range(entry.tile, step.tiling.vocab_tiles, step.sms)
    for number, tile in enumerate(tiles):
        yield Work(part=tile, warp=(entry.warp + number) % CONSUMER_WARPS, runs=runs)


def _sample(step: _Step, sm: int, entry: Entry) -> Iterator[Work]:
    """Every SM sends its candidates; SM 0 chooses among all of them."""
    yield Work(writes=step.written("candidates", entry.layer))
    if sm == 0:
        signal = step.signal("candidates", entry.layer)
        yield Work(part=1, runs=(Run(signal, 1, (0,)),))


_UNFOLD: dict[EntryKind, Callable[[_Step, int, Entry], Iterator[Work]]] = {
    EntryKind.EMBED: _embed,
    EntryKind.STAGE: _stage,
    EntryKind.ROUTER: _router,
    EntryKind.QKV: _qkv,
    EntryKind.ATTENTION: _attention,
    EntryKind.FFN_UP: _ffn_up,
    EntryKind.MERGE: _merge,
    EntryKind.OUT: _out,
    EntryKind.FFN_DOWN: _ffn_down,
    EntryKind.RESIDUAL: _residual,
    EntryKind.HEAD: _head,
    EntryKind.SAMPLE: _sample,
}
