"""Pass `place`: where everything lies: weights in the arena, packets, KV pages, shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.compiler.errors import LoweringError
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import Target
from mkc.compiler.tile import (
    FRAGMENT_EDGE,
    MAX_EXPERTS,
    MAX_EXPERTS_PER_TOKEN,
    MERGE_DIMS,
    Tiling,
)

PACKET_BYTES = 16
PARCEL_PACKETS = 4  # 16 bf16 values, four to a packet
ROUTER_PACKETS = 8  # 16 float32 logits, two to a packet
PARTIAL_PACKETS = (MERGE_DIMS + 2 + 2) // 3  # a split's maximum, sum and 32 float32 values
PARTIAL_BUFFERS = 2
REGION_ALIGNMENT = 1024
CONSUMER_WARPS = 8
ROUTING_TABLES = 3
SCRATCH_WORDS_PER_PARCEL = 8
HELPER_WARPS = 3


@dataclass(frozen=True, slots=True)
class Region:
    """`bytes` of the weight arena at `offset`; layer -1 for what belongs to no layer.

    `layout` says how the bytes are ordered: `rows` (plain), `pair_tiles` (16-row fragment tiles) or
    `gate_up_tiles` (32-row tiles of gate and up), see docs/format.md. Shape is [matrices, out, in]
    before padding of `out` to whole tiles.
    """

    name: str
    layer: int
    offset: int
    bytes: int
    layout: str
    shape: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class PacketSet:
    """Packets of one kind: an array of `shape` items of `packets` packets each, from `base` on.

    Axes name the items; the last axis is the fastest. Base and sizes count packets of 16 bytes.
    """

    name: str
    base: int
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    packets: int

    @property
    def size(self) -> int:
        """Packets in the set."""
        total = self.packets
        for extent in self.shape:
            total *= extent
        return total

    def index(self, *item: int) -> int:
        """Index of an item's first packet. Raises IndexError outside of the set's shape."""
        flat = 0
        for position, extent in zip(item, self.shape, strict=True):
            if not 0 <= position < extent:
                raise IndexError(f"{self.name}{list(item)} is outside of {list(self.shape)}")
            flat = flat * extent + position
        return self.base + flat * self.packets


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that see the same window: their pages of a row are given out and back together.

    A block is `PAGE_TOKENS` tokens of all these layers; within it the order is layer, KV head,
    K before V.
    """

    window: int | None
    layers: tuple[int, ...]
    block_bytes: int


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Shared memory of one entry point, which serves up to `rows` rows."""

    rows: int
    ring_slots: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All addresses of a plan."""

    regions: tuple[Region, ...]
    arena_bytes: int
    packet_sets: tuple[PacketSet, ...]
    packet_count: int
    kv_groups: tuple[KvGroup, ...]
    shared: tuple[SharedMemory, ...]

    def region(self, name: str, layer: int = -1) -> Region:
        """The region of that name and layer. Raises KeyError."""
        for region in self.regions:
            if region.name == name and region.layer == layer:
                return region
        raise KeyError(f"no region {name} of layer {layer}")

    def packets(self, name: str) -> PacketSet:
        """The packet set of that name. Raises KeyError."""
        for packet_set in self.packet_sets:
            if packet_set.name == name:
                return packet_set
        raise KeyError(f"no packet set {name}")

    def kv_group_of(self, layer: int) -> tuple[int, int]:
        """(index of the layer's KV group, the layer's place in it)."""
        for index, group in enumerate(self.kv_groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(f"layer {layer} has no KV group")


def row_capacities(max_rows: int) -> list[int]:
    """Row counts that entry points are compiled for: 1, 2, 4, 8 as far as needed."""
    capacities = [1]
    while capacities[-1] < max_rows:
        capacities.append(capacities[-1] * 2)
    return capacities


def place(
    spec: ModelSpec,
    tiling: Tiling,
    target: Target,
    ring_slots: int | None = None,
    window_bytes: int = 0,
) -> Layout:
    """Tile counts -> addresses.

    ring_slots: slots of the ring for every entry point; by default as many as fit.
    window_bytes: what the ring must hold; two chunks in any case.
    Raises LoweringError MKC203 if no ring of that size fits.
    """
    regions = _place_weights(spec, tiling)
    packet_sets = _place_packets(spec, tiling, target)
    return Layout(
        regions=tuple(regions),
        arena_bytes=_end(regions),
        packet_sets=tuple(packet_sets),
        packet_count=packet_sets[-1].base + packet_sets[-1].size,
        kv_groups=_place_kv(spec, tiling),
        shared=tuple(
            _place_shared(tiling, target, rows, ring_slots, window_bytes)
            for rows in row_capacities(tiling.max_rows)
        ),
    )


def _place_weights(spec: ModelSpec, tiling: Tiling) -> list[Region]:
    regions: list[Region] = []
    hidden = spec.hidden_size

    def add(name: str, layer: int, layout: str, matrices: int, rows: int, columns: int) -> None:
        padded = rows if layout == "rows" else -(-rows // FRAGMENT_EDGE) * FRAGMENT_EDGE
        size = matrices * padded * columns * 2
        offset = -(-_end(regions) // REGION_ALIGNMENT) * REGION_ALIGNMENT
        regions.append(Region(name, layer, offset, size, layout, (matrices, rows, columns)))

    add("norms", -1, "rows", 1, len(spec.layers) + 1, hidden)
    queries = tiling.attention_tiles * FRAGMENT_EDGE
    for index, layer in enumerate(tiling.layers):
        width = layer.width_tiles * FRAGMENT_EDGE
        if layer.routed:
            add("router", index, "pair_tiles", 1, layer.matrices, hidden)
        add("qkv", index, "pair_tiles", 1, tiling.qkv_tiles * FRAGMENT_EDGE, hidden)
        add("gate_up", index, "gate_up_tiles", layer.matrices, 2 * width, hidden)
        add("out", index, "pair_tiles", 1, hidden, queries)
        add("down", index, "pair_tiles", layer.matrices, hidden, width)
    add("head", -1, "pair_tiles", 1, spec.vocab_size, hidden)
    if not spec.tied_head:
        add("embedding", -1, "pair_tiles", 1, spec.vocab_size, hidden)
    return regions


def _end(regions: list[Region]) -> int:
    return regions[-1].offset + regions[-1].bytes if regions else 0


def _place_packets(spec: ModelSpec, tiling: Tiling, target: Target) -> list[PacketSet]:
    rows, layers = tiling.max_rows, len(spec.layers)
    hidden_parcels = max(layer.slots * layer.width_tiles for layer in tiling.layers)
    wanted: list[tuple[str, tuple[tuple[str, int], ...], int]] = [
        (
            "layer_input",
            (("layer", layers + 1), ("tile", tiling.hidden_tiles), ("row", rows)),
            PARCEL_PACKETS,
        ),
        (
            "router_logits",
            (("layer", layers), ("row", rows), ("tile", tiling.router_tiles)),
            ROUTER_PACKETS,
        ),
        ("qkv", (("layer", layers), ("tile", tiling.qkv_tiles), ("row", rows)), PARCEL_PACKETS),
        (
            "partials",
            (
                ("buffer", PARTIAL_BUFFERS),
                ("row", rows),
                ("head", tiling.query_heads),
                ("part", tiling.merge_parts),
                ("split", tiling.max_splits),
            ),
            PARTIAL_PACKETS,
        ),
        (
            "merged",
            (("layer", layers), ("tile", tiling.attention_tiles), ("row", rows)),
            PARCEL_PACKETS,
        ),
        (
            "hidden",
            (("layer", layers), ("row", rows), ("parcel", hidden_parcels)),
            PARCEL_PACKETS,
        ),
        ("candidates", (("row", rows), ("sm", target.sms)), 1),
    ]
    sets: list[PacketSet] = []
    for name, axes, packets in wanted:
        base = sets[-1].base + sets[-1].size if sets else 0
        names, shape = zip(*axes, strict=True)
        sets.append(PacketSet(name, base, names, shape, packets))
    return sets


def _place_kv(spec: ModelSpec, tiling: Tiling) -> tuple[KvGroup, ...]:
    windows = list(dict.fromkeys(layer.window for layer in spec.layers))
    groups = []
    for window in windows:
        layers = tuple(i for i, layer in enumerate(spec.layers) if layer.window == window)
        block = len(layers) * tiling.kv_heads * 2 * tiling.page_bytes
        groups.append(KvGroup(window, layers, block))
    return tuple(groups)


def _place_shared(
    tiling: Tiling, target: Target, rows: int, ring_slots: int | None, window_bytes: int
) -> SharedMemory:
    smallest = shared_bytes(tiling, target, rows, 2)
    per_slot = tiling.chunk_bytes + 2 * 8  # the slot and its two barriers
    fits = 2 + (target.shared_bytes_per_block - smallest) // per_slot
    slots = fits if ring_slots is None else ring_slots
    needed = max(2, -(-window_bytes // tiling.chunk_bytes))
    if not needed <= slots <= fits:
        raise LoweringError(
            "MKC203",
            f"a ring of {slots} chunks of {tiling.chunk_bytes} bytes does not work for {rows} "
            f"rows on {target.name}: the window needs {needed}, and {fits} fit",
            hint="lower --max-batch, or choose a target with more shared memory",
        )
    return SharedMemory(rows, slots, shared_bytes(tiling, target, rows, slots))


def scratch_words(tiling: Tiling, rows: int) -> int:
    """32-bit words of scratch of one consumer warp: the largest of its uses."""
    state = 4 * (tiling.head_tiles + 1) * 32
    return max(state, FRAGMENT_EDGE * rows * SCRATCH_WORDS_PER_PARCEL)


def shared_bytes(tiling: Tiling, target: Target, rows: int, ring_slots: int) -> int:
    """Bytes of `SharedMemory<rows, ring_slots>` in templates/shared_memory.cuh, padding included.

    The rendered kernel asserts that the compiler's layout of the struct has this size.
    """
    owned_tiles = -(-tiling.hidden_tiles // target.sms)
    members = rows * MAX_EXPERTS_PER_TOKEN
    routing = 4 * rows * MAX_EXPERTS // 32 + 4 * members + 4
    routing = _align(routing + MAX_EXPERTS * (3 + rows) + 4 + 2 * members, 4)
    row_pairs = 1 if rows <= 2 else 2 if rows <= 4 else 4
    deposit = 2 * 8 * row_pairs * 16 + 8 * 4
    size = ring_slots * tiling.chunk_bytes
    size += tiling.hidden_tiles * rows * SCRATCH_WORDS_PER_PARCEL * 4
    size += CONSUMER_WARPS * scratch_words(tiling, rows) * 4
    size = _align(size, 16) + 2 * CONSUMER_WARPS * deposit
    size += owned_tiles * 32 * 16
    size += CONSUMER_WARPS * 8 * 4 + HELPER_WARPS * MERGE_DIMS * 4 + 8 * 4
    size += CONSUMER_WARPS * 8 * 8 + rows * tiling.head_tiles * 8 * 8
    size += ROUTING_TABLES * routing
    size = _align(size, 8) + 2 * ring_slots * 8 + 4 * 8
    size += 4 * rows + 4 * (2 + CONSUMER_WARPS + 1 + 2 * CONSUMER_WARPS)
    return _align(size, 16)


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
