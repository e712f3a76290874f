"""Greedy decoding of several sequences by an executor, against an oracle over the same tokens.

Each row starts from a random prompt, whose K and V the float32 reference makes, and then decodes
greedily. Afterwards the oracle runs each whole sequence, the executor's tokens included, in float32
and bfloat16: every step is judged behind the same tokens, also after a near tie went the other way.
Both follow the executor's experts, for the same reason; the choices are judged by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mkc.runtime.check_case import largest_tokens
from mkc.runtime.check_measure import (
    Choices,
    Deviation,
    compare_routing,
    compare_tokens,
    deviation,
    join_choices,
)
from mkc.runtime.check_step import chosen_experts
from mkc.runtime.executor import Executor
from mkc.runtime.oracle import Oracle, OracleRun, begin
from mkc.runtime.reference import KvCache, Reference
from mkc.runtime.state import NAN_BYTE, StepState
from mkc.runtime.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class SequenceCheck:
    """Rows that decoded `steps` tokens behind prompts of `lengths` tokens.

    logits: of the worst row, over all its steps; router: over all router logits, `row` the worst
    layer; own_tokens: tokens that are also the oracle's choice with its own experts, behind the
    same tokens. faults: exact demands that were not met, in words.
    """

    oracle: str
    lengths: tuple[int, ...]
    steps: int
    logits: Deviation
    router: Deviation | None
    tokens: Choices
    experts: Choices | None
    own_tokens: int
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as it should be."""
        return not self.problems()

    def problems(self) -> list[str]:
        """What fails, in words."""
        words = list(self.faults)
        for name, choices in (("tokens", self.tokens), ("sets of experts", self.experts)):
            if choices is not None and not choices.ok:
                words.append(
                    f"{choices.wrong} of {choices.made} {name} differ beyond near ties, "
                    f"one of row {choices.row} by {choices.worst:.3g} with a noise of "
                    f"{choices.noise:.3g}"
                )
        for name, found in (("logits, row", self.logits), ("router logits, layer", self.router)):
            if found is not None and not found.ok:
                words.append(
                    f"{name} {found.row}: an RMS error of {found.rms:.3g}, {found.rms_ratio:.3g} "
                    f"times the bfloat16 reference's {found.bf16_rms:.3g}"
                )
        return words


def check_sequences(
    executor: Executor,
    weights: ModelWeights,
    oracle: Oracle,
    lengths: Sequence[int],
    steps: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> SequenceCheck:
    """Decodes `steps` tokens of len(lengths) rows, and compares all of them with the oracle.

    lengths: tokens of each row's prompt that precede the first one fed. Page memory that holds no
    token is NaN at first. Raises what the executor raises, ValueError without room in the state.
    """
    spec, rows = executor.plan.spec, len(lengths)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(spec.vocab_size, (n + 1,), generator=generator) for n in lengths]
    progress("prompts")
    prompt_experts = start_sequences(executor.state, weights, prompts, steps)
    record = _decode(executor, rows, steps, progress)
    fed = record.tokens[:-1].clamp(0, spec.vocab_size - 1).cpu()
    sequences = [torch.cat([prompt, fed[:, row]]) for row, prompt in enumerate(prompts)]
    device = executor.state.device
    experts = [
        torch.cat([own.to(device), record.experts[:, :, row]], dim=1)
        for row, own in enumerate(prompt_experts)
    ]
    progress(oracle.name)
    exact, bf16 = (
        oracle.run(sequences, steps, dtype, experts) for dtype in (torch.float32, torch.bfloat16)
    )
    own = oracle.run(sequences, steps, torch.float32)
    own_tokens = torch.stack([run.logits.argmax(-1) for run in own], dim=1).to(device)
    return _judge(executor, oracle.name, lengths, record, exact, bf16, own_tokens)


