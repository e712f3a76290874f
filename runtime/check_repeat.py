"""Whether the same step gives the same bits, however often it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mkc.runtime.check_case import StepCase, start_case
from mkc.runtime.executor import Executor


@dataclass(frozen=True, slots=True)
class RepeatCheck:
    """`runs` runs of one case. differing: runs whose bits are not those of the first; first: the
    first of them and what differs in it, None if there is none."""

    case: StepCase
    runs: int
    steps: int
    differing: int
    first: tuple[int, str] | None

    @property
    def ok(self) -> bool:
        """Whether all runs gave the same bits."""
        return self.differing == 0

    def problems(self) -> list[str]:
        """What fails, in words."""
        if self.first is None:
            return []
        run, what = self.first
        return [
            f"{self.differing} of {self.runs} runs differ from the first; run {run} in its {what}"
        ]


def check_repeats(
    executor: Executor,
    case: StepCase,
    runs: int = 200,
    steps: int = 1,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> RepeatCheck:
    """Runs `steps` greedy steps of `case` `runs` times from the same state and compares all bits.

    What is compared: logits and tokens of every step, then tokens, positions, activity, layer
    outputs if they are kept, and all pages. Logits are NaN before each run.
    """
    start_case(executor.state, case, seed, room=steps)
    inputs = [x.clone() for x in _inputs(executor)]
    first: list[tuple[str, Tensor]] = []
    differing, report = 0, None
    for run in range(runs):
        progress(f"run {run + 1} of {runs}")
        for tensor, value in zip(_inputs(executor), inputs, strict=True):
            tensor.copy_(value)
        executor.state.logits.fill_(math.nan)
        if run == 0:
            first = [(what, bits.clone()) for what, bits in _run(executor, case, steps)]
            continue
        found = zip(first, _run(executor, case, steps), strict=True)
        unequal = [what for (what, a), (_, b) in found if not torch.equal(a, b)]
        if unequal:
            differing += 1
            report = report or (run, unequal[0])
    executor.check_guards()
    return RepeatCheck(case, runs, steps, differing, report)


def _inputs(executor: Executor) -> list[Tensor]:
    """All small tensors that a step changes; pages of tokens to come are written before read."""
    state = executor.state
    return [state.tokens, state.positions, state.active]


def _run(executor: Executor, case: StepCase, steps: int) -> Iterator[tuple[str, Tensor]]:
    """Everything that steps from the present state leave, by name, as bits."""
    state, rows = executor.state, len(case.lengths)
    for step in range(steps):
        executor.step(rows)
        yield f"logits of step {step}", state.logits.view(torch.int32).clone()
        yield f"tokens of step {step}", executor.emitted.clone()
    executor.check_fault()
    yield "state", torch.stack([state.tokens, state.positions, state.active])
    if executor.layer_outputs is not None:
        yield "layer outputs", executor.layer_outputs[:, :rows].view(torch.int32)
    for group, pool in enumerate(state.pools):
        yield f"pages of KV group {group}", pool
