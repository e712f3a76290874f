"""Proofs about addresses: nothing overlaps, all fits, and tiles are all the bytes of a weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mkc.compiler.errors import LoweringError
from mkc.compiler.ops import BF16_BYTES
from mkc.compiler.place import (
    PARCEL_PACKETS,
    PARTIAL_BUFFERS,
    PARTIAL_PACKETS,
    REGION_ALIGNMENT,
    ROUTER_PACKETS,
    Region,
    row_capacities,
    shared_bytes,
)
from mkc.compiler.plan import Plan
from mkc.compiler.program import LAYER_BITS
from mkc.compiler.proof import Property, VerifyError
from mkc.compiler.tile import FRAGMENT_BYTES, FRAGMENT_EDGE, MERGE_DIMS, tile

BULK_COPY_ALIGNMENT = 16


def check_memory(plan: Plan) -> list[Property]:
    """Shows that all addresses of a plan are right.

    Raises VerifyError MKC305 (does not fit), MKC306 (a weight's size is not that of its tiles) or
    MKC307 (outside of, or overlapping in, an arena).
    """
    _check_tiling(plan)
    _check_regions(plan)
    tiles = _check_weight_bytes(plan)
    _check_packet_sets(plan)
    _check_kv(plan)
    _check_shared(plan)
    layout = plan.layout
    return [
        Property(
            "arena",
            "regions in order of offset end before the next begins and inside the arena, aligned",
            len(layout.regions),
        ),
        Property(
            "weight bytes",
            "the regions are those of the model's weights, each as long as all its tiles; with "
            "coverage, a step streams every byte of a weight it uses once",
            tiles,
        ),
        Property(
            "packet sets",
            "each set has the axes of what it carries, none overlaps another, all lie inside the "
            "packet area",
            len(layout.packet_sets),
        ),
        Property(
            "KV groups",
            "every layer lies in one group, of its own window; a block is K and V of all its heads",
            len(plan.spec.layers),
        ),
        Property(
            "shared memory",
            "for each entry point ring and fixed parts are within the target, and the ring holds "
            "the window and at least two chunks",
            len(layout.shared),
        ),
    ]


def _check_tiling(plan: Plan) -> None:
    """The tile counts follow from the spec; all other checks then build on them."""
    options = plan.options
    try:
        expected = tile(plan.spec, plan.target, options.max_batch, options.chunk_fragments)
    except LoweringError as error:
        raise VerifyError("MKC305", f"the model cannot be tiled: {error.message}") from error
    if plan.tiling != expected:
        raise VerifyError("MKC305", "the tile counts are not those of model, target and options")
    tiling = plan.tiling
    if tiling.kv_heads * tiling.max_splits > plan.target.sms:
        raise VerifyError(
            "MKC302", f"{tiling.kv_heads} KV heads x {tiling.max_splits} splits exceed the SMs"
        )
    if tiling.attention_tiles * FRAGMENT_EDGE != tiling.merge_units * MERGE_DIMS:
        raise VerifyError("MKC302", "the merge units are not all values of a row's attention")


def _check_regions(plan: Plan) -> None:
    end, last = 0, "the arena's start"
    for region in sorted(plan.layout.regions, key=lambda region: region.offset):
        name = _name(region)
        if region.offset < end:
            raise VerifyError("MKC307", f"{name} at {region.offset} overlaps {last}, to {end}")
        if region.offset % REGION_ALIGNMENT:
            raise VerifyError("MKC307", f"{name} at {region.offset} is not aligned")
        if region.bytes <= 0:
            raise VerifyError("MKC307", f"{name} has {region.bytes} bytes")
        end, last = region.offset + region.bytes, name
    if end > plan.layout.arena_bytes:
        raise VerifyError("MKC307", f"{last} ends at {end}, the arena at {plan.layout.arena_bytes}")


def _name(region: Region) -> str:
    layer = f" of layer {region.layer}" if region.layer >= 0 else ""
    return f"region {region.name}{layer}"


Shape = tuple[int, int, int]


def _expected_regions(plan: Plan) -> Iterator[tuple[str, int, str, Shape, int, int]]:
    """(name, layer, layout, shape, tiles, bytes of a tile) of every weight that ops stream."""
    spec, tiling = plan.spec, plan.tiling
    hidden = spec.hidden_size
    row_bytes = tiling.hidden_tiles * FRAGMENT_BYTES
    queries = spec.attention.query_heads * spec.attention.head_dim
    qkv_rows = queries + 2 * spec.attention.kv_heads * spec.attention.head_dim
    norms = len(spec.layers) + 1
    yield "norms", -1, "rows", (1, norms, hidden), norms, hidden * BF16_BYTES
    for index, layer in enumerate(tiling.layers):
        count, width = layer.matrices, spec.layers[index].ffn.width
        if layer.routed:
            router = -(-count // FRAGMENT_EDGE)
            yield "router", index, "pair_tiles", (1, count, hidden), router, row_bytes
        yield "qkv", index, "pair_tiles", (1, qkv_rows, hidden), tiling.qkv_tiles, row_bytes
        up = count * layer.width_tiles
        yield "gate_up", index, "gate_up_tiles", (count, 2 * width, hidden), up, 2 * row_bytes
        out_bytes = tiling.attention_tiles * FRAGMENT_BYTES
        yield "out", index, "pair_tiles", (1, hidden, queries), tiling.hidden_tiles, out_bytes
        down, down_bytes = count * tiling.hidden_tiles, layer.width_tiles * FRAGMENT_BYTES
        yield "down", index, "pair_tiles", (count, hidden, width), down, down_bytes
    names = ("head",) if spec.tied_head else ("head", "embedding")
    for name in names:
        shape = (1, spec.vocab_size, hidden)
        yield name, -1, "pair_tiles", shape, tiling.vocab_tiles, row_bytes


def _check_weight_bytes(plan: Plan) -> int:
    regions = {(region.name, region.layer): region for region in plan.layout.regions}
    if len(regions) != len(plan.layout.regions):
        raise VerifyError("MKC306", "two regions have the same name and layer")
    tiles = 0
    for name, layer, layout, shape, count, tile_bytes in _expected_regions(plan):
        region = regions.pop((name, layer), None)
        if region is None:
            raise VerifyError("MKC306", f"no region holds {name} of layer {layer}")
        if (region.layout, region.shape) != (layout, shape):
            raise VerifyError(
                "MKC306",
                f"{_name(region)} is {region.layout} {region.shape}, its op has {layout} {shape}",
            )
        if region.bytes != count * tile_bytes:
            raise VerifyError(
                "MKC306",
                f"{_name(region)} has {region.bytes} bytes, its {count} tiles of {tile_bytes} "
                f"bytes have {count * tile_bytes}",
            )
        tiles += count
    for region in regions.values():
        raise VerifyError("MKC306", f"no op streams {_name(region)}")
    return tiles


def _expected_packets(plan: Plan) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and packets of an item of every set, as the ops that use them need."""
    tiling, rows, layers = plan.tiling, plan.tiling.max_rows, len(plan.spec.layers)
    parcels = max(layer.slots * layer.width_tiles for layer in tiling.layers)
    partials = (PARTIAL_BUFFERS, rows, tiling.query_heads, tiling.merge_parts, tiling.max_splits)
    return {
        "layer_input": ((layers + 1, tiling.hidden_tiles, rows), PARCEL_PACKETS),
        "router_logits": ((layers, rows, tiling.router_tiles), ROUTER_PACKETS),
        "qkv": ((layers, tiling.qkv_tiles, rows), PARCEL_PACKETS),
        "partials": (partials, PARTIAL_PACKETS),
        "merged": ((layers, tiling.attention_tiles, rows), PARCEL_PACKETS),
        "hidden": ((layers, rows, parcels), PARCEL_PACKETS),
        "candidates": ((rows, plan.target.sms), 1),
    }


def _check_packet_sets(plan: Plan) -> None:
    expected = _expected_packets(plan)
    names = [packets.name for packets in plan.layout.packet_sets]
    if sorted(names) != sorted(expected):
        raise VerifyError("MKC307", f"the packet sets are {names}, not {list(expected)}")
    end, last = 0, "the start"
    for packets in sorted(
        plan.layout.packet_sets, key=lambda packets: (packets.base, packets.size)
    ):
        shape, size = expected[packets.name]
        if (packets.shape, packets.packets) != (shape, size):
            raise VerifyError(
                "MKC307",
                f"packet set {packets.name} has items {packets.shape} of {packets.packets} "
                f"packets, its ops use {shape} of {size}",
            )
        if packets.base < end:
            raise VerifyError("MKC307", f"packet set {packets.name} overlaps {last}")
        end, last = packets.base + packets.size, packets.name
    if end > plan.layout.packet_count:
        raise VerifyError(
            "MKC307", f"packet set {last} ends at {end} of {plan.layout.packet_count} packets"
        )


def _check_kv(plan: Plan) -> None:
    tiling = plan.tiling
    seen: set[int] = set()
    for group in plan.layout.kv_groups:
        for layer in group.layers:
            if layer in seen or not 0 <= layer < len(plan.spec.layers):
                raise VerifyError("MKC307", f"KV groups hold layer {layer} twice or wrongly")
            if plan.spec.layers[layer].window != group.window:
                raise VerifyError(
                    "MKC307", f"layer {layer} is in the KV group of window {group.window}"
                )
            seen.add(layer)
        size = len(group.layers) * tiling.kv_heads * 2 * tiling.page_bytes
        if group.block_bytes != size:
            raise VerifyError(
                "MKC307",
                f"a block of the KV group of window {group.window} has {group.block_bytes} bytes, "
                f"its pages {size}",
            )
    missing = set(range(len(plan.spec.layers))) - seen
    if missing:
        raise VerifyError("MKC307", f"no KV group holds layer {min(missing)}")


def _check_shared(plan: Plan) -> None:
    tiling, target, options = plan.tiling, plan.target, plan.options
    rows: Sequence[int] = [shared.rows for shared in plan.layout.shared]
    if list(rows) != row_capacities(tiling.max_rows):
        raise VerifyError("MKC305", f"entry points for {rows} rows do not serve all batch sizes")
    if tiling.chunk_bytes <= 0 or tiling.chunk_bytes % BULK_COPY_ALIGNMENT:
        raise VerifyError("MKC305", f"a chunk of {tiling.chunk_bytes} bytes is no bulk copy")
    if len(tiling.layers) >= 1 << LAYER_BITS:
        raise VerifyError("MKC305", f"{len(tiling.layers)} layers do not fit a program entry")
    for shared in plan.layout.shared:
        what = f"the entry point for {shared.rows} rows"
        if shared.bytes != shared_bytes(tiling, target, shared.rows, shared.ring_slots):
            raise VerifyError(
                "MKC305", f"{what} has {shared.bytes} bytes, not ring and fixed parts"
            )
        if shared.bytes > target.shared_bytes_per_block:
            raise VerifyError(
                "MKC305",
                f"{what} needs {shared.bytes} bytes of shared memory of "
                f"{target.shared_bytes_per_block}",
            )
        held = shared.ring_slots * tiling.chunk_bytes
        if shared.ring_slots < 2 or held < options.window_bytes:
            raise VerifyError(
                "MKC305",
                f"{what} has a ring of {shared.ring_slots} chunks, {held} bytes; the window is "
                f"{options.window_bytes} bytes",
            )
        if options.window_bytes < tiling.chunk_bytes:
            raise VerifyError("MKC305", f"the window of {options.window_bytes} holds no chunk")
