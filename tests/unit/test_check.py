"""`mkc check` and what is under it: right executors pass, and every kind of damage is found."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from mkc.api.cli import app, run
from mkc.compiler.errors import MkcError
from mkc.compiler.parse import load_model
from mkc.compiler.place import place
from mkc.compiler.plan import Options, Plan
from mkc.compiler.schedule import schedule
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import load_target
from mkc.compiler.tile import tile
from mkc.runtime import interpreter as interpreter_module
from mkc.runtime import numerics, oracle, tasks
from mkc.runtime.check import CheckCases, edge_contexts, make_cases, make_state, run_checks
from mkc.runtime.check_case import StepCase, start_case
from mkc.runtime.check_measure import (
    NEAR_TIE,
    compare_experts,
    compare_tokens,
    deviation,
)
from mkc.runtime.check_repeat import check_repeats
from mkc.runtime.check_sequence import SequenceCheck, check_sequences
from mkc.runtime.check_step import StepCheck, check_step
from mkc.runtime.interpreter import Interpreter
from mkc.runtime.numerics import Routing
from mkc.runtime.oracle import OracleError, ReferenceOracle, TransformersOracle, hf_config
from mkc.runtime.packing import pack_weights, region_bytes
from mkc.runtime.state import NAN_BYTE, StepState
from mkc.runtime.weights import LayerWeights, RandomWeights

FEW_SMS = 5
MAX_TOKENS = 192
RAGGED = StepCase((65, None, 165, 101))
EDGES = StepCase((65, 100, 165, 101), edges=True)
PROMPTS = (62, 98, 0)


class KeptWeights(RandomWeights):
    """Random weights whose layers are drawn once."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        super().__init__(spec, seed, logit_std=0.5)
        self._layers = [RandomWeights.layer(self, index) for index in range(len(spec.layers))]

    def layer(self, index: int) -> LayerWeights:
        return self._layers[index]


def make_plan(spec: ModelSpec) -> Plan:
    target, options = load_target("h200").model_copy(update={"sms": FEW_SMS}), Options(max_batch=4)
    tiling = tile(spec, target, options.max_batch, options.chunk_fragments)
    layout = place(spec, tiling, target, options.ring_slots, options.window_bytes)
    return Plan(spec, target, options, tiling, layout, schedule(tiling, target))


@cache
def tiny_plan() -> Plan:
    return make_plan(load_model("tiny"))


@cache
def tiny_weights() -> KeptWeights:
    return KeptWeights(tiny_plan().spec, 0)


@cache
def tiny_arena() -> Tensor:
    return pack_weights(tiny_plan().layout, tiny_plan().spec, tiny_weights(), "cpu")


def make_interpreter(
    kind: type[Interpreter] = Interpreter, plan: Plan | None = None, arena: Tensor | None = None
) -> Interpreter:
    """An interpreter of the tiny model over a state of the undamaged plan."""
    state = StepState(tiny_plan(), MAX_TOKENS, poison=True)
    return kind(
        plan or tiny_plan(),
        tiny_arena() if arena is None else arena,
        state,
        "one_sm_first",
        trace=True,
    )


def step_check(executor: Interpreter, case: StepCase = RAGGED) -> StepCheck:
    return check_step(executor, tiny_weights(), case, seed=1)


def sequence_check(executor: Interpreter, steps: int = 6) -> SequenceCheck:
    witness = ReferenceOracle(tiny_plan().spec, tiny_weights())
    return check_sequences(executor, tiny_weights(), witness, PROMPTS, steps, seed=2)


def damaged_arena(name: str, layer: int, change: Callable[[Tensor], None]) -> Tensor:
    """The arena with the bytes of one region changed."""
    arena = tiny_arena().clone()
    before = arena.clone()
    change(region_bytes(arena, tiny_plan().layout.region(name, layer)))
    assert not torch.equal(arena, before)
    return arena


def zero(start: int, size: int) -> Callable[[Tensor], None]:
    def change(packed: Tensor) -> None:
        packed[start : start + size] = 0

    return change


def fill(start: int, size: int) -> Callable[[Tensor], None]:
    """NaN in a part of `size` bytes."""

    def change(packed: Tensor) -> None:
        packed[start : start + size] = NAN_BYTE

    return change


def swap(first: int, second: int, size: int) -> Callable[[Tensor], None]:
    """Exchanges two parts of `size` bytes."""

    def change(packed: Tensor) -> None:
        a, b = (packed[i * size : (i + 1) * size] for i in (first, second))
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)

    return change