@torch.no_grad()
def start_sequences(
    state: StepState, weights: ModelWeights, prompts: Sequence[Tensor], room: int
) -> list[Tensor]:
    """Makes a row of each prompt, int64 [n + 1]: n tokens in its pages, and the last to be fed.

    K and V come from the float32 reference, one layer's weights at a time. Rows stop for no token,
    and have room for `room` more. Returns the experts that the n tokens chose, [layers, n, k].
    """
    spec = state.plan.spec
    state.eos_tokens = state.eos_tokens[:0]
    for row in range(state.max_rows):
        state.release_row(row)
    for pool in state.pools:
        pool.fill_(NAN_BYTE)
    reference = Reference(spec, weights, torch.float32, state.device)
    caches = [KvCache(spec, torch.float32, state.device) for _ in prompts]
    for row, prompt in enumerate(prompts):
        length = len(prompt) - 1
        state.allocate_row(row, length + room)
        state.start_row(row, int(prompt[-1]), length, length + room + 1)
    width = max((layer.slots for layer in state.plan.tiling.layers if layer.routed), default=0)
    experts = [torch.zeros(len(spec.layers), 0, width, dtype=torch.int64) for _ in prompts]
    filled = [row for row, prompt in enumerate(prompts) if len(prompt) > 1]
    if not filled:
        return experts
    step = begin(reference, [prompts[row][:-1] for row in filled], [caches[row] for row in filled])
    for index in range(len(spec.layers)):
        reference.run_layer(index, weights.layer(index), step)
        step.layer_outputs[index] = step.layer_outputs[index][:0]
        for row in filled:
            length = len(prompts[row]) - 1
            keys, values = caches[row].last(index, length, torch.bfloat16, state.device)
            state.load_kv(row, index, keys, values)
    chosen = torch.stack(step.experts)
    for row, (_, rows) in zip(filled, step.spans, strict=True):
        experts[row] = chosen[:, rows]
    return experts


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """What decoding left: logits [steps, rows, vocab], tokens [steps, rows], router logits
    [layers, steps, rows, experts], experts [layers, steps, rows, k], -1 in dense layers."""

    logits: Tensor
    tokens: Tensor
    router: Tensor
    experts: Tensor
    faults: list[str]


def _decode(executor: Executor, rows: int, steps: int, progress: Callable[[str], None]) -> _Record:
    state, plan = executor.state, executor.plan
    logits, tokens, router, faults = [], [], [], []
    for step in range(steps):
        progress(f"step {step + 1} of {steps}")
        state.logits.fill_(math.nan)
        executor.step(rows)
        logits.append(state.logits[:rows].clone())
        tokens.append(executor.emitted[:rows].long())
        router.append(executor.router_logits(rows).clone())
    executor.check_fault()
    executor.check_guards()
    for step, (found, emitted) in enumerate(zip(logits, tokens, strict=True)):
        largest = largest_tokens(found)
        for row in (largest != emitted).nonzero()[:, 0].tolist():
            faults.append(
                f"step {step}, row {row}: token {int(emitted[row])}, its largest logit is "
                f"{int(largest[row])}'s"
            )
    live = state.active[:rows].tolist()
    faults += [f"row {row} stopped early" for row in range(rows) if not live[row]]
    router_logits = torch.stack(router, dim=1)
    width = max((layer.slots for layer in plan.tiling.layers if layer.routed), default=0)
    experts = router_logits.new_full((*router_logits.shape[:3], width), -1).long()
    for layer in range(len(router_logits)):
        ids = chosen_experts(plan, layer, router_logits[layer].flatten(0, 1))
        if ids is not None:
            experts[layer, :, :, : ids.shape[-1]] = ids.view(steps, rows, -1)
    return _Record(torch.stack(logits), torch.stack(tokens), router_logits, experts, faults)


def _judge(
    executor: Executor,
    oracle: str,
    lengths: Sequence[int],
    record: _Record,
    exact: list[OracleRun],
    bf16: list[OracleRun],
    own_tokens: Tensor,
) -> SequenceCheck:
    device, steps, rows = record.logits.device, *record.tokens.shape
    by_row = record.logits.transpose(0, 1)
    exact_logits, bf16_logits = (
        torch.stack([run.logits for run in runs]).to(device) for runs in (exact, bf16)
    )
    labels = [row for row in range(rows) for _ in range(steps)]
    tokens = compare_tokens(
        record.tokens.T.flatten(), exact_logits.flatten(0, 1), bf16_logits.flatten(0, 1), labels
    )
    exact_router, bf16_router = (
        torch.stack([run.router_logits[:, -steps:] for run in runs], dim=1).to(device)
        for runs in (exact, bf16)
    )
    tilings = executor.plan.tiling.layers
    routed = [index for index, layer in enumerate(tilings) if layer.routed]
    ours, theirs, wanted = (
        {index: x[index, ..., : tilings[index].matrices].flatten(0, 1) for index in routed}
        for x in (record.router.transpose(1, 2), bf16_router, exact_router)
    )
    ids = {
        index: record.experts[index, ..., : tilings[index].slots].transpose(0, 1).flatten(0, 1)
        for index in routed
    }
    router, choices = compare_routing(ours, theirs, wanted, ids, labels, noise_by_layer=True)
    return SequenceCheck(
        oracle=oracle,
        lengths=tuple(lengths),
        steps=steps,
        logits=deviation(by_row.flatten(1), bf16_logits.flatten(1), exact_logits.flatten(1)),
        router=router,
        tokens=tokens,
        experts=join_choices(list(choices.values())) if choices else None,
        own_tokens=int((record.tokens == own_tokens).sum()),
        faults=tuple(record.faults),
    )
