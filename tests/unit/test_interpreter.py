"""The interpreter against the reference, against itself, and on plans broken on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import get_args

import pytest
import torch
from torch import Tensor

from mkc.compiler.parse import load_model
from mkc.compiler.place import PacketSet, place
from mkc.compiler.plan import Options, Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.schedule import schedule
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import load_target
from mkc.compiler.tile import PAGE_TOKENS, tile
from mkc.runtime.interpreter import (
    DeadlockError,
    Interpreter,
    Order,
    ProgramError,
    RewrittenPacketError,
    UnwrittenPacketError,
)
from mkc.runtime.packets import PacketStore, Site, Wait
from mkc.runtime.packing import pack_weights
from mkc.runtime.reference import KvCache, Reference, StepResult
from mkc.runtime.state import StepState
from mkc.runtime.weights import LayerWeights, RandomWeights

FEW_SMS = 5  # every SM has several tiles, splits and rows' units of each op
RAGGED = (99, 1, 300, 64, 128, 63, 101, 127)
EDGES = (129, 0, 65, 100, 163, 164, 228, 2)
MAX_TOKENS = 320

# Routing whose margin is smaller may go either way in bfloat16, and all that follows with it.
ROUTING_MARGIN = 0.06
# Relative L2 of a row's residual from float32 while the routing is the same; a wrong formula gives
# 0.1 and more. The median is compared with what the bfloat16 reference, which rounds more, has.
ROW_BOUND = 0.025


class KeptWeights(RandomWeights):
    """Random weights whose layers are drawn once."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        super().__init__(spec, seed)
        self._layers = [RandomWeights.layer(self, index) for index in range(len(spec.layers))]

    def layer(self, index: int) -> LayerWeights:
        return self._layers[index]


def tiny(**changes: object) -> ModelSpec:
    return load_model("tiny").model_copy(update=changes)


def make_plan(spec: ModelSpec, sms: int) -> Plan:
    target = load_target("h200").model_copy(update={"sms": sms})
    tiling = tile(spec, target, 8, 16)
    layout = place(spec, tiling, target)
    return Plan(spec, target, Options(), tiling, layout, schedule(tiling, target))


@cache
def plan_of(sms: int) -> Plan:
    return make_plan(tiny(), sms)


@cache
def arena_of(sms: int) -> Tensor:
    plan = plan_of(sms)
    return pack_weights(plan.layout, plan.spec, RandomWeights(plan.spec, 0), "cpu")


def sequence_kv(spec: ModelSpec, seed: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Per layer bf16 K and V [length, kv_heads, head_dim] of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, length, spec.attention.kv_heads, spec.attention.head_dim)
    draws = [torch.randn(shape, generator=generator).bfloat16() for _ in spec.layers]
    return [(k, v) for k, v in draws]


def start(state: StepState, row: int, length: int, seed: int) -> None:
    """Makes a row of `length` tokens out of a seed."""
    state.allocate_row(row, MAX_TOKENS)
    for layer, (keys, values) in enumerate(sequence_kv(state.plan.spec, seed, length)):
        state.load_kv(row, layer, keys, values)
    state.start_row(row, 20 + 101 * seed % 900, length, MAX_TOKENS)


def ragged_state(plan: Plan, lengths: Sequence[int], poison: bool = False) -> StepState:
    state = StepState(plan, MAX_TOKENS, poison=poison)
    for row, length in enumerate(lengths):
        start(state, row, length, seed=row)
    return state


def reference_step(reference: Reference, state: StepState, rows: int) -> StepResult:
    """The step that the state is about to take, by a reference over the state's own K and V."""
    caches = []
    for row in range(rows):
        pairs = [state.read_kv(row, layer) for layer in range(len(state.plan.spec.layers))]
        keys, values = ([pair[i] for pair in pairs] for i in range(2))
        length = int(state.positions[row])
        caches.append(KvCache.from_tensors(state.plan.spec, keys, values, length))
    return reference.decode(state.tokens[:rows].long(), caches)


def row_distances(values: Tensor, exact: Tensor) -> Tensor:
    """Relative L2 over the last axis."""
    relative: Tensor = torch.linalg.vector_norm(values - exact, dim=-1)
    relative /= torch.linalg.vector_norm(exact, dim=-1)
    return relative


