"""Bytes of a step against a count by hand."""

from __future__ import annotations

from functools import cache

import pytest

from mkc.compiler.ops import expected_active
from mkc.compiler.parse import load_model
from mkc.compiler.plan import Options, Plan
from mkc.compiler.traffic import floor_seconds, step_bytes
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
    assert floor_seconds(plan, size) == pytest.approx(1.485e-3, rel=1e-3)


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