@pytest.mark.parametrize("case", [RAGGED, EDGES, StepCase((1,)), StepCase((64, 2), edges=True)])
def test_a_step_passes_and_leaves_the_state_as_it_was(case: StepCase) -> None:
    executor = make_interpreter()
    start_case(executor.state, case, seed=1)
    before = [x.clone() for x in snapshot(executor.state)]
    check = step_check(executor, case)
    assert check.problems() == []
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(executor.state), strict=True))
    assert len(check.layers) == 6
    # The interpreter rounds less than the bfloat16 reference.
    assert max(layer.alone.rms_ratio for layer in check.layers) < 1.2
    assert check.layers[0].experts is None
    assert check.experts is not None
    assert check.experts.made == 5 * len(case.live)
    assert (check.logits_chained is None) == case.edges


def snapshot(state: StepState) -> list[Tensor]:
    return [state.tokens, state.positions, state.active, state.eos_tokens, *state.pools]


def gate_up_bytes() -> int:
    """Of one expert in tiny: 3 tiles of 32 rows and 208 columns."""
    return 96 * 208 * 2


FRAGMENT = 512
ARENA_DAMAGE: dict[str, tuple[str, int, Callable[[Tensor], None]]] = {
    "a fragment of qkv": ("qkv", 3, zero(7 * FRAGMENT, FRAGMENT)),
    "a fragment of out": ("out", 2, zero(11 * FRAGMENT, FRAGMENT)),
    "a fragment of the router": ("router", 4, zero(3 * FRAGMENT, FRAGMENT)),
    "a fragment of dense gate and up": ("gate_up", 0, zero(5 * FRAGMENT, FRAGMENT)),
    "a tile of dense down": ("down", 0, zero(0, 5 * FRAGMENT)),
    "a fragment of the head": ("head", -1, zero(40 * FRAGMENT, FRAGMENT)),
    "two experts changed places": ("gate_up", 1, swap(0, 1, gate_up_bytes())),
    "the norms of two layers changed places": ("norms", -1, swap(2, 3, 208 * 2)),
    "the final norm is a layer's": ("norms", -1, swap(5, 6, 208 * 2)),
}


@pytest.mark.parametrize("name", ARENA_DAMAGE)
def test_damaged_weights_are_found_in_their_layer(name: str) -> None:
    region, layer, change = ARENA_DAMAGE[name]
    case = StepCase((65, 2, 165, 101))
    check = step_check(make_interpreter(arena=damaged_arena(region, layer, change)), case)
    assert not check.ok
    if layer >= 0 and region != "router":
        failed = [x.layer for x in check.layers if not (x.alone.ok and x.keys.ok and x.values.ok)]
        assert failed == [layer]
    if region == "router":
        assert check.router is not None
        assert (check.router.ok, check.router.row) == (False, layer)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_off_by_one_is_found(change: int) -> None:
    spec = tiny_plan().spec
    layers = tuple(
        layer
        if layer.window is None
        else layer.model_copy(update={"window": layer.window + change})
        for layer in spec.layers
    )
    plan = dataclasses.replace(tiny_plan(), spec=spec.model_copy(update={"layers": layers}))
    check = step_check(make_interpreter(plan=plan), EDGES)
    failed = [x.layer for x in check.layers if not x.alone.ok]
    assert failed == [i for i, layer in enumerate(spec.layers) if layer.window is not None]


class TokenOffByOne(Interpreter):
    """Emits and feeds the token after the right one."""

    def step(self, rows: int | None = None) -> None:
        super().step(rows)
        self.emitted[0] += 1
        self.state.tokens[0] += 1


class SecondBestToken(Interpreter):
    """As if the largest logit had been another's: logits and token agree, and are wrong."""

    def step(self, rows: int | None = None) -> None:
        super().step(rows)
        best = self.state.logits[0].argmax()
        self.state.logits[0, best] = -1
        self.emitted[0] = self.state.logits[0].argmax()
        self.state.tokens[0] = self.emitted[0]


class NeverStops(Interpreter):
    """Ignores stop tokens and limits."""

    def step(self, rows: int | None = None) -> None:
        active = self.state.active.clone()
        super().step(rows)
        self.state.active.copy_(active)


class MovesIdleRows(Interpreter):
    def step(self, rows: int | None = None) -> None:
        super().step(rows)
        self.state.positions[1] += 1


class LogitsUnwritten(Interpreter):
    def step(self, rows: int | None = None) -> None:
        kept = self.state.logits[2, -1].clone()
        super().step(rows)
        self.state.logits[2, -1] = kept