def is_settled(spec: ModelSpec, result: StepResult) -> Tensor:
    """[layers, rows]: no router up to this layer is near a tie."""
    order = result.router_logits.sort(dim=-1, descending=True).values
    chosen = result.experts.shape[-1]
    is_clear = ~((order[..., chosen - 1] - order[..., chosen]) < ROUTING_MARGIN)  # dense: NaN
    return is_clear.cumprod(dim=0) > 0


def check_steps(plan: Plan, arena: Tensor, state: StepState, rows: int, steps: int) -> None:
    """Compares `steps` steps with both references over the same K and V, row by row."""
    weights = KeptWeights(plan.spec, 0)
    exact = Reference(plan.spec, weights, torch.float32, round_kv=True)
    rounded = Reference(plan.spec, weights, torch.bfloat16)
    interpreter = Interpreter(plan, arena, state, trace=True)
    ours, theirs = [], []
    for _ in range(steps):
        wanted, other = (reference_step(reference, state, rows) for reference in (exact, rounded))
        interpreter.step()
        assert interpreter.layer_outputs is not None
        settled = is_settled(plan.spec, wanted)
        distances = row_distances(interpreter.layer_outputs[:, :rows], wanted.layer_outputs)
        assert distances[settled].max() < ROW_BOUND, distances
        logits = row_distances(state.logits[:rows], wanted.logits)
        assert (logits[settled[-1]] < ROW_BOUND).all(), logits
        ours.append(distances[settled])
        theirs.append(row_distances(other.layer_outputs, wanted.layer_outputs)[settled])
        assert torch.equal(state.tokens[:rows].long(), state.logits[:rows].argmax(dim=-1))
    assert torch.cat(ours).numel() >= steps * rows * len(plan.spec.layers) // 2
    assert torch.cat(ours).median() < torch.cat(theirs).median()


@pytest.mark.parametrize("lengths", [RAGGED, EDGES], ids=["ragged", "edges"])
@pytest.mark.parametrize("sms", [FEW_SMS, 132])
def test_steps_agree_with_the_reference(sms: int, lengths: tuple[int, ...]) -> None:
    check_steps(plan_of(sms), arena_of(sms), ragged_state(plan_of(sms), lengths), 8, steps=3)


def test_untied_head_and_logit_scale_agree_with_the_reference() -> None:
    plan = make_plan(tiny(tied_head=False, logit_scale=0.25), FEW_SMS)
    arena = pack_weights(plan.layout, plan.spec, KeptWeights(plan.spec, 0), "cpu")
    check_steps(plan, arena, ragged_state(plan, RAGGED), 8, steps=1)


@pytest.mark.parametrize("rows", range(1, 8))
def test_every_number_of_rows_agrees_with_the_reference(rows: int) -> None:
    plan = plan_of(FEW_SMS)
    check_steps(plan, arena_of(FEW_SMS), ragged_state(plan, RAGGED[:rows]), rows, steps=1)


def run_steps(
    state: StepState, steps: int, order: Order = "round_robin", rows: int | None = None
) -> list[Tensor]:
    """Logits of each step and then all that the state keeps."""
    sms = len(state.plan.programs)
    interpreter = Interpreter(plan_of(sms), arena_of(sms), state, order, seed=5)
    logits = []
    for _ in range(steps):
        interpreter.step(rows)
        logits.append(state.logits.clone())
    return [*logits, state.tokens, state.positions, state.active, *state.pools]


@pytest.mark.parametrize("sms", [FEW_SMS, 132])
def test_results_do_not_depend_on_the_order_of_sms(sms: int) -> None:
    runs = [run_steps(ragged_state(plan_of(sms), RAGGED), 2, order) for order in get_args(Order)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("row", range(8))
def test_a_row_has_the_same_bits_with_and_without_neighbours(row: int) -> None:
    plan = plan_of(FEW_SMS)
    together, alone, first = ragged_state(plan, RAGGED), *(StepState(plan, 320) for _ in range(2))
    start(alone, row, RAGGED[row], seed=row)
    start(first, 0, RAGGED[row], seed=row)
    runs = [run_steps(together, 2), run_steps(alone, 2), run_steps(first, 2, rows=1)]
    kept = []
    for run, state, own in zip(runs, (together, alone, first), (row, row, 0), strict=True):
        pairs = [state.read_kv(own, layer) for layer in range(len(plan.spec.layers))]
        kept.append([run[0][own], run[1][own], *(tensor for pair in pairs for tensor in pair)])
    for other in kept[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept[0], other, strict=True))


