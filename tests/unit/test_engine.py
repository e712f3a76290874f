"""The engine over the interpreter: tokens that depend on nothing but the request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_device import BAD_TOKEN, FakeDevice, expected_tokens
from mkc.compiler.plan import Plan
from mkc.runtime import Engine
from mkc.runtime.check import LOGIT_STD
from mkc.runtime.check_measure import NEAR_TIE
from mkc.runtime.device import Piece
from mkc.runtime.engine import EngineOptions, Generation
from mkc.runtime.interpreter import Interpreter
from mkc.runtime.oracle import ReferenceOracle, TransformersOracle, is_transformers_installed
from mkc.runtime.packing import pack_weights
from mkc.runtime.paging import Paging
from mkc.runtime.prefill import PackedModelWeights, Prefill
from mkc.runtime.reference import KvCache, Reference
from mkc.runtime.request import Request, RequestError, RequestFailed, Sampling, TooLong
from mkc.runtime.state import StepState
from mkc.runtime.weights import RandomWeights
from test_interpreter import make_plan, tiny

MAX_TOKENS = 320
SMS = 2  # the interpreter's time goes by SMs
NEW = 6


@cache
def plan_of() -> Plan:
    return make_plan(tiny(), SMS)


@cache
def weights_of() -> RandomWeights:
    return RandomWeights(tiny(), 0, logit_std=LOGIT_STD)


@cache
def arena_of() -> Tensor:
    return pack_weights(plan_of().layout, plan_of().spec, weights_of(), "cpu")


def make_engine(blocks: Sequence[int] | None = None, **options: Any) -> Engine:
    state = StepState(plan_of(), MAX_TOKENS, blocks=blocks, poison=True)
    return Engine(Interpreter(plan_of(), arena_of(), state), arena_of(), EngineOptions(**options))


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, 1003) for _ in range(length)]


PROMPTS = (
    prompt_of(1, 1),
    prompt_of(65, 2),
    prompt_of(150, 3),
    [*prompt_of(150, 3)[:130], *prompt_of(20, 4)],
    prompt_of(150, 3),
)


def answers(engine: Engine, prompts: Iterable[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """All requests at once, each to its end."""
    streams = [engine.generate(prompt, NEW, ignore_eos=True) for prompt in prompts]
    found = [list(stream) for stream in streams]
    assert {stream.finish_reason for stream in streams} == {"length"}
    return found


@cache
def alone() -> list[list[int]]:
    """Each request by itself, its prompt in one piece, no prefix found."""
    with make_engine(prefix_cache=False) as engine:
        return [answers(engine, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("prefill_tokens", "prefix_cache"), [(7, True), (64, True), (64, False), (1000, True)]
)
def test_pieces_prefixes_and_neighbours_change_nothing(
    prefill_tokens: int, prefix_cache: bool
) -> None:
    with make_engine(prefill_tokens=prefill_tokens, prefix_cache=prefix_cache) as engine:
        first = engine.generate(PROMPTS[2], NEW, ignore_eos=True)
        assert answers(engine) == alone()
        assert list(first) == alone()[2]
        again = engine.generate(PROMPTS[3], NEW, ignore_eos=True)
        assert list(again) == alone()[3]
        assert again.cached_tokens == (128 if prefix_cache else 0)


def test_pieces_of_one_token() -> None:
    with make_engine(prefill_tokens=1) as engine:
        assert answers(engine, [PROMPTS[1]])[0] == alone()[1]


def test_rows_that_are_preempted_for_pages_go_on_as_they_were() -> None:
    """Full group: 6 blocks, of which four of the prompts need 3 each, and more as they grow."""
    preempted = []
    with make_engine(blocks=(6, 8), prefix_cache=False) as engine:
        scheduler = engine._scheduler
        preempt = scheduler._preempt
        scheduler._preempt = lambda s: (preempted.append(s), preempt(s))  # type: ignore
        prompts = [[*prompt_of(124, 9)[:n]] for n in (124, 123, 122)]
        few = [list(s) for s in [engine.generate(p, 10, ignore_eos=True) for p in prompts]]
    assert preempted
    with make_engine(prefix_cache=False) as engine:
        assert few == [list(engine.generate(p, 10, ignore_eos=True)) for p in prompts]


def test_joins_and_leaves_at_random_change_nothing() -> None:
    rng = random.Random(5)
    with make_engine(blocks=(9, 12), prefill_tokens=50) as engine:
        streams: list[tuple[int, Generation]] = []
        for _ in range(10):
            number = rng.randrange(len(PROMPTS))
            streams.append((number, engine.generate(PROMPTS[number], NEW, ignore_eos=True)))
            if rng.random() < 0.4:
                next(streams[-1][1])
                streams.pop()[1].cancel()
        for number, stream in streams:
            assert list(stream) == alone()[number]


@cache
def oracle_logits() -> tuple[list[Tensor], list[Tensor]]:
    """Logits of each new token behind the engine's own tokens, in float32 and bfloat16."""
    kind = TransformersOracle if is_transformers_installed() else ReferenceOracle
    oracle = kind(tiny(), weights_of())
    sequences = [torch.tensor([*p, *a[:-1]]) for p, a in zip(PROMPTS, alone(), strict=True)]
    exact, rounded = (
        [run.logits for run in oracle.run(sequences, NEW, dtype)]
        for dtype in (torch.float32, torch.bfloat16)
    )
    return exact, rounded