class WrongSlot(Interpreter):
    """Stores the new token beside its place."""

    def step(self, rows: int | None = None) -> None:
        state: Any = self.state
        store = state.store_token
        state.store_token = lambda layer, row, head, position, key, value: store(
            layer, row, head, position ^ 1, key, value
        )
        super().step(rows)
        state.store_token = store


class SpoilsAnotherRow(Interpreter):
    """Stores the new token, and a part of it in another row's page."""

    def step(self, rows: int | None = None) -> None:
        super().step(rows)
        self.state.pages(2, 3, 1, 1)[0][100] ^= 1


class SwappedRows(Interpreter):
    """Reads the pages of the neighbour."""

    def step(self, rows: int | None = None) -> None:
        for table in self.state.page_tables:
            table[[2, 3], :2] = table[[3, 2], :2]
        super().step(rows)
        for table in self.state.page_tables:
            table[[2, 3], :2] = table[[3, 2], :2]


class Unsteady(Interpreter):
    """Its fourth step differs in the last bit of one logit."""

    def step(self, rows: int | None = None) -> None:
        super().step(rows)
        if self.steps == 4:
            self.state.logits.view(torch.int32)[2, 5] ^= 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TokenOffByOne, "its largest logit is"),
        (SecondBestToken, "logits, row 0"),
        (NeverStops, "token, position and activity"),
        (MovesIdleRows, "row 1 is idle"),
        (LogitsUnwritten, "row 2: 1 logits are not a number"),
        (WrongSlot, "stored"),
        (SpoilsAnotherRow, "blocks changed beyond the new tokens"),
        (SwappedRows, "an RMS error"),
    ],
)
def test_damaged_executors_are_found(kind: type[Interpreter], words: str) -> None:
    problems = step_check(make_interpreter(kind)).problems()
    assert any(words in problem for problem in problems), problems


def test_a_stop_token_that_is_ignored_is_found() -> None:
    """Only the second of the two runs has one that is emitted."""

    class IgnoresStopTokens(Interpreter):
        def step(self, rows: int | None = None) -> None:
            stop_tokens = self.state.eos_tokens
            self.state.eos_tokens = stop_tokens[:0]
            super().step(rows)
            self.state.eos_tokens = stop_tokens

    (problem,) = step_check(make_interpreter(IgnoresStopTokens)).problems()
    assert problem.startswith("row 0: token, position and activity are")


def wrong_scores(rows: int, live: Any, logits: Any, count: int) -> Routing:
    """Weights of the experts that are 3 % too large."""
    routing = numerics.choose_experts(rows, live, logits, count)
    users = {e: (r, s, scores * 1.03) for e, (r, s, scores) in routing.users.items()}
    return Routing(routing.active, users)


def next_expert(rows: int, live: Any, logits: Any, count: int) -> Routing:
    """The experts after the right ones."""
    return numerics.choose_experts(rows, live, logits[:, [*range(1, logits.shape[1]), 0]], count)


def late_angles(spec: ModelSpec, positions: list[int]) -> Any:
    return numerics.rope_angles(spec, [position + 1 for position in positions])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("choose_experts", wrong_scores),
        ("choose_experts", next_expert),
        ("rope_angles", late_angles),
    ],
)
def test_wrong_formulas_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(tasks, name, wrong)
    check = step_check(make_interpreter())
    assert [layer for layer in check.layers if not layer.alone.ok], check.worst()


def test_sequences_pass_and_the_two_oracles_agree() -> None:
    weights = tiny_weights()
    witness = TransformersOracle(tiny_plan().spec, weights)
    executor = make_interpreter()
    theirs = check_sequences(executor, weights, witness, PROMPTS, 6, seed=2)
    ours = sequence_check(make_interpreter())
    assert theirs.oracle.startswith("transformers 5.")
    assert (theirs.problems(), ours.problems()) == ([], [])
    assert theirs.logits.rms_ratio == pytest.approx(ours.logits.rms_ratio, rel=0.01)
    assert theirs.tokens.made == 18
    assert theirs.tokens.differing == ours.tokens.differing
    assert theirs.own_tokens >= 15
    assert theirs.experts is not None
    assert theirs.experts.made == 5 * 18