def test_poison_never_reaches_a_result() -> None:
    clean, poisoned = (
        ragged_state(plan_of(FEW_SMS), EDGES, poison=poison) for poison in (False, True)
    )
    assert all(pool.view(torch.bfloat16).isnan().any() for pool in poisoned.pools)
    runs = [run_steps(state, 3)[:3] for state in (clean, poisoned)]
    for a, b in zip(*runs, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


def test_stored_tokens_are_what_later_steps_read() -> None:
    plan, state = plan_of(FEW_SMS), StepState(plan_of(FEW_SMS), MAX_TOKENS, poison=True)
    start(state, 0, 0, seed=4)
    tokens = [int(state.tokens[0])]
    interpreter = Interpreter(plan, arena_of(FEW_SMS), state)
    for _ in range(70):
        interpreter.step(rows=1)
        tokens.append(int(state.tokens[0]))
    reference = Reference(plan.spec, KeptWeights(plan.spec, 0), torch.float32, round_kv=True)
    _, cache = reference.prefill(torch.tensor(tokens[:-1]))
    keys, values = state.read_kv(0, 0)  # later layers may route a token elsewhere
    wanted = cache.last(0, 70, torch.float32, "cpu")
    assert keys.shape[0] == 70
    for ours, theirs in zip((keys, values), wanted, strict=True):
        assert row_distances(ours.float(), theirs).max() < ROW_BOUND


def test_rows_stop_at_their_limit_or_an_eos_token_and_idle_rows_stay() -> None:
    plan = plan_of(FEW_SMS)
    state = ragged_state(plan, (5, 5, 5))
    (predicted,) = run_steps(ragged_state(plan, (5, 5, 5)), 1)[:1]
    state.eos_tokens = torch.tensor([1, int(predicted[0].argmax())], dtype=torch.int32)
    state.limits[1] = 6
    state.tokens[5] = 77
    assert predicted[0].argmax() != predicted[2].argmax()
    run_steps(state, 1)
    assert state.active.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert state.positions.tolist() == [6, 6, 6, 0, 0, 0, 0, 0]
    assert state.tokens[:3].tolist() == predicted[:3].argmax(dim=-1).tolist()
    assert state.tokens[5] == 77


def test_a_live_row_outside_of_the_step_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        run_steps(ragged_state(plan_of(FEW_SMS), (5, 5, 5)), 1, rows=2)


def mutate(change: Callable[[int, Entry], Sequence[Entry]]) -> Plan:
    """The plan with every entry of every SM replaced by what `change` makes of it."""
    plan = plan_of(FEW_SMS)
    programs = tuple(
        tuple(new for entry in program for new in change(sm, entry))
        for sm, program in enumerate(plan.programs)
    )
    assert programs != plan.programs
    return dataclasses.replace(plan, programs=programs)


def run_mutated(plan: Plan) -> None:
    Interpreter(plan, arena_of(FEW_SMS), ragged_state(plan, RAGGED)).step()


@pytest.mark.parametrize(
    ("kind", "layer", "missing"),
    [
        (EntryKind.EMBED, 0, "layer_input[layer 0, tile 2, row 0]"),
        (EntryKind.ROUTER, 1, "router_logits[layer 1, row 0, tile 0]"),
        (EntryKind.QKV, 2, "qkv[layer 2, tile 2, row 0]"),
        (EntryKind.ATTENTION, 3, "partials[buffer 1"),
        (EntryKind.FFN_UP, 4, "hidden[layer 4"),
        (EntryKind.MERGE, 4, "merged[layer 4, tile 4, row 0]"),
        (EntryKind.RESIDUAL, 5, "layer_input[layer 6, tile 2, row 0]"),
        (EntryKind.SAMPLE, 6, "candidates[row 0, sm 2]"),
    ],
)
def test_a_dropped_entry_is_a_deadlock(kind: EntryKind, layer: int, missing: str) -> None:
    def drop(sm: int, entry: Entry) -> list[Entry]:
        tile_or_rank = sm if kind == EntryKind.SAMPLE else entry.tile
        wanted = 0 if kind == EntryKind.ROUTER else 2
        is_dropped = (entry.kind, entry.layer, tile_or_rank) == (kind, layer, wanted)
        return [] if is_dropped else [entry]

    with pytest.raises(DeadlockError) as caught:
        run_mutated(mutate(drop))
    assert caught.value.code == "MKC611"
    assert any(missing in wait for wait in caught.value.waits.values()), caught.value
    assert missing in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        (EntryKind.STAGE, 2),
        (EntryKind.OUT, 3),
        (EntryKind.FFN_DOWN, 0),
        (EntryKind.HEAD, 6),
        (EntryKind.SAMPLE, 6),
    ],
)
def test_an_entry_without_its_predecessor_on_the_sm_is_an_error(
    kind: EntryKind, layer: int
) -> None:
    with pytest.raises(ProgramError) as caught:
        run_mutated(mutate(lambda sm, e: [] if (sm, e.kind, e.layer) == (0, kind, layer) else [e]))
    assert caught.value.code == "MKC614"


