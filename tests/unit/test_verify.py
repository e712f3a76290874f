"""The verifier against damage: every kind of fault in a valid plan is rejected, with the place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_damage import LAYOUT_DAMAGE
from mkc.compiler.parse import load_model
from mkc.compiler.plan import Options, Plan
from mkc.compiler.program import EntryKind
from mkc.compiler.slices import TileStream
from mkc.compiler.verify import VerifyError, verify
from mkc.compiler.verify_order import check_order
from mkc.compiler.verify_packets import check_packets
from mkc.compiler.verify_programs import check_programs
from mkc.compiler.verify_ring import check_stream
from mkc.compiler.verify_rules import Rules, check_rules
from plan_damage import (
    PROGRAM_DAMAGE,
    Draw,
    inserted,
    make_plan,
    pick,
    tiny_plan,
    with_program,
)
from rule_damage import RULE_DAMAGE, STREAM_DAMAGE


@pytest.mark.parametrize("damage", PROGRAM_DAMAGE, ids=lambda damage: damage.__name__)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_program_is_rejected(damage: Callable[[Draw, Plan], Plan], data: Any) -> None:
    with pytest.raises(VerifyError) as error:
        verify(damage(data.draw, tiny_plan()))
    assert error.value.exit_status == 1
    message = error.value.message
    assert error.value.sm is not None or "no SM does" in message or "programs for" in message


@pytest.mark.parametrize("damage", LAYOUT_DAMAGE, ids=lambda damage: damage.__name__)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_layout_is_rejected(damage: Callable[[Draw, Plan], Plan], data: Any) -> None:
    with pytest.raises(VerifyError):
        verify(damage(data.draw, tiny_plan()))


@pytest.mark.parametrize("damage", STREAM_DAMAGE, ids=lambda damage: damage.__name__)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_stream_is_rejected(
    damage: Callable[[Draw, Plan], TileStream], data: Any
) -> None:
    with pytest.raises(VerifyError):
        check_stream("a damaged tile", damage(data.draw, tiny_plan()))


@pytest.mark.parametrize("damage", RULE_DAMAGE, ids=lambda damage: damage.__name__)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_rule_is_rejected(damage: Callable[[Draw, Plan], Rules], data: Any) -> None:
    with pytest.raises(VerifyError):
        check_rules(tiny_plan(), damage(data.draw, tiny_plan()))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_valid_plans_are_accepted(data: Any) -> None:
    tiny = load_model("tiny")
    layers = data.draw(st.lists(st.sampled_from(tiny.layers), min_size=1, max_size=5))
    spec = tiny.model_copy(update={"layers": tuple(layers)})
    fragments = data.draw(st.sampled_from([4, 8, 16, 32]))
    options = Options(
        max_batch=data.draw(st.integers(1, 8)),
        chunk_fragments=fragments,
        window_bytes=fragments * 512 * data.draw(st.integers(1, 6)),
        ring_slots=data.draw(st.one_of(st.none(), st.integers(6, 8))),
    )
    plan = make_plan(spec, data.draw(st.integers(2, 24)), options)
    proof = verify(plan)
    assert proof.entries == sum(len(program) for program in plan.programs)
    assert all(shown.cases or shown.name.startswith("reuse") for shown in proof.properties)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_free_task_may_move(data: Any) -> None:
    """QKV, router and merge tasks belong to no SM: moved to their phase elsewhere, all holds."""
    plan = tiny_plan()
    p = pick(data.draw, plan, EntryKind.ROUTER, EntryKind.QKV, EntryKind.MERGE)
    sm = data.draw(st.sampled_from([sm for sm in range(len(plan.programs)) if sm != p.sm]))
    del p.program[p.index]
    moved = with_program(plan, p.sm, p.program)
    verify(with_program(moved, sm, inserted(list(plan.programs[sm]), [p.entry])))


@pytest.mark.parametrize(
    "kind",
    [
        EntryKind.EMBED,
        EntryKind.ROUTER,
        EntryKind.QKV,
        EntryKind.ATTENTION,
        EntryKind.FFN_UP,
        EntryKind.MERGE,
        EntryKind.RESIDUAL,
        EntryKind.HEAD,
    ],
)
def test_packets_alone_show_a_missing_writer(kind: EntryKind) -> None:
    plan = tiny_plan()
    sm, index = next(
        (sm, index)
        for sm, program in enumerate(plan.programs)
        for index, entry in enumerate(program)
        if (entry.kind, entry.tile) == (kind, 0)
    )
    program = list(plan.programs[sm])
    del program[index]
    with pytest.raises(VerifyError, match=r"packet set .* written 0 times instead of 1"):
        check_packets(with_program(plan, sm, program))


def test_order_alone_shows_a_cycle() -> None:
    """An SM that stages the next layer's input before it has made its own part of it."""
    plan = tiny_plan()
    program = list(plan.programs[0])
    stage = next(
        index for index, e in enumerate(program) if e.kind == EntryKind.STAGE and e.layer == 3
    )
    residual = max(
        index for index, e in enumerate(program) if e.kind == EntryKind.RESIDUAL and e.layer == 2
    )
    program.insert(residual, program.pop(stage))
    with pytest.raises(VerifyError, match=r"waits for itself: .*SM 0 layer3.stage") as error:
        check_order(with_program(plan, 0, program))
    assert error.value.code == "MKC301"


def test_order_alone_shows_a_buffer_that_is_overwritten() -> None:
    """Without `out` nothing waits for the merges of layer 1, so layer 3 may overwrite partials."""
    plan = tiny_plan()
    programs = tuple(
        tuple(e for e in program if not (e.kind == EntryKind.OUT and e.layer == 1))
        for program in plan.programs
    )
    with pytest.raises(VerifyError, match=r"partials before the merges of layer 1") as error:
        check_order(replace(plan, programs=programs))
    assert error.value.code == "MKC303"


def test_the_error_names_the_place() -> None:
    plan = tiny_plan()
    program = list(plan.programs[2])
    index = next(i for i, e in enumerate(program) if e.kind == EntryKind.QKV and e.layer == 4)
    program[index] = replace(program[index], tile=99)
    with pytest.raises(VerifyError, match=rf"SM 2, entry {index}, layer4.qkv tile 99"):
        check_programs(with_program(plan, 2, program))


def test_north_mini_code_is_proven() -> None:
    options = Options()
    plan = make_plan(load_model("north_mini_code"), 132, options)
    proof = verify(plan)
    assert {shown.name for shown in proof.properties} >= {"coverage", "no deadlock"}
    assert proof.entries == 61080