def test_the_oracles_agree_in_bfloat16_too() -> None:
    spec, weights = tiny_plan().spec, tiny_weights()
    tokens = [torch.arange(20, 50), torch.arange(7)]
    experts = [torch.tensor([[[-1, -1]] * len(t)] + [[[2, 4]] * len(t)] * 5) for t in tokens]
    witnesses = (TransformersOracle(spec, weights), ReferenceOracle(spec, weights))
    for dtype in (torch.float32, torch.bfloat16):
        theirs, ours = (w.run(tokens, 3, dtype, experts) for w in witnesses)
        for a, b, own in zip(theirs, ours, experts, strict=True):
            assert a.logits.shape == (3, spec.vocab_size)
            torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-5)
            torch.testing.assert_close(
                a.router_logits, b.router_logits, rtol=0, atol=1e-5, equal_nan=True
            )
            assert torch.equal(a.experts, own)
            assert torch.equal(b.experts, own)


@pytest.mark.parametrize("kind", [TokenOffByOne, SecondBestToken, WrongSlot])
def test_damaged_sequences_are_found(kind: type[Interpreter]) -> None:
    assert sequence_check(make_interpreter(kind)).problems()


def test_damaged_weights_are_found_in_sequences() -> None:
    arena = damaged_arena("out", 2, zero(11 * FRAGMENT, FRAGMENT))
    assert not sequence_check(make_interpreter(arena=arena)).logits.ok


def test_repeats_pass_and_a_single_bit_is_found() -> None:
    good = check_repeats(make_interpreter(), RAGGED, runs=3, steps=2)
    assert (good.ok, good.problems()) == (True, [])
    bad = check_repeats(make_interpreter(Unsteady), RAGGED, runs=4, steps=2)
    assert bad.first == (1, "logits of step 1")
    assert "1 of 4 runs differ" in bad.problems()[0]


def test_rows_without_a_numeric_logit_end() -> None:
    """As in the kernel: NaN logits are passed over, and a row of nothing else emits -2 and ends."""
    executor = make_interpreter(arena=damaged_arena("norms", -1, fill(6 * 416, 416)))
    start_case(executor.state, RAGGED, seed=1)
    executor.step()
    assert executor.emitted.tolist() == [-2, -1, -2, -2]
    assert executor.state.tokens.tolist() == [0, 3, 0, 0]
    assert executor.state.active.tolist() == [0, 0, 0, 0]
    assert executor.state.positions.tolist() == [65, 0, 165, 101]


