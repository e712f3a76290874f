"""What `mkc bench` sets up before it times, on the CPU: live rows, needed bytes, experts."""

from typing import Any

import pytest
import torch

from mkc.compiler.errors import CheckError
from mkc.compiler.plan import Options, Plan
from mkc.compiler.target import load_target
from mkc.compiler.traffic import step_bytes
from mkc.runtime import bench
from mkc.runtime.check import make_state
from mkc.runtime.interpreter import Interpreter
from mkc.runtime.packing import pack_weights
from mkc.runtime.weights import RandomWeights

STEPS = 4


@pytest.fixture(scope="module")
def plan() -> Plan:
    from mkc.compiler.parse import load_model
    from mkc.compiler.place import place
    from mkc.compiler.schedule import schedule
    from mkc.compiler.tile import tile

    spec, target, options = load_model("tiny"), load_target("h200"), Options()
    tiling = tile(spec, target, options.max_batch, options.chunk_fragments)
    layout = place(spec, tiling, target, options.ring_slots, options.window_bytes)
    return Plan(spec, target, options, tiling, layout, schedule(tiling, target))


def prepared(plan: Plan, lengths: list[int], routing: bench.Routing) -> Any:
    """A Bench over the interpreter whose rows are about to see `lengths` tokens."""
    state = make_state(plan, [[n + bench.Bench.room(STEPS) for n in lengths]], "cpu")
    arena = pack_weights(plan.layout, plan.spec, RandomWeights(plan.spec, 0), "cpu")
    made = bench.Bench(Interpreter(plan, arena, state))  # type: ignore[arg-type]
    made._prepare(lengths, STEPS, routing)
    made._start(lengths)
    return made


@pytest.mark.parametrize("lengths", [[1], [64], [65, 1], [200, 127, 320]])
def test_rows_stay_live_where_unwritten_memory_is_nan(plan: Plan, lengths: list[int]) -> None:
    made = prepared(plan, lengths, "uniform")
    for _ in range(STEPS):
        made._feed(len(lengths), "uniform")
        made.kernel.step(len(lengths))
        bench._require_live(made.state.active[: len(lengths)][None])
        assert made.state.logits[: len(lengths)].isfinite().all()
    assert made.state.positions.tolist()[: len(lengths)] == [n - 1 + STEPS for n in lengths]


def test_rows_with_correlated_routing_do_the_same(plan: Plan) -> None:
    made = prepared(plan, [130, 130, 130], "correlated")
    made._feed(3, "correlated")
    made.kernel.step(3)
    assert torch.equal(made.state.logits[0], made.state.logits[2])
    logits = made.kernel.router_logits(3)
    counts = bench.count_active(plan, logits).tolist()
    for layer, count in zip(plan.tiling.layers, counts, strict=True):
        assert count == layer.slots if layer.routed else count != count
    made._prepare([10, 20], STEPS, "uniform")  # and the pages are free again
    made._start([10, 20])
    made._feed(2, "uniform")
    made.kernel.step(2)
    bench._require_live(made.state.active[:2][None])


def test_a_row_that_ends_is_found() -> None:
    with pytest.raises(CheckError, match="row 1 ended"):
        bench._require_live(torch.tensor([[1, 1], [1, 0]]))


def test_needed_bytes_are_the_median_steps(plan: Plan) -> None:
    layers = len(plan.tiling.layers)
    active = torch.tensor([[2.0] * layers, [3.0] * layers, [4.0] * layers])
    middle = [100 + bench.WARM_UP_STEPS + 1]
    expected = step_bytes(plan, 1, middle, [3.0] * layers)
    assert bench._needed_bytes(plan, [100], active) == expected


def test_events_of_a_traced_kernel_are_read_back(plan: Plan) -> None:
    """The last slots of a warp's row are of no entry, and a clock that wraps counts on."""
    from dataclasses import replace
    from types import SimpleNamespace

    from mkc.compiler.trace import MeasuredEvent, dump_trace
    from mkc.runtime.megakernel import Megakernel

    programs = (plan.programs[0][:2],)
    words = torch.zeros(1, 12, 3, 4, dtype=torch.int64)
    words[..., 1], words[..., 2], words[..., 3] = 2**32 - 10, 2**32 - 5, 20
    words[0, 3, 1, 1:] = torch.tensor([30, 40, 50])
    stored = torch.where(words >= 2**31, words - 2**32, words).int()
    kernel = SimpleNamespace(_events=stored, plan=replace(plan, programs=programs))
    events = Megakernel.events(kernel)  # type: ignore[arg-type]
    assert len(events) == 12 * 2
    first = programs[0][0]
    assert events[0] == MeasuredEvent(0, 0, first.kind, first.layer, first.tile, 0, 5, 30)
    assert events[3 * 2 + 1][5:] == (40, 50, 60)
    assert dump_trace(None, events)
