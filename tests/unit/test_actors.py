"""The kernel's waits, run as a model: no deadlock and no race, and every broken rule is found."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from actor_tasks import run_case
from actor_world import POLICIES, ModelError
from actors import FAULTS, Case
from mkc.compiler.parse import load_model
from mkc.compiler.plan import Options
from mkc.compiler.spec import DenseFfn, ExpertFfn
from plan_damage import Draw, make_plan

ONLY_GENERATE = settings(
    max_examples=400, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)


def draw_case(draw: Draw, faults: frozenset[str] = frozenset(), least_layers: int = 1) -> Case:
    """A small model, rows of any length with any routing, a ring from the smallest that works."""
    tiny = load_model("tiny")
    kinds = [tiny.layers[0], tiny.layers[1], tiny.layers[4]]
    experts = draw(st.integers(2, 4))
    small = {
        "dense": DenseFfn(kind="dense", width=16 * draw(st.integers(1, 10))),
        "experts": ExpertFfn(
            kind="experts",
            width=16 * draw(st.integers(1, 9)),
            experts=experts,
            experts_per_token=draw(st.integers(1, 2)),
            scoring="sigmoid",
        ),
    }
    layers = [
        kind.model_copy(update={"ffn": small[kind.ffn.kind]})
        for kind in draw(st.lists(st.sampled_from(kinds), min_size=least_layers, max_size=4))
    ]
    kv_heads = draw(st.integers(1, 2))
    attention = tiny.attention.model_copy(
        update={
            "kv_heads": kv_heads,
            "query_heads": kv_heads * draw(st.integers(1, 2)),
            "head_dim": 32,
        }
    )
    spec = tiny.model_copy(
        update={
            "layers": tuple(layers),
            "attention": attention,
            "hidden_size": 16 * draw(st.integers(1, 20)),
            "vocab_size": draw(st.integers(17, 60)),
        }
    )
    fragments = draw(st.sampled_from([2, 4, 8]))
    rows = draw(st.integers(1, 3))
    window = draw(st.integers(1, 4))
    slots = max(2, window) + draw(st.integers(0, 2))
    options = Options(rows, fragments, window * fragments * 512, slots)
    plan = make_plan(spec, draw(st.integers(kv_heads, 3)), options)
    positions = draw(
        st.lists(st.one_of(st.none(), st.integers(0, 639)), min_size=rows, max_size=rows)
    )
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    chosen = {
        index: [sorted(chance.sample(range(experts), layer.slots)) for _ in range(rows)]
        for index, layer in enumerate(plan.tiling.layers)
        if layer.routed
    }
    return Case(plan, positions, chosen, slots, window, faults)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_interleaving_hangs_or_races(data: Any) -> None:
    case = draw_case(data.draw)
    run_case(case, data.draw(st.sampled_from(POLICIES)), data.draw(st.integers(0, 1 << 30)))


@st.composite
def steps(draw: Draw, fault: str) -> tuple[Case, str, int]:
    case = draw_case(draw, frozenset({fault}), least_layers=3)
    return case, draw(st.sampled_from(POLICIES)), draw(st.integers(0, 1 << 30))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_rule_is_found(fault: str) -> None:
    def is_found(step: tuple[Case, str, int]) -> bool:
        try:
            run_case(*step)
        except ModelError:
            return True
        return False

    find(steps(fault), is_found, settings=ONLY_GENERATE)


def test_a_ring_of_one_slot_hangs() -> None:
    """A warp holds its chunk of K while it waits for the chunk of V."""

    @given(data=st.data())
    @settings(ONLY_GENERATE, max_examples=5)
    def hangs(data: Any) -> None:
        case = draw_case(data.draw)
        case.slots = case.window = 1
        case.positions = [0, *case.positions[1:]]
        with pytest.raises(ModelError, match="deadlock"):
            run_case(case, "random", 0)

    hangs()
