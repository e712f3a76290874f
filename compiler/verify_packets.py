"""Proof that every packet is written exactly once an epoch, counted address by address.

An array counts the writes of every packet of the packet area, for all rows and the worst case of
the dynamic choices. Static tasks write what their tile says. The dynamic ones:

- attention: the units that `rules` gives to each rank, counted for rows that all have the longest
  sequence and for rows of differing lengths; that other lengths behave alike follows from the rule,
  which numbers a row's units from 0 and gives unit u to rank (base + u) mod SMs, at most one each;
- ffn_up: task t goes to rank t mod SMs, and a row's chosen experts are distinct, so that a step in
  which all rows choose the same experts writes each of a row's parcels once, and any other step
  the same parcels from other tasks.

Readers poll for the step's number in the packet itself, so a read before the write cannot return
old values: it waits, and `verify_order` shows that no wait lasts for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mkc.compiler.place import PARTIAL_BUFFERS, PacketSet
from mkc.compiler.plan import Plan
from mkc.compiler.program import EntryKind
from mkc.compiler.proof import Property, VerifyError
from mkc.compiler.rules import AttentionUnit, attention_units, split_count
from mkc.compiler.tile import FRAGMENT_EDGE, MERGE_DIMS, PAGE_TOKENS

Counts = npt.NDArray[np.uint8]
Positions = tuple[int | None, ...]


def check_packets(plan: Plan) -> list[Property]:
    """Shows that each packet a step uses is written once. Raises VerifyError MKC302 or MKC307."""
    written = _count_static_writes(plan)
    expected = _expected_writes(plan)
    for packets in plan.layout.packet_sets:
        if packets.name != "partials":
            _compare(packets, written[packets.name], expected[packets.name])
    partials = _check_partials(plan)
    return [
        Property(
            "packets written once",
            "the writes of all tasks were counted packet by packet: one for each that a step uses, "
            "none elsewhere",
            sum(int(counts.sum()) for counts in written.values()),
        ),
        Property(
            "attention splits written once",
            "for every layer the splits that the rule gives to the ranks were counted, with the "
            "longest rows and with rows of differing lengths",
            partials,
        ),
    ]


def _view(packets: PacketSet) -> Counts:
    return np.zeros((*packets.shape, packets.packets), dtype=np.uint8)


def _count_static_writes(plan: Plan) -> dict[str, Counts]:
    """Writes of every set but `partials`, as arrays of the sets' shapes."""
    tiling, sms = plan.tiling, plan.target.sms
    counts = {packets.name: _view(packets) for packets in plan.layout.packet_sets}
    merged_tiles = MERGE_DIMS // FRAGMENT_EDGE
    for sm, program in enumerate(plan.programs):
        for index, entry in enumerate(program):
            layer, tile = entry.layer, entry.tile
            try:
                match entry.kind:
                    case EntryKind.EMBED:
                        counts["layer_input"][0, tile] += 1
                    case EntryKind.RESIDUAL:
                        counts["layer_input"][layer + 1, tile] += 1
                    case EntryKind.ROUTER:
                        counts["router_logits"][layer, :, tile] += 1
                    case EntryKind.QKV:
                        counts["qkv"][layer, tile] += 1
                    case EntryKind.MERGE:
                        head, part = divmod(tile, tiling.merge_parts)
                        for t in range(part * merged_tiles, (part + 1) * merged_tiles):
                            counts["merged"][layer, head * tiling.head_tiles + t] += 1
                    case EntryKind.FFN_UP:
                        ffn = tiling.layers[layer]
                        tasks = ffn.slots * ffn.width_tiles
                        counts["hidden"][layer, :, tile:tasks:sms] += 1
                    case EntryKind.HEAD:
                        counts["candidates"][:, sm] += 1
            except IndexError as error:
                raise VerifyError("MKC307", f"its packet: {error}", sm, index, entry) from error
    return counts


def _expected_writes(plan: Plan) -> dict[str, Counts]:
    """What the ops of the model need, without looking at any program."""
    expected = {packets.name: _view(packets) for packets in plan.layout.packet_sets}
    for name in ("layer_input", "qkv", "merged", "candidates"):
        expected[name][:] = 1
    for index, layer in enumerate(plan.tiling.layers):
        expected["hidden"][index, :, : layer.slots * layer.width_tiles] = 1
        if layer.routed:
            expected["router_logits"][index, :, : -(-layer.matrices // FRAGMENT_EDGE)] = 1
    return expected


def _compare(packets: PacketSet, written: Counts, expected: Counts) -> None:
    wrong = written != expected
    if wrong.any():
        place = tuple(int(axis) for axis in np.unravel_index(int(wrong.argmax()), wrong.shape))
        item = ", ".join(
            f"{axis} {number}" for axis, number in zip(packets.axes, place[:-1], strict=True)
        )
        raise VerifyError(
            "MKC302",
            f"packet set {packets.name}, {item}: written {written[place]} times instead of "
            f"{expected[place]}",
        )


def _check_partials(plan: Plan) -> int:
    """Counts the splits of each layer by themselves, as two layers share a buffer."""
    packets = plan.layout.packets("partials")
    ranks: list[list[int]] = [[] for _ in plan.tiling.layers]
    for sm, program in enumerate(plan.programs):
        for index, entry in enumerate(program):
            if entry.kind == EntryKind.ATTENTION:
                if not 0 <= entry.tile < plan.target.sms:
                    raise VerifyError("MKC307", "no such rank", sm, index, entry)
                ranks[entry.layer].append(entry.tile)
    total = 0
    for positions in _cases(plan):
        units = {
            window: _units_of_ranks(plan, positions, window)
            for window in {layer.window for layer in plan.spec.layers}
        }
        for layer, spec in enumerate(plan.spec.layers):
            written, expected = _view(packets), _view(packets)
            buffer = layer % PARTIAL_BUFFERS
            for rank in ranks[layer]:
                for unit in units[spec.window][rank]:
                    first = unit.kv_head * plan.tiling.group
                    heads = slice(first, first + plan.tiling.group)
                    written[buffer, unit.row, heads, :, unit.split] += 1
            for row, position in enumerate(positions):
                splits = split_count(position, spec.window, plan.tiling.max_splits)
                expected[buffer, row, :, :, :splits] = 1
            _compare(packets, written, expected)
            total += int(written.sum())
    return total


def _cases(plan: Plan) -> Sequence[Positions]:
    """Rows that are all as long as can be, and rows of differing lengths with an idle one."""
    rows, last = plan.tiling.max_rows, plan.spec.max_positions - 1
    mixed = [min(last, (3**row) * PAGE_TOKENS - 1) for row in range(rows)]
    uneven: list[int | None] = [*mixed]
    uneven[rows // 2] = None
    return (last,) * rows, tuple(uneven)


def _units_of_ranks(
    plan: Plan, positions: Positions, window: int | None
) -> list[list[AttentionUnit]]:
    tiling, sms = plan.tiling, plan.target.sms
    return [
        attention_units(rank, sms, positions, window, tiling.kv_heads, tiling.max_splits)
        for rank in range(sms)
    ]
