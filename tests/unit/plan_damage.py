"""Ways to damage the programs of a valid plan, drawn by hypothesis, for tests of the verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from mkc.compiler.parse import load_model
from mkc.compiler.place import place
from mkc.compiler.plan import Options, Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.schedule import schedule
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import load_target
from mkc.compiler.tile import tile
from mkc.compiler.verify_programs import OWNED, PHASES

Draw = Callable[..., Any]


def make_plan(spec: ModelSpec, sms: int, options: Options) -> Plan:
    """A plan for a made-up GPU of `sms` SMs, as the pipeline would make it."""
    target = load_target("h200").model_copy(update={"sms": sms})
    tiling = tile(spec, target, options.max_batch, options.chunk_fragments)
    layout = place(spec, tiling, target, options.ring_slots, options.window_bytes)
    return Plan(spec, target, options, tiling, layout, schedule(tiling, target))


@cache
def tiny_plan() -> Plan:
    """Seven SMs, so that some own two tiles of the residual and most have several tiles of QKV."""
    return make_plan(load_model("tiny"), 7, Options(max_batch=3, ring_slots=10))


def with_program(plan: Plan, sm: int, program: list[Entry]) -> Plan:
    programs = list(plan.programs)
    programs[sm] = tuple(program)
    return replace(plan, programs=tuple(programs))


def with_layout(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, layout=replace(plan.layout, **changes))


def replaced(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


@dataclass(frozen=True)
class Pick:
    """An entry drawn from a plan."""

    sm: int
    index: int
    entry: Entry
    program: list[Entry]


def pick(draw: Draw, plan: Plan, *kinds: EntryKind) -> Pick:
    choices = [
        (sm, index)
        for sm, program in enumerate(plan.programs)
        for index, entry in enumerate(program)
        if not kinds or entry.kind in kinds
    ]
    sm, index = draw(st.sampled_from(choices))
    return Pick(sm, index, plan.programs[sm][index], list(plan.programs[sm]))


def drop_entry(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan)
    del p.program[p.index]
    return with_program(plan, p.sm, p.program)


def duplicate_entry(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan)
    p.program.insert(p.index, p.entry)
    return with_program(plan, p.sm, p.program)


def duplicate_on_another_sm(draw: Draw, plan: Plan) -> Plan:
    """The same task at its proper place in a second program."""
    p = pick(draw, plan, EntryKind.ROUTER, EntryKind.QKV, EntryKind.MERGE, EntryKind.EMBED)
    sm = draw(st.sampled_from([sm for sm in range(len(plan.programs)) if sm != p.sm]))
    return with_program(plan, sm, inserted(list(plan.programs[sm]), [p.entry]))


def inserted(program: list[Entry], entries: list[Entry]) -> list[Entry]:
    """The program with entries of one op at the end of that op's phase."""

    def place_of(entry: Entry) -> tuple[int, int]:
        is_embed = entry.kind == EntryKind.EMBED
        return (-1, 0) if is_embed else (entry.layer, PHASES[entry.kind])

    at = sum(1 for entry in program if place_of(entry) <= place_of(entries[0]))
    return program[:at] + entries + program[at:]


def swap_neighbours(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan)
    assume(p.index + 1 < len(p.program) and p.program[p.index + 1].kind != p.entry.kind)
    p.program[p.index : p.index + 2] = reversed(p.program[p.index : p.index + 2])
    return with_program(plan, p.sm, p.program)


def swap_distant(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan)
    other = draw(st.integers(0, len(p.program) - 1))
    there = p.program[other]
    assume((there.kind, there.layer) != (p.entry.kind, p.entry.layer))
    p.program[p.index], p.program[other] = there, p.entry
    return with_program(plan, p.sm, p.program)


def wrong_layer(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan)
    layer = draw(st.integers(-1, len(plan.spec.layers) + 1).filter(lambda n: n != p.entry.layer))
    p.program[p.index] = replace(p.entry, layer=layer)
    return with_program(plan, p.sm, p.program)


def wrong_tile(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan)
    assume(p.entry.kind not in (EntryKind.STAGE, EntryKind.SAMPLE))
    tile = draw(st.integers(-2, 80).filter(lambda n: n != p.entry.tile))
    p.program[p.index] = replace(p.entry, tile=tile)
    return with_program(plan, p.sm, p.program)


def wrong_rank(draw: Draw, plan: Plan) -> Plan:
    """The rank of another SM, or none that exists."""
    p = pick(draw, plan, EntryKind.ATTENTION, EntryKind.FFN_UP, EntryKind.HEAD)
    rank = draw(st.integers(0, 2 * plan.target.sms).filter(lambda n: n != p.entry.tile))
    p.program[p.index] = replace(p.entry, tile=rank)
    return with_program(plan, p.sm, p.program)


def wrong_kind(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan)
    kind = draw(st.sampled_from(EntryKind).filter(lambda kind: kind != p.entry.kind))
    p.program[p.index] = replace(p.entry, kind=kind)
    return with_program(plan, p.sm, p.program)


def wrong_warp(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan)
    p.program[p.index] = replace(p.entry, warp=draw(st.sampled_from([-1, 8, 9, 255])))
    return with_program(plan, p.sm, p.program)


def another_owner_warp(draw: Draw, plan: Plan) -> Plan:
    """A tile whose norm weights, or those of the next tile, another warp keeps."""
    p = pick(draw, plan, EntryKind.OUT, EntryKind.RESIDUAL)
    warp = draw(st.integers(0, 7).filter(lambda warp: warp != p.entry.warp))
    p.program[p.index] = replace(p.entry, warp=warp)
    return with_program(plan, p.sm, p.program)