def test_tokens_are_those_of_the_oracle() -> None:
    """All but near ties, of which few can be."""
    differing = 0
    for tokens, exact, rounded in zip(alone(), *oracle_logits(), strict=True):
        noise = float((rounded - exact).square().mean().sqrt())
        for token, logits in zip(tokens, exact, strict=True):
            gap = float(logits.max() - logits[token])
            assert gap <= NEAR_TIE * noise
            differing += gap > 0
    assert differing <= 3


def test_packed_weights_unpack_to_the_models() -> None:
    packed, weights = PackedModelWeights(plan_of(), arena_of()), weights_of()
    tokens = torch.tensor([0, 17, 1002, 17])
    assert torch.equal(packed.embed(tokens), weights.embedding()[tokens])
    assert torch.equal(packed.head(), weights.head())
    assert torch.equal(packed.final_norm(), weights.final_norm())
    for index in (0, 3):
        ours, theirs = packed.layer(index), weights.layer(index)
        for name in ("norm", "q", "k", "v", "o", "router", "gate_up", "down"):
            mine, wanted = getattr(ours, name), getattr(theirs, name)
            assert (mine is None) == (wanted is None)
            assert mine is None or torch.equal(mine, wanted), (index, name)


@pytest.mark.parametrize("sizes", [(299,), (1, 63, 64, 65, 106), (130, 169)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_k_and_v_are_the_references(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Two prompts in one pass, one of them short; pages that hold nothing yet are NaN."""
    plan = plan_of()
    state = StepState(plan, MAX_TOKENS, blocks=(12, 12), poison=True)
    prefill = Prefill(plan, arena_of(), state, dtype)
    prompts, tables = (prompt_of(299, 1), prompt_of(3, 2)), ([0, 3, 1, 2, 11], [4])
    start = 0
    for size in sizes:
        pieces = [Piece(prompts[0][start : start + size], start, [tables[0]] * 2)]
        if start == 0:
            pieces.append(Piece(prompts[1], 0, [tables[1]] * 2))
        prefill.run(pieces)
        start += size
    exact = Reference(plan.spec, weights_of(), torch.float32, round_kv=True)
    rounded = Reference(plan.spec, weights_of(), torch.bfloat16)
    for prompt, table in zip(prompts, tables, strict=True):
        caches = [KvCache(plan.spec, torch.bfloat16, "cpu") for _ in range(2)]
        for reference, kv in zip((exact, rounded), caches, strict=True):
            reference.extend(torch.tensor(prompt), kv)
        for layer in range(len(plan.spec.layers)):
            found = state.read_pages(layer, torch.tensor(table), 0, len(prompt))
            wanted, other = (kv.last(layer, 999, torch.float32, "cpu") for kv in caches)
            for mine, right, bf16 in zip(found, wanted, other, strict=True):
                error = float((mine.float() - right).square().mean().sqrt())
                allowed = float((bf16 - right).square().mean().sqrt())
                share = 0.1 if dtype == torch.float32 else 1.5
                assert error <= share * allowed, (layer, error, allowed)


def test_prefill_refuses_pages_that_are_not_there() -> None:
    state = StepState(plan_of(), MAX_TOKENS)
    prefill = Prefill(plan_of(), arena_of(), state)
    with pytest.raises(ValueError, match="no blocks for some of pages 0 to 1 of layer 0"):
        prefill.run([Piece(prompt_of(70, 1), 0, [[0], [0, 1]])])


class FakeEngine(Engine):
    """The engine over a device that costs nothing."""

    def __init__(self, fail_steps: Iterable[int] = (), **options: Any) -> None:
        paging = Paging([40, 40], [None, 6], page_tokens=4)
        self.device = FakeDevice(paging, 2, frozenset(fail_steps))
        self._start(
            self.device, paging, 100, 100, [3], EngineOptions(**options), torch.device("cpu")
        )


def expected(prompt: Sequence[int], count: int) -> list[int]:
    return expected_tokens(prompt, len(prompt) + count, (None, 6), frozenset())


def test_streams_can_be_read_in_any_order_and_from_event_loops() -> None:
    prompts = [[number, 2, 1] for number in range(6)]

    async def read(stream: Generation) -> list[int]:
        return [token async for token in stream]

    async def read_all(engine: Engine) -> list[list[int]]:
        streams = [engine.generate(p, 20, ignore_eos=True) for p in prompts]
        return await asyncio.gather(*(read(stream) for stream in reversed(streams)))

    with FakeEngine(steps_ahead=2) as engine:
        found = asyncio.run(read_all(engine))
        assert found == [expected(p, 20) for p in reversed(prompts)]
        streams = [engine.generate(p, 20, ignore_eos=True) for p in prompts]
        for stream, prompt in reversed(list(zip(streams, prompts, strict=True))):
            assert list(stream) == expected(prompt, 20)
        assert engine.counts == {"waiting": 0, "running": 0, "preempted": 0}


def test_stop_tokens_end_a_stream_and_are_its_last_token() -> None:
    tokens = expected([1, 2], 30)
    with FakeEngine() as engine:
        stream = engine.generate([1, 2], 30, [tokens[7]], ignore_eos=True)
        assert list(stream) == tokens[: tokens.index(tokens[7]) + 1]
        assert stream.finish_reason == "stop"
        stream = engine.generate([1, 2], 30)
        assert list(stream) == tokens[: tokens.index(3) + 1]  # the model's own
        assert stream.finish_reason == "stop"


def test_leaving_a_stream_frees_its_row() -> None:
    with FakeEngine() as engine:
        with engine.generate([1, 2], ignore_eos=True) as stream:
            next(stream)
        assert list(engine.generate([1, 4], 5, ignore_eos=True)) == expected([1, 4], 5)
        rest = list(stream)
        assert stream.finish_reason == "cancelled" or len(rest) == engine.max_length - 3
        assert engine.counts["running"] == 0


def test_failures_end_their_stream_with_an_error_and_closing_ends_all() -> None:
    with FakeEngine(fail_steps=[3]) as engine:
        stream = engine.generate([1, 2], 9, ignore_eos=True)
        assert [next(stream), next(stream)] == expected([1, 2], 2)
        with pytest.raises(RequestFailed, match=r"MKC705.*ArithmeticError: step 3"):
            next(stream)
        stream = engine.generate([1, BAD_TOKEN, 2], 9)
        with pytest.raises(RequestFailed, match="a token that cannot be"):
            next(stream)
        assert list(engine.generate([1, 2], 9, ignore_eos=True)) == expected([1, 2], 9)
    with pytest.raises(RequestError, match=r"MKC706.*it was closed"):
        engine.generate([1], 1)


def test_a_fault_of_the_scheduler_ends_everything_instead_of_hanging() -> None:
    with FakeEngine() as engine:

        def advance() -> None:
            raise RuntimeError("a fault")

        engine._scheduler.advance = advance  # type: ignore[method-assign]
        stream = engine.generate([1, 2], 9)
        with pytest.raises(RequestFailed, match="the engine has stopped: RuntimeError: a fault"):
            next(stream)
        with pytest.raises(RequestError, match="MKC706"):
            engine.generate([1, 2], 9)


@pytest.mark.parametrize(
    ("refused", "kind", "message"),
    [
        (lambda e: e.generate([]), RequestError, "MKC704: the prompt has no tokens"),
        (lambda e: e.generate([100]), RequestError, "MKC704: token 100 is outside"),
        (lambda e: e.generate([1] * 60, 41), TooLong, "MKC701"),
        (
            lambda e: e.generate([1], sampling=Sampling(temperature=0.7)),
            RequestError,
            "MKC703: temperature = 0.7 is not supported",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_it_waits(
    refused: Callable[[Engine], Generation], kind: type[Exception], message: str
) -> None:
    with FakeEngine() as engine:
        with pytest.raises(kind, match=message):
            refused(engine)
        assert engine.counts["waiting"] == 0


def test_greedy_parameters_are_accepted() -> None:
    Request("r", (1,), sampling=Sampling(temperature=0.0, top_p=1.0)).sampling.require_greedy()