def test_logits_that_are_no_numbers_are_passed_over() -> None:
    right = make_interpreter()
    start_case(right.state, RAGGED, seed=1)
    right.step()
    best = int(right.emitted[0])
    tile_bytes = 13 * FRAGMENT  # 16 rows of 208 columns
    nan_tile = damaged_arena("head", -1, fill(best // 16 * tile_bytes, tile_bytes))
    executor = make_interpreter(arena=nan_tile)
    start_case(executor.state, RAGGED, seed=1)
    executor.state.tokens.copy_(torch.tensor([17, 3, 18, 19]))
    executor.step()
    logits = executor.state.logits.nan_to_num(nan=-math.inf)
    assert int(logits.isinf().sum(dim=1)[0]) == 16
    assert executor.emitted[[0, 2, 3]].tolist() == logits.argmax(dim=1)[[0, 2, 3]].tolist()


def test_deviation_is_that_of_the_worst_row() -> None:
    exact = torch.ones(3, 400)
    noise = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    found = deviation(
        exact + noise * torch.tensor([[0.1], [0.4], [0.2]]), exact + 0.2 * noise, exact, [5, 6, 7]
    )
    assert found.row == 6
    assert found.rms_ratio == pytest.approx(2)
    assert not found.ok
    assert deviation(exact, exact + noise, exact).rms_ratio == 0
    assert not deviation(exact + noise, exact, exact).ok
    assert not deviation(exact * math.nan, exact + noise, exact).ok
    pooled = deviation(
        exact + noise * torch.tensor([[0.1], [0.4], [0.2]]), exact + 0.2 * noise, exact, pooled=True
    )
    assert pooled.rms_ratio == pytest.approx(math.sqrt(0.07) / 0.2, rel=0.1)


def test_choices_differ_rightly_only_at_near_ties() -> None:
    exact = torch.tensor([[4.0, 3.9, 0.0, 1.0], [4.0, 3.0, 0.0, 1.0]])
    rounded = exact + torch.tensor([0.04, -0.04, 0.04, -0.04])
    near = compare_tokens(torch.tensor([1, 0]), exact, rounded)
    assert (near.made, near.near_ties, near.differing, near.wrong) == (2, 1, 1, 0)
    assert near.worst == pytest.approx(0.1)
    wrong = compare_tokens(torch.tensor([0, 1]), exact, rounded, [3, 4])
    assert (wrong.differing, wrong.wrong, wrong.row, wrong.worst) == (1, 1, 4, 1.0)
    assert compare_tokens(torch.tensor([0, -2]), exact, rounded).wrong == 1
    assert near.noise == pytest.approx(0.04 * NEAR_TIE)
    sets = compare_experts(torch.tensor([[0, 1], [0, 3]]), exact, noise=0.5)
    assert (sets.differing, sets.wrong, sets.worst) == (1, 1, 2.0)
    assert compare_experts(torch.tensor([[0, 1], [0, 3]]), exact, noise=2.5).ok


def test_cases_meet_every_edge_with_every_number_of_rows() -> None:
    plan = tiny_plan()
    contexts = edge_contexts(plan, 640)
    assert {1, 63, 64, 65, 99, 100, 101, 127, 128, 129, 163, 164, 165, 640} <= set(contexts)
    cases = make_cases(plan, range(1, 5))
    assert {len(case.lengths) for case in cases.steps} == {1, 2, 3, 4}
    assert set(contexts) <= {n for case in make_cases(plan, [2]).steps for n in case.lengths}
    many = make_cases(plan, range(1, 9))
    assert {n for case in many.steps for n in case.lengths} == {None, *contexts}
    assert [len(lengths) for lengths in many.sequences] == list(range(1, 9))
    assert {61, 97, 125, 161} <= {n for lengths in many.sequences for n in lengths}


def test_a_state_has_room_for_the_cases_and_no_more() -> None:
    plan = tiny_plan()
    state = make_state(plan, [(65, None, 300), (64,), (1, 1, 1, 1)], "cpu")
    assert [pool.shape[0] for pool in state.pools] == [
        7 if group.window is None else 5 for group in plan.layout.kv_groups
    ]
    start_case(state, StepCase((65, None, 300)), 0)


def test_all_checks_run_and_progress_counts_them() -> None:
    plan, heard = tiny_plan(), []
    cases = CheckCases((RAGGED,), ((0, 3),), 2, (StepCase((5,)),), 2)
    report = run_checks(
        plan,
        lambda state: Interpreter(plan, tiny_arena(), state, trace=True),
        tiny_weights(),
        ReferenceOracle(plan.spec, tiny_weights()),
        cases,
        progress=lambda done, what: heard.append((done, what)),
    )
    assert report.ok
    assert {done for done, _ in heard} == {0, 1, 2}
    assert (len(report.steps), len(report.sequences), len(report.repeats)) == (1, 1, 1)


def test_a_model_that_transformers_cannot_express_is_refused() -> None:
    spec = tiny_plan().spec
    layers = (*spec.layers[:-1], spec.layers[-1].model_copy(update={"window": 50}))
    with pytest.raises(OracleError, match=r"MKC607.*transformers cannot express"):
        hf_config(spec.model_copy(update={"layers": layers}))


SHORT = ("check", "tiny", "--rows", "2", "--steps", "2", "--runs", "2")


def test_command_shows_tables_and_names_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "is_transformers_installed", lambda: False)
    done = CliRunner().invoke(app, SHORT, prog_name="mkc", catch_exceptions=False)
    assert done.exit_code == 0
    assert "oracle    mkc's own reference for decoding" in done.output
    assert "transformers is not installed" in done.output
    assert "ok  [1, 63] with large keys at edges" in done.output
    assert "ok  2 runs of" in done.output


def test_command_gives_json_and_fails_with_the_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interpreter_module, "Interpreter", LogitsOfNan)
    assert run([*SHORT, "--json", "--oracle", "reference"]) == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (report["ok"], report["oracle"]) == (False, "mkc's own reference")
    assert report["steps"][0]["logits"]["rms"] is None
    assert "error MKC601: step [1, 63]: row 0: 1 logits are not a number" in shown.err


class LogitsOfNan(Interpreter):
    def step(self, rows: int | None = None) -> None:
        super().step(rows)
        self.state.logits[0, 9] = math.nan


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rows", "9"), "numbers from 1 to 8"),
        (("--rows", "3-1"), "numbers from 1 to 8"),
        (("--oracle", "vllm"), "not one of"),
        (("--gpu",), "MKC602"),
    ],
)
def test_bad_input_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    if "--gpu" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run(["check", "tiny", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_absent_oracle_that_was_asked_for_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run([*SHORT, "--oracle", "transformers"]) == 2
    assert "MKC607" in capsys.readouterr().err


def test_a_model_too_large_for_the_cpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "north_mini_code"]) == 2
    assert "MKC602: north-mini-code-1.0 has" in capsys.readouterr().err


def test_oracle_errors_are_errors_of_mkc() -> None:
    assert issubclass(OracleError, MkcError)
