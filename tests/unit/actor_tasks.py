"""A modelled step: all SMs' actors together, and what a consumer warp does for each entry."""

from __future__ import annotations

import random

from actor_world import Actor, Fabric, demand, run
from actors import Block, Case
from mkc.compiler.place import CONSUMER_WARPS, HELPER_WARPS
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.rules import AttentionUnit

STEP = 8  # fragments that a warp multiplies at a time: pieces of a slice are whole steps


def run_case(case: Case, policy: str, seed: int) -> int:
    """Runs a step on all SMs; the number of turns. Raises ModelError."""
    chance = random.Random(seed)
    fabric = Fabric(chance)
    partials: dict[tuple[int, ...], int] = {}
    merged: dict[tuple[int, ...], int] = {}
    actors: dict[str, Actor] = {}
    memory = {"packets": fabric.deliver()}
    for sm, program in enumerate(case.plan.programs):
        block = Block(case, sm, program, fabric, chance, partials, merged)
        memory[f"SM {sm} copies"] = block.land()
        actors[f"SM {sm} producer"] = block.producer()
        for warp in range(CONSUMER_WARPS):
            actors[f"SM {sm} warp {warp}"] = consumer(block, warp)
        for helper in range(HELPER_WARPS):
            actors[f"SM {sm} helper {helper}"] = block.helper(helper)
    return run(actors, memory, policy, chance)


def consumer(block: Block, warp: int) -> Actor:
    routed = 0
    for index, entry in enumerate(block.program):
        if entry.kind == EntryKind.STAGE:
            routed += block.is_routed(entry.layer)
        yield from consumer_entry(block, warp, index, entry, routed)


