"""Ways to damage the layout of a valid plan, drawn by hypothesis, for the tests of the verifier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from mkc.compiler.place import Layout, shared_bytes
from mkc.compiler.plan import Plan
from plan_damage import Draw, replaced, with_layout


def overlapping_regions(draw: Draw, plan: Plan) -> Plan:
    regions = plan.layout.regions
    one, two = draw(st.permutations(range(len(regions))))[:2]
    inside = draw(st.integers(0, regions[one].bytes - 1)) // 1024 * 1024
    moved = replace(regions[two], offset=regions[one].offset + inside)
    return with_layout(plan, regions=replaced(regions, two, moved))


def shifted_region(draw: Draw, plan: Plan) -> Plan:
    index = draw(st.integers(0, len(plan.layout.regions) - 1))
    region = plan.layout.regions[index]
    shift = draw(st.sampled_from([-(1 << 20), -1024, -512, -16, 8, 16, 512, 1024, 1 << 30]))
    assume(not (shift == 1 << 30 and region.offset + shift < plan.layout.arena_bytes))
    shifted = replace(region, offset=region.offset + shift)
    return with_layout(plan, regions=replaced(plan.layout.regions, index, shifted))


def resized_region(draw: Draw, plan: Plan) -> Plan:
    index = draw(st.integers(0, len(plan.layout.regions) - 1))
    region = plan.layout.regions[index]
    size = region.bytes + draw(st.sampled_from([-512, -2, 2, 512])) * draw(st.integers(1, 4))
    return with_layout(
        plan, regions=replaced(plan.layout.regions, index, replace(region, bytes=size))
    )


def mislabelled_region(draw: Draw, plan: Plan) -> Plan:
    index = draw(st.integers(0, len(plan.layout.regions) - 1))
    region = plan.layout.regions[index]
    change = draw(
        st.sampled_from(
            [
                {"layout": "gate_up_tiles" if region.layout == "pair_tiles" else "pair_tiles"},
                {"layer": region.layer + 1},
                {"name": region.name + "_"},
                {"shape": (region.shape[0], region.shape[2] + 1, region.shape[1])},
            ]
        )
    )
    return with_layout(
        plan, regions=replaced(plan.layout.regions, index, replace(region, **change))
    )


def missing_region(draw: Draw, plan: Plan) -> Plan:
    index = draw(st.integers(0, len(plan.layout.regions) - 1))
    return with_layout(plan, regions=plan.layout.regions[:index] + plan.layout.regions[index + 1 :])


def short_arena(draw: Draw, plan: Plan) -> Plan:
    less = draw(st.integers(1, 1 << 20))
    name = draw(st.sampled_from(["arena_bytes", "packet_count"]))
    return with_layout(plan, **{name: getattr(plan.layout, name) - less})


def shrunk_packet_set(draw: Draw, plan: Plan) -> Plan:
    index, packets = pick_packets(draw, plan.layout)
    axis = draw(st.integers(0, len(packets.shape)))
    if axis == len(packets.shape):
        changed = replace(packets, packets=packets.packets - 1)
    else:
        shape = replaced(packets.shape, axis, packets.shape[axis] - 1)
        changed = replace(packets, shape=shape)
    return with_layout(plan, packet_sets=replaced(plan.layout.packet_sets, index, changed))


def overlapping_packet_sets(draw: Draw, plan: Plan) -> Plan:
    index, packets = pick_packets(draw, plan.layout)
    base = packets.base - draw(st.integers(1, 1000))
    changed = replace(packets, base=base)
    return with_layout(plan, packet_sets=replaced(plan.layout.packet_sets, index, changed))


def pick_packets(draw: Draw, layout: Layout) -> tuple[int, Any]:
    index = draw(st.integers(0, len(layout.packet_sets) - 1))
    return index, layout.packet_sets[index]


def small_ring(draw: Draw, plan: Plan) -> Plan:
    index = draw(st.integers(0, len(plan.layout.shared) - 1))
    slots = draw(st.integers(0, plan.options.window_bytes // plan.tiling.chunk_bytes - 1))
    shared = replace(plan.layout.shared[index], ring_slots=slots)
    lost = (plan.layout.shared[index].ring_slots - slots) * (plan.tiling.chunk_bytes + 16)
    shared = replace(shared, bytes=shared.bytes - lost)
    return with_layout(plan, shared=replaced(plan.layout.shared, index, shared))


def too_much_shared_memory(draw: Draw, plan: Plan) -> Plan:
    index = draw(st.integers(0, len(plan.layout.shared) - 1))
    shared = plan.layout.shared[index]
    per_slot = plan.tiling.chunk_bytes + 16
    fitting = (plan.target.shared_bytes_per_block - shared.bytes) // per_slot
    more = fitting + draw(st.integers(1, 100))
    shared = replace(
        shared,
        ring_slots=shared.ring_slots + more,
        bytes=shared.bytes + more * per_slot,
    )
    return with_layout(plan, shared=replaced(plan.layout.shared, index, shared))


def wrong_entry_points(draw: Draw, plan: Plan) -> Plan:
    index = draw(st.integers(0, len(plan.layout.shared) - 1))
    return with_layout(plan, shared=plan.layout.shared[:index] + plan.layout.shared[index + 1 :])


def wrong_kv_group(draw: Draw, plan: Plan) -> Plan:
    groups = plan.layout.kv_groups
    index = draw(st.integers(0, len(groups) - 1))
    group = groups[index]
    layer = draw(st.integers(-1, len(plan.spec.layers)))
    changes: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"layers": group.layers[1:]},
                {"layers": (*group.layers, layer)},
                {"window": 64},
                {"block_bytes": group.block_bytes - 512},
            ]
        )
    )
    return with_layout(plan, kv_groups=replaced(groups, index, replace(group, **changes)))


def wrong_tile_count(draw: Draw, plan: Plan) -> Plan:
    name = draw(st.sampled_from(["hidden_tiles", "head_tiles", "kv_heads", "max_splits"]))
    more = getattr(plan.tiling, name) + draw(st.sampled_from([-1, 1]))
    return replace(plan, tiling=replace(plan.tiling, **{name: more}))


def extra_region(draw: Draw, plan: Plan) -> Plan:
    """A weight that no op reads, behind all others."""
    region = draw(st.sampled_from(plan.layout.regions))
    end = -(-plan.layout.arena_bytes // 1024) * 1024
    extra = replace(region, layer=region.layer + 100, offset=end)
    regions = (*plan.layout.regions, extra)
    return with_layout(plan, regions=regions, arena_bytes=end + extra.bytes)


def missing_packet_set(draw: Draw, plan: Plan) -> Plan:
    index, _ = pick_packets(draw, plan.layout)
    sets = plan.layout.packet_sets
    return with_layout(plan, packet_sets=sets[:index] + sets[index + 1 :])


def layers_without_kv(draw: Draw, plan: Plan) -> Plan:
    """A group that has lost layers, its block shortened to match."""
    groups = plan.layout.kv_groups
    index = draw(st.integers(0, len(groups) - 1))
    group = groups[index]
    kept = group.layers[: draw(st.integers(0, len(group.layers) - 1))]
    block = group.block_bytes // len(group.layers) * len(kept)
    changed = replace(group, layers=kept, block_bytes=block)
    return with_layout(plan, kv_groups=replaced(groups, index, changed))


def wrong_shared_size(draw: Draw, plan: Plan) -> Plan:
    index = draw(st.integers(0, len(plan.layout.shared) - 1))
    shared = plan.layout.shared[index]
    changed = replace(shared, bytes=shared.bytes + draw(st.sampled_from([-16, -4, 4, 16])))
    return with_layout(plan, shared=replaced(plan.layout.shared, index, changed))


def window_below_a_chunk(draw: Draw, plan: Plan) -> Plan:
    window = draw(st.integers(0, plan.tiling.chunk_bytes - 1))
    return replace(plan, options=replace(plan.options, window_bytes=window))


def window_over_the_ring(draw: Draw, plan: Plan) -> Plan:
    """A window one chunk or more deeper than the ring: a barrier would be a round ahead."""
    slots = min(shared.ring_slots for shared in plan.layout.shared)
    window = (slots + draw(st.integers(1, 4))) * plan.tiling.chunk_bytes
    return replace(plan, options=replace(plan.options, window_bytes=window))


def stream_shifted_by_a_chunk(draw: Draw, plan: Plan) -> Plan:
    """A weight is read from chunks beside its own."""
    index = draw(st.integers(0, len(plan.layout.regions) - 1))
    region = plan.layout.regions[index]
    shift = plan.tiling.chunk_bytes * draw(st.sampled_from([-2, -1, 1, 2]))
    shifted = replace(region, offset=region.offset + shift)
    return with_layout(plan, regions=replaced(plan.layout.regions, index, shifted))


def wrong_expert_count(draw: Draw, plan: Plan) -> Plan:
    """One layer's tiling has an expert, a slot or a k-block more or fewer, or another router."""
    layers = plan.tiling.layers
    index = draw(st.integers(0, len(layers) - 1))
    layer = layers[index]
    by = draw(st.sampled_from([-1, 1]))
    changed = draw(
        st.sampled_from(
            [
                replace(layer, matrices=layer.matrices + by),
                replace(layer, slots=layer.slots + by),
                replace(layer, width_tiles=layer.width_tiles + by),
                replace(layer, routed=not layer.routed),
            ]
        )
    )
    return replace(plan, tiling=replace(plan.tiling, layers=replaced(layers, index, changed)))


def page_of_broken_chunks(draw: Draw, plan: Plan) -> Plan:
    """Chunks that no whole number of fills a page of K."""
    fragments = draw(st.sampled_from([1, 2, 3, 12, 13, 14, 15]))
    tiling = replace(plan.tiling, chunk_fragments=fragments)
    options = replace(plan.options, chunk_fragments=fragments, window_bytes=fragments * 512)
    shared = tuple(
        replace(s, bytes=shared_bytes(tiling, plan.target, s.rows, s.ring_slots))
        for s in plan.layout.shared
    )
    return with_layout(replace(plan, tiling=tiling, options=options), shared=shared)


LAYOUT_DAMAGE = [
    overlapping_regions,
    shifted_region,
    resized_region,
    mislabelled_region,
    missing_region,
    short_arena,
    shrunk_packet_set,
    overlapping_packet_sets,
    small_ring,
    too_much_shared_memory,
    wrong_entry_points,
    wrong_kv_group,
    wrong_tile_count,
    extra_region,
    missing_packet_set,
    layers_without_kv,
    wrong_shared_size,
    window_below_a_chunk,
    window_over_the_ring,
    stream_shifted_by_a_chunk,
    wrong_expert_count,
    page_of_broken_chunks,
]