def move_rank(draw: Draw, plan: Plan) -> Plan:
    """One SM does the dynamic tasks of two ranks, another none."""
    p = pick(draw, plan, EntryKind.ATTENTION, EntryKind.FFN_UP, EntryKind.HEAD)
    sm = draw(st.sampled_from([sm for sm in range(len(plan.programs)) if sm != p.sm]))
    del p.program[p.index]
    moved = with_program(plan, p.sm, p.program)
    return with_program(moved, sm, inserted(list(plan.programs[sm]), [p.entry]))


def move_owned_tile(draw: Draw, plan: Plan) -> Plan:
    """out, ffn_down and residual of a tile on an SM that doesn't hold its residual."""
    p = pick(draw, plan, EntryKind.OUT)
    sm = draw(st.sampled_from([sm for sm in range(len(plan.programs)) if sm != p.sm]))
    run = p.program[p.index : p.index + 3]
    del p.program[p.index : p.index + 3]
    moved = with_program(plan, p.sm, p.program)
    return with_program(moved, sm, inserted(list(plan.programs[sm]), run))


def move_embedding(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan, EntryKind.EMBED)
    sm = draw(st.sampled_from([sm for sm in range(len(plan.programs)) if sm != p.sm]))
    del p.program[p.index]
    moved = with_program(plan, p.sm, p.program)
    return with_program(moved, sm, inserted(list(plan.programs[sm]), [p.entry]))


def part_owned_run(draw: Draw, plan: Plan) -> Plan:
    """The tasks of two owned tiles in turns: their sums would share registers."""
    p = pick(draw, plan, EntryKind.OUT)
    run = p.program[p.index : p.index + 6]
    assume([entry.kind for entry in run] == [*OWNED, *OWNED])
    order = draw(st.sampled_from([(0, 3, 1, 4, 2, 5), (0, 1, 3, 4, 2, 5), (0, 4, 2, 3, 1, 5)]))
    p.program[p.index : p.index + 6] = [run[i] for i in order]
    return with_program(plan, p.sm, p.program)


def missing_stage(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan, EntryKind.STAGE)
    del p.program[p.index]
    return with_program(plan, p.sm, p.program)


def stage_of_another_layer(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan, EntryKind.STAGE)
    layer = draw(st.integers(0, len(plan.spec.layers)).filter(lambda n: n != p.entry.layer))
    p.program[p.index] = replace(p.entry, layer=layer)
    return with_program(plan, p.sm, p.program)


def late_stage(draw: Draw, plan: Plan) -> Plan:
    """STAGE behind the first entries that need it."""
    p = pick(draw, plan, EntryKind.STAGE)
    later = draw(st.integers(p.index + 1, len(p.program) - 1))
    p.program.insert(later, p.program.pop(p.index))
    return with_program(plan, p.sm, p.program)


def truncated_program(draw: Draw, plan: Plan) -> Plan:
    p = pick(draw, plan)
    return with_program(plan, p.sm, p.program[: p.index])


def exchange_layers(draw: Draw, plan: Plan) -> Plan:
    """One SM does two layers in the wrong order."""
    sm = draw(st.integers(0, len(plan.programs) - 1))
    layer = draw(st.integers(0, len(plan.spec.layers) - 2))
    program = plan.programs[sm]
    embeds = [e for e in program if e.kind == EntryKind.EMBED]
    rest = [e for e in program if e.kind != EntryKind.EMBED]
    order = [*range(layer), layer + 1, layer, *range(layer + 2, len(plan.spec.layers) + 1)]
    return with_program(plan, sm, embeds + [e for n in order for e in rest if e.layer == n])


def number_of_programs(draw: Draw, plan: Plan) -> Plan:
    count = draw(st.integers(0, 2 * len(plan.programs)).filter(lambda n: n != len(plan.programs)))
    return replace(plan, programs=(plan.programs * 2)[:count])


def task_of_no_op(draw: Draw, plan: Plan) -> Plan:
    """A router task in a layer without a router."""
    p = pick(draw, plan, EntryKind.STAGE)
    assume(p.entry.layer < len(plan.tiling.layers))
    assume(not plan.tiling.layers[p.entry.layer].routed)
    p.program.insert(p.index + 1, Entry(EntryKind.ROUTER, p.entry.layer))
    return with_program(plan, p.sm, p.program)


def shared_residual_slot(draw: Draw, plan: Plan) -> Plan:
    """All tasks of a residual tile on another SM, which keeps one in the same slot already."""
    p = pick(draw, plan, EntryKind.EMBED)
    sms, tile = plan.target.sms, p.entry.tile
    neighbours = [t for t in range(plan.tiling.hidden_tiles) if t // sms == tile // sms]
    assume(len(neighbours) > 1)
    other = draw(st.sampled_from([t for t in neighbours if t != tile])) % sms

    def moves(entry: Entry) -> bool:
        return entry.kind in (EntryKind.EMBED, *OWNED) and entry.tile == tile

    program = list(plan.programs[other])
    moving = [entry for entry in p.program if moves(entry)]
    program = inserted(program, moving[:1])
    for start in range(1, len(moving), len(OWNED)):
        program = inserted(program, moving[start : start + len(OWNED)])
    left = with_program(plan, p.sm, [entry for entry in p.program if not moves(entry)])
    return with_program(left, other, program)


PROGRAM_DAMAGE = [
    drop_entry,
    duplicate_entry,
    duplicate_on_another_sm,
    swap_neighbours,
    swap_distant,
    wrong_layer,
    wrong_tile,
    wrong_rank,
    wrong_kind,
    wrong_warp,
    another_owner_warp,
    move_rank,
    move_owned_tile,
    move_embedding,
    part_owned_run,
    missing_stage,
    stage_of_another_layer,
    late_stage,
    truncated_program,
    exchange_layers,
    number_of_programs,
    task_of_no_op,
    shared_residual_slot,
]
