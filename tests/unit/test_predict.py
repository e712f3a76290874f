"""Bytes of a step against a count by hand, and the estimate against what must hold of any."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from mkc.compiler.ops import expected_active
from mkc.compiler.parse import load_model
from mkc.compiler.plan import Options, Plan
from mkc.compiler.predict import predict, step_bytes
from plan_damage import make_plan, tiny_plan


@cache
def north_mini_code() -> Plan:
    return make_plan(load_model("north_mini_code"), 132, Options())


def test_bytes_of_north_mini_code() -> None:
    """The figures of the model's card: 7.13 GB at 8192 tokens, 520 MB of them K and V."""
    plan = north_mini_code()
    size = step_bytes(plan, 1, [8192])
    assert size / 1e9 == pytest.approx(7.13, abs=0.005)
    full, sliding = 13 * 8192, 36 * 4096
    shortest = step_bytes(plan, 1, [64])
    assert size - shortest == (full + sliding - 49 * 64) * 4 * 128 * 2 * 2


def test_bytes_count_whole_pages_and_windows() -> None:
    plan = tiny_plan()
    page = 2 * 2 * 64 * 64 * 2
    by_length = {length: step_bytes(plan, 1, [length]) for length in (1, 64, 65, 128, 129, 257)}
    assert by_length[1] == by_length[64]
    assert by_length[65] - by_length[64] == 6 * page
    sliding = sum(1 for layer in plan.spec.layers if layer.window == 100)
    assert by_length[129] - by_length[128] == 6 * page
    assert by_length[257] - by_length[129] == (6 - sliding) * 2 * page


def test_bytes_follow_measured_routing() -> None:
    plan = tiny_plan()
    routed = [layer.routed for layer in plan.tiling.layers]
    expert = 3 * 48 * 208 * 2
    few, many = ([n if is_routed else 0 for is_routed in routed] for n in (2, 5))
    assert step_bytes(plan, 3, [9] * 3, many) - step_bytes(plan, 3, [9] * 3, few) == (
        sum(routed) * 3 * expert
    )
    uniform = [expected_active(6, 2, 3)] * len(routed)
    assert step_bytes(plan, 3, [9] * 3) == step_bytes(plan, 3, [9] * 3, uniform)


@pytest.mark.parametrize(("batch", "lengths"), [(1, []), (2, [5]), (1, [0])])
def test_lengths_must_match(batch: int, lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        step_bytes(tiny_plan(), batch, lengths)


def test_active_must_match_layers() -> None:
    with pytest.raises(ValueError, match="argument"):
        step_bytes(tiny_plan(), 1, [5], [1.0])


def test_points() -> None:
    prediction = predict(north_mini_code())
    assert [(point.batch, point.context) for point in prediction.points] == [
        (batch, context) for batch in (1, 2, 4, 8) for context in (1024, 8192, 32768)
    ]
    point = prediction.point(1, 8192)
    assert point.floor_seconds == pytest.approx(1.485e-3, rel=1e-3)
    with pytest.raises(KeyError, match="batch 3"):
        prediction.point(3, 8192)


def test_a_small_model_is_shown_at_its_longest() -> None:
    assert [point.context for point in predict(tiny_plan()).points] == [640, 640]


def test_no_plan_beats_its_stream() -> None:
    """Predicted time is at least bytes over what a stream reaches, plus the launch."""
    plan = north_mini_code()
    measured = plan.target.measured
    for point in predict(plan).points:
        least = point.floor_seconds / measured.stream_share + measured.launch_seconds
        assert least < point.predicted_seconds < 1.15 * least


def test_slower_hand_offs_and_a_smaller_ring_cost_time() -> None:
    plan = north_mini_code()
    base = predict(plan).point(1, 8192).predicted_seconds
    measured = plan.target.measured.model_copy(update={"hand_off_seconds": 10e-6})
    slow = replace(plan, target=plan.target.model_copy(update={"measured": measured}))
    assert predict(slow).point(1, 8192).predicted_seconds > base * 1.1
    shared = tuple(replace(memory, ring_slots=2) for memory in plan.layout.shared)
    small = replace(plan, layout=replace(plan.layout, shared=shared))
    assert predict(small).point(1, 8192).predicted_seconds > base