def consumer_entry(block: Block, warp: int, index: int, entry: Entry, routed: int) -> Actor:
    """One entry. routed: routed layers that have begun, this entry's included."""
    layer, tile = entry.layer, entry.tile
    match entry.kind:
        case EntryKind.EMBED if entry.warp == warp:
            block.residual[tile] = 0
            block.fabric.send("layer_input", 0, tile)
        case EntryKind.STAGE:
            part = -(-block.tiling.hidden_tiles // CONSUMER_WARPS)
            own = range(warp * part, min((warp + 1) * part, block.tiling.hidden_tiles))
            yield block.fabric.wait([("layer_input", layer, tile) for tile in own])
            block.inputs[warp] = layer
            yield None
            block.begun[warp] = layer + 1
        case EntryKind.ROUTER | EntryKind.QKV | EntryKind.FFN_UP | EntryKind.HEAD:
            yield from products(block, warp, index, entry, routed)
        case EntryKind.ATTENTION:
            yield from attention(block, warp, index, entry)
        case EntryKind.OUT | EntryKind.FFN_DOWN:
            yield from add_products(block, warp, index, entry, routed)
        case EntryKind.RESIDUAL:
            block.close(warp)
            if warp == entry.warp:
                yield from block.collect(warp)
                demand(block.residual[tile] == layer, "another layer's residual")
                demand(block.norm == (layer, tile), f"norm weights of {block.norm}")
                block.residual[tile] = layer + 1
                block.fabric.send("layer_input", layer + 1, tile)
        case EntryKind.SAMPLE:
            yield from block.consumers_meet.sync()
            if warp == 0:
                block.fabric.send("candidates", block.sm)
            if block.sm == 0 and warp < len(block.case.positions):
                sms = range(block.case.plan.target.sms)
                yield block.fabric.wait([("candidates", sm) for sm in sms])


def wait_for_routing(block: Block, layer: int, routed: int) -> Actor:
    if block.is_routed(layer):
        yield block.unless("routing", lambda: block.routed_layers >= routed)


def products(block: Block, warp: int, index: int, entry: Entry, routed: int) -> Actor:
    layer, is_up = entry.layer, entry.kind == EntryKind.FFN_UP
    if is_up:
        yield from wait_for_routing(block, layer, routed)
        block.use_table(layer, routed)
    tiles, stream = block.tiles_of(entry)
    for task, tile in enumerate(tiles):
        demand(block.inputs[warp] == layer, f"layer {layer} multiplies {block.inputs[warp]}")
        first = block.next_chunk[warp]
        yield from block.multiply(warp, stream, (index, task), first, range(stream.fragments))
        block.next_chunk[warp] += stream.counted
        yield from block.open(warp)
        block.close(warp)
        if (entry.warp + task) % CONSUMER_WARPS != warp:
            continue
        yield from block.collect(warp)
        if entry.kind in (EntryKind.ROUTER, EntryKind.QKV):
            name = "router_logits" if entry.kind == EntryKind.ROUTER else "qkv"
            block.fabric.send(name, layer, entry.tile)
        elif is_up:
            width = block.tiling.layers[layer].width_tiles
            expert = block.use_table(layer, routed)[tile // width]
            for row, slot in block.case.members(layer, expert):
                block.fabric.send("hidden", layer, row, slot * width + tile % width)


def attention(block: Block, warp: int, index: int, entry: Entry) -> Actor:
    first_warp = entry.warp
    for unit, pairs in block.case.units(entry.layer, entry.tile):
        first = block.next_chunk[warp]
        yield from attend(block, warp, index, entry, unit, pairs, first, first_warp)
        block.next_chunk[warp] += 2 * pairs
        first_warp += pairs


def attend(
    block: Block,
    warp: int,
    index: int,
    entry: Entry,
    unit: AttentionUnit,
    pairs: int,
    first: int,
    first_warp: int,
) -> Actor:
    mine, layer, tiling = (warp - first_warp) % CONSUMER_WARPS, entry.layer, block.tiling
    if mine >= pairs:
        return
    split = layer * tiling.max_rows + unit.row + 1
    finishes = (first_warp + pairs - 1 - warp) % CONSUMER_WARPS == 0
    queries = tiling.group * tiling.head_tiles
    tiles = range(unit.kv_head * queries, (unit.kv_head + 1) * queries)
    yield block.fabric.wait([("qkv", layer, tile) for tile in tiles])
    for pair in range(mine, pairs, CONSUMER_WARPS):
        for half in (2 * pair, 2 * pair + 1):
            yield from block.take(first + half, (index, unit.row, half))
        if finishes and unit.is_last and pair == pairs - 1:
            heads = tiling.query_heads + unit.kv_head
            keys = range(heads * tiling.head_tiles, (heads + 1) * tiling.head_tiles)
            values = [tile + tiling.kv_heads * tiling.head_tiles for tile in keys]
            yield block.fabric.wait([("qkv", layer, tile) for tile in (*keys, *values)])
        for half in (2 * pair, 2 * pair + 1):
            block.give(first + half, (index, unit.row, half), CONSUMER_WARPS)
            yield None
    if not finishes:
        yield from block.scratch(warp)
        block.states[warp] = split
        yield None
        block.lent[warp] = split
        return
    for behind in range(min(pairs, CONSUMER_WARPS) - 1, 0, -1):
        lender = (warp - behind) % CONSUMER_WARPS
        yield block.unless("lent", lambda lender=lender: block.lent[lender] == split)  # type: ignore[misc]
        demand(block.states[lender] == split, f"split {split} absorbs {block.states[lender]}")
        yield None
        demand(block.states[lender] == split, f"split {split} absorbs {block.states[lender]}")
        block.states[lender] = None
        block.taken[lender] = split
    yield from block.scratch(warp)
    place = (layer & 1, unit.row, unit.kv_head, unit.split)
    if place in block.partials:
        before = block.partials[place]
        merges = block.merged.get((before, unit.row, unit.kv_head), 0)
        demand(
            merges == tiling.group * tiling.merge_parts,
            f"layer {layer} overwrites partials of layer {before} before they are merged",
        )
    block.partials[place] = layer
    block.fabric.send("partials", layer, unit.row, unit.kv_head, unit.split)


def add_products(block: Block, warp: int, index: int, entry: Entry, routed: int) -> Actor:
    """OUT and FFN_DOWN: as many experts at a time as scratch has room for."""
    case, layer, is_out = block.case, entry.layer, entry.kind == EntryKind.OUT
    width = block.tiling.layers[layer].width_tiles
    slicing, stream = case.stream(block.tiling.attention_tiles if is_out else width)
    if is_out:
        members = [[(row, 0) for row in case.live]] if case.live else []
    else:
        yield from wait_for_routing(block, layer, routed)
        members = [case.members(layer, expert) for expert in block.use_table(layer, routed)]
    begin = min(warp * slicing.slice, slicing.fragments)
    size = min(slicing.slice, slicing.fragments - begin)
    first, active = block.next_chunk[warp], 0
    while active < len(members):
        end, held = active + 1, len(members[active])
        while (
            end < len(members)
            and (held + len(members[end])) * slicing.slice <= block.scratch_parcels
        ):
            held += len(members[end])
            end += 1
        fits = held * slicing.slice <= block.scratch_parcels
        most = slicing.slice if fits else block.scratch_parcels // held // STEP * STEP
        start = 0
        while start < size or start == 0:
            stop = min(start + most, size)
            yield from block.scratch(warp)
            blocks = range(begin + start, begin + stop)
            rows = [member for expert in members[active:end] for member in expert]
            if is_out:
                keys = [("merged", layer, tile, row) for row, _ in rows for tile in blocks]
            else:
                keys = [
                    ("hidden", layer, row, slot * width + tile)
                    for row, slot in rows
                    for tile in blocks
                ]
            yield block.fabric.wait([*keys])
            for expert in range(active, end):
                at = first + expert * stream.counted
                yield from block.multiply(warp, stream, (index, expert), at, range(start, stop))
            start = stop
            if size == 0:
                break
        active = end
    block.next_chunk[warp] += len(members) * stream.counted
    yield from block.open(warp)
    if not is_out:
        tile = block.opened[warp]
        demand(block.parts[tile & 1][warp] == (tile, False), "OUT's sums are not there")
    elif warp == entry.warp:
        block.norm = (layer, entry.tile)