@pytest.mark.parametrize("kind", [EntryKind.EMBED, EntryKind.QKV, EntryKind.MERGE])
def test_a_second_write_is_an_error(kind: EntryKind) -> None:
    with pytest.raises(RewrittenPacketError, match="MKC613"):
        run_mutated(mutate(lambda sm, e: [e, e] if e.kind == kind else [e]))


def test_reads_are_of_the_very_epoch() -> None:
    store = PacketStore(PacketSet("qkv", 0, ("layer", "row"), (2, 3), 3), width=4)
    site = Site(3, 7, Entry(EntryKind.QKV, 1, 5))
    store.write(site, (1, slice(2)), 9, torch.ones(2, 4).numpy())
    assert store.read(site, (1, slice(2)), 9).sum() == 8
    with pytest.raises(UnwrittenPacketError) as caught:
        store.read(site, (1, slice(3)), 9)
    assert caught.value.code == "MKC612"
    assert "SM 3, entry 7 (QKV layer 1 tile 5) reads qkv[layer 1, row 2]" in str(caught.value)
    assert not Wait(site, store, (1, 2), 9).is_over()
    with pytest.raises(UnwrittenPacketError, match="holds epoch 9"):
        Wait(site, store, (1, slice(3)), 8).is_over()


def test_rows_share_no_blocks_and_windows_reuse_theirs() -> None:
    state = StepState(plan_of(FEW_SMS), MAX_TOKENS)
    state.allocate_row(0, 300)
    state.allocate_row(3, MAX_TOKENS)
    for group, table in zip(state.plan.layout.kv_groups, state.page_tables, strict=True):
        held = [set(table[row].tolist()) - {-1} for row in (0, 3)]
        assert not held[0] & held[1]
        assert len(held[1]) == (MAX_TOKENS // PAGE_TOKENS if group.window is None else 3)
    state.release_row(0)
    state.allocate_row(1, 300)
    assert state.page_tables[0][1, :5].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no block for page 0"):
        state.pages(0, 0, 0, 0)
    with pytest.raises(ValueError, match="5 pages"):
        state.allocate_row(2, MAX_TOKENS + 1)


def test_loaded_pieces_join_and_only_the_window_is_read_back() -> None:
    plan = plan_of(FEW_SMS)
    state = StepState(plan, MAX_TOKENS, poison=True)
    state.allocate_row(2, MAX_TOKENS)
    state.start_row(2, 0, 201, 300)
    for layer, (keys, values) in enumerate(sequence_kv(plan.spec, 1, 201)):
        for begin, end in ((0, 70), (70, 128), (128, 201)):
            state.load_kv(2, layer, keys[begin:end], values[begin:end], begin)
        first = 0 if plan.spec.layers[layer].window is None else 201 - 99
        read = state.read_kv(2, layer)
        assert torch.equal(read[0], keys[first:])
        assert torch.equal(read[1], values[first:])
