"""The simulator: a chain computed by hand, and what must hold of any plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mkc.compiler.parse import load_model
from mkc.compiler.plan import Options, Plan
from mkc.compiler.prediction import predict, representative_layers, shortened
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.proof import VerifyError
from mkc.compiler.simulate import SimulatedStep, _Simulation, simulate_step
from mkc.compiler.simulate_causes import HopKind, critical_path
from mkc.compiler.simulate_tasks import (
    ALL,
    NONE,
    Piece,
    Run,
    Signal,
    SimTask,
    Slicing,
    StepTasks,
    draw_routing,
)
from mkc.compiler.simulate_waits import Slacks, Spent, time_spent
from mkc.compiler.traffic import step_bytes
from plan_damage import make_plan, tiny_plan, with_program


def with_measured(plan: Plan, **figures: float) -> Plan:
    measured = plan.target.measured.model_copy(update=figures)
    return replace(plan, target=plan.target.model_copy(update={"measured": measured}))


@cache
def tiny_step() -> SimulatedStep:
    return simulate_step(tiny_plan(), [640, 200, 1])


@cache
def slow_memory() -> Plan:
    """Seven SMs that bytes and waits both hold up."""
    plan = tiny_plan()
    return replace(plan, target=plan.target.model_copy(update={"hbm_bytes_per_second": 5e10}))


@cache
def north_mini_code() -> Plan:
    """Its dense layer and one period of the others, up to two rows."""
    return shortened(make_plan(load_model("north_mini_code"), 132, Options(max_batch=2)), 5)


def two_tasks() -> StepTasks:
    """SM 0 streams a chunk and hands on; SM 1 waits for that, with its own chunk in the ring."""
    size = 8192
    run = Run(NONE, 0, ALL, (Piece(size, 1, 0, 8, size // 8),))
    waiting = Run(0, 2, ALL, run.pieces)
    return StepTasks(
        lengths=(1,),
        routing=(),
        programs=[
            [SimTask(0, 0, Entry(EntryKind.QKV), NONE, 0, 0, (run,), 0)],
            [SimTask(1, 0, Entry(EntryKind.ATTENTION), NONE, 0, 0, (waiting,), NONE)],
        ],
        signals=[Signal("qkv", 0, 0)],
        writers=[1],
    )


def test_a_chain_of_two_tasks() -> None:
    """Streamed, multiplied, added up, handed on, gathered in two rounds, attended to."""
    plan = tiny_plan()
    m = plan.target.measured
    step = _Simulation(plan, two_tasks(), waits=True).run()
    streamed = 8192 / (plan.target.hbm_bytes_per_second * m.stream_share) + m.latency_seconds
    first = streamed + 1024 / m.warp_bytes_per_second + m.join_seconds
    assert step.times[0].end == pytest.approx([first])
    seen = first + m.hand_off_seconds
    begin = seen + m.load_seconds
    last = begin + 1024 / m.attention_bytes_per_second + m.join_seconds
    assert step.times[1].begin == pytest.approx([begin])
    assert step.times[1].end == pytest.approx([last])
    assert step.seconds == pytest.approx(last + m.launch_seconds)
    path = critical_path(step)
    assert [(hop.kind, hop.sm) for hop in path] == [
        (HopKind.STREAM, 0),
        (HopKind.WORK, 0),
        (HopKind.HAND_OFF, 0),
        (HopKind.WORK, 1),
    ]
    # Packets could come that much sooner before SM 1's own chunk held it up.
    landed = step.streams[1].landed[0]
    assert path[2].slack_seconds == pytest.approx(begin - landed)
    free = _Simulation(plan, two_tasks(), waits=False).run()
    assert free.seconds < step.seconds - m.hand_off_seconds


def test_a_lone_stream_is_bound_by_its_sm() -> None:
    plan = with_measured(tiny_plan(), sm_bytes_per_second=1e9)
    step = _Simulation(plan, two_tasks(), waits=False).run()
    assert step.streams[0].landed == pytest.approx([8192 / 1e9])


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_bytes_are_those_of_the_step(batch: int) -> None:
    """All but the norms and the embedding, which are read by small loads."""
    plan = tiny_plan()
    routing = draw_routing(plan, batch, 5)
    step = simulate_step(plan, [640] * batch, routing=routing)
    active = [len(experts) for experts in routing]
    rest = (len(plan.spec.layers) + 1) * plan.spec.hidden_size * 2
    assert step.bytes == step_bytes(plan, batch, [640] * batch, active) - rest
    assert sum(step.layer_bytes()) == step.bytes


@given(st.lists(st.integers(1, 640), min_size=1, max_size=3), st.integers(0, 9))
@settings(max_examples=12, deadline=None)
def test_what_holds_of_any_step(lengths: list[int], seed: int) -> None:
    plan = tiny_plan()
    step = simulate_step(plan, lengths, seed)
    measured = plan.target.measured
    assert 0 < step.share_of_floor < measured.stream_share
    assert simulate_step(plan, lengths, seed, waits=False).seconds <= step.seconds
    assert simulate_step(plan, lengths, seed).seconds == step.seconds
    for times, stream in zip(step.times, step.streams, strict=True):
        for start, begin, ready, end in zip(
            times.start, times.begin, times.ready, times.end, strict=True
        ):
            assert 0 <= start <= min(begin, ready) <= max(begin, ready) <= end
        assert stream.issued == sorted(stream.issued)
        assert stream.landed == sorted(stream.landed)
        moments = zip(stream.issued, stream.landed, stream.used, strict=True)
        assert all(issued < landed < used for issued, landed, used in moments)


@pytest.mark.parametrize("batch", [1, 3])
def test_slower_parts_never_make_a_faster_step(batch: int) -> None:
    """Nor faster parts a slower one, but for what another order of requests may cost."""
    plan, lengths = slow_memory(), [600] * batch
    base = simulate_step(plan, lengths).seconds
    changes: dict[str, tuple[float, float]] = {
        "stream_share": (0.5, 0.95),
        "hand_off_seconds": (5e-6, 0.5e-6),
        "latency_seconds": (3e-6, 0.4e-6),
        "load_seconds": (4e-6, 0.5e-6),
        "warp_bytes_per_second": (5e9, 2e11),
    }
    for name, (worse, better) in changes.items():
        slow, fast = (
            simulate_step(with_measured(plan, **{name: figure}), lengths)
            for figure in (worse, better)
        )
        assert slow.seconds > base, name
        assert fast.seconds < base * 1.002, name


def test_a_smaller_ring_costs_time() -> None:
    plan = tiny_plan()
    shared = tuple(replace(memory, ring_slots=2) for memory in plan.layout.shared)
    small = replace(plan, layout=replace(plan.layout, shared=shared))
    assert simulate_step(small, [640]).seconds > simulate_step(plan, [640]).seconds


@pytest.mark.parametrize("kind", [EntryKind.QKV, EntryKind.MERGE, EntryKind.RESIDUAL])
def test_a_plan_that_waits_for_ever_is_found(kind: EntryKind) -> None:
    """An entry is put behind one that needs its packets."""
    plan = tiny_plan()
    program = list(plan.programs[2])
    at = next(i for i, entry in enumerate(program) if entry.kind == kind and entry.layer == 2)
    entry = program.pop(at)
    late = next(
        i for i, other in enumerate(program) if other.kind == EntryKind.STAGE and other.layer == 3
    )
    program.insert(late + 1, entry)
    with pytest.raises(VerifyError, match=r"MKC304.*waits for packets") as caught:
        simulate_step(with_program(plan, 2, program), [100])
    assert caught.value.sm is not None


@pytest.mark.parametrize("lengths", [[], [0], [1] * 4])
def test_lengths_are_checked(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        simulate_step(tiny_plan(), lengths)


@pytest.mark.parametrize(
    ("k_blocks", "per_k", "slices"),
    [
        (128, 1, [(w, 16) for w in range(8)]),
        (128, 2, [(w, 32) for w in range(8)]),
        (48, 1, [(0, 12), (2, 12), (4, 12), (6, 12)]),
        (13, 1, [(0, 13)]),
        (3, 1, [(0, 3)]),
    ],
)
def test_slices(k_blocks: int, per_k: int, slices: list[tuple[int, int]]) -> None:
    assert list(Slicing.of(k_blocks, per_k, 16).slices()) == slices


def test_the_critical_path_is_whole() -> None:
    step = tiny_step()
    path = critical_path(step)
    assert path[0].begin == 0.0
    assert path[-1].end == max(times.end[-1] for times in step.times)
    for before, after in pairwise(path):
        assert before.end == pytest.approx(after.begin, abs=1e-9)
        assert before.seconds >= 0
        assert before.slack_seconds >= 0
    layers = {step.tasks.programs[hop.sm][hop.place].entry.layer for hop in path}
    assert layers == set(range(len(step.plan.spec.layers) + 1))


def test_time_adds_up() -> None:
    step = tiny_step()
    end = step.seconds - step.plan.target.measured.launch_seconds
    for spent in time_spent(step):
        assert sum(spent.values()) == pytest.approx(end)
        assert min(spent.values()) >= 0
        assert spent[Spent.INPUT] > 0


def test_slack() -> None:
    """Some task of every signal has none to spare, and all have as much as the rest of theirs."""
    step = tiny_step()
    slacks = Slacks(step)
    for sm, program in enumerate(step.tasks.programs):
        for place, task in enumerate(program):
            assert slacks.of_task(sm, place) >= 0
            if task.writes != NONE:
                assert slacks.of_task(sm, place) >= slacks.of_signal(task.writes)
    for signal, (sm, place) in enumerate(step.last_writer):
        assert slacks.of_task(sm, place) == pytest.approx(slacks.of_signal(signal))


def test_points_of_a_prediction() -> None:
    prediction = predict(north_mini_code())
    assert [(point.batch, point.context) for point in prediction.points] == [
        (batch, context) for batch in (1, 2) for context in (1024, 8192, 32768)
    ]
    assert prediction.point(1, 8192).predicted_seconds == pytest.approx(
        prediction.step.seconds, rel=1e-3
    )
    for point in prediction.points:
        assert 0.7 < point.share_of_floor < 0.95
    with pytest.raises(KeyError, match="batch 3"):
        prediction.point(3, 8192)


def test_a_small_model_is_shown_at_its_longest() -> None:
    assert [point.context for point in predict(tiny_plan()).points] == [640, 640]


def test_layers_left_out_are_made_up_for() -> None:
    """The shortened step, made whole again, is within a few per cent of the whole one."""
    plan = make_plan(load_model("tiny"), 7, Options(max_batch=2, ring_slots=10))
    layers = tuple(plan.spec.layers[1:4]) * 6
    spec = plan.spec.model_copy(update={"layers": (plan.spec.layers[0], *layers)})
    plan = make_plan(spec, 7, Options(max_batch=2, ring_slots=10))
    assert representative_layers(plan) < len(spec.layers) - 5
    whole = simulate_step(plan, [640, 640])
    assert predict(plan).point(2, 640).predicted_seconds == pytest.approx(whole.seconds, rel=0.03)
