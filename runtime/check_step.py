"""One step of an executor against both references, layer by layer, over the same K and V.

The step starts from random K and V, so contexts of any length cost no prefill. Its references run
afterwards, one layer at a time over one copy of that layer's weights, in two ways:

    alone     each layer on the executor's own output of the layer before it: this layer's error
    chained   each reference on its own outputs: how errors grow with depth

Errors are those of the worst row, chained ones of all rows. Large keys at edges make attention hang
on single tokens, and a row's error on chance: there all rows are measured together, and no chain.

Both follow the experts that the executor's router logits chose, since behind another choice no
number can be compared; the choices are judged by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mkc.compiler.plan import Plan
from mkc.compiler.spec import ModelSpec
from mkc.runtime.check_case import Before, StepCase, closing_faults, new_tokens, start_case
from mkc.runtime.check_measure import (
    Choices,
    Deviation,
    compare_routing,
    compare_tokens,
    deviation,
    join_choices,
)
from mkc.runtime.executor import Executor
from mkc.runtime.reference import KvCache, Reference, StepResult, choose_experts
from mkc.runtime.reference import StepState as ReferenceStep
from mkc.runtime.state import StepState
from mkc.runtime.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """One layer: its output alone, chained over all rows, the stored K and V, the choice of experts
    (None in dense layers)."""

    layer: int
    alone: Deviation
    chained: Deviation | None
    keys: Deviation
    values: Deviation
    experts: Choices | None


@dataclass(frozen=True, slots=True)
class StepCheck:
    """One compared step. router: over all router logits, its `row` the worst layer, None without
    any. faults: exact demands that were not met, in words."""

    case: StepCase
    layers: tuple[LayerCheck, ...]
    router: Deviation | None
    logits: Deviation
    logits_chained: Deviation | None
    tokens: Choices
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as it should be."""
        return not self.problems()

    @property
    def deviations(self) -> list[tuple[str, Deviation]]:
        """All measured deviations by name."""
        named: list[tuple[str, Deviation | None]] = [
            ("logits", self.logits),
            ("logits, chained", self.logits_chained),
        ]
        if self.router is not None:
            named.append(("router logits of all layers", self.router))
        for layer in self.layers:
            named.append((f"layer {layer.layer}", layer.alone))
            named.append((f"layer {layer.layer}, chained", layer.chained))
            named.append((f"layer {layer.layer}, stored K", layer.keys))
            named.append((f"layer {layer.layer}, stored V", layer.values))
        return [(name, found) for name, found in named if found is not None]

    @property
    def experts(self) -> Choices | None:
        """The choices of experts of all layers together; None if no layer has any."""
        parts = [layer.experts for layer in self.layers if layer.experts is not None]
        return join_choices(parts) if parts else None

    def worst(self) -> tuple[str, Deviation]:
        """The deviation with the largest RMS ratio."""
        return max(self.deviations, key=lambda named: named[1].rank)

    def problems(self) -> list[str]:
        """What fails, in words, the worst first."""
        words = list(self.faults)
        for layer in self.layers:
            if layer.experts is not None and not layer.experts.ok:
                words.append(
                    f"layer {layer.layer}: {layer.experts.wrong} of {layer.experts.made} sets of "
                    f"experts differ beyond near ties, row {layer.experts.row} by "
                    f"{layer.experts.worst:.3g} with a noise of {layer.experts.noise:.3g}"
                )
        if not self.tokens.ok:
            words.append(
                f"row {self.tokens.row}: the token loses by {self.tokens.worst:.3g} in float32 "
                f"with a noise of {self.tokens.noise:.3g}"
            )
        failed = [named for named in self.deviations if not named[1].ok]
        failed.sort(key=lambda named: -named[1].rank)
        for name, d in failed:
            words.append(
                f"{name}, row {d.row}: an RMS error of {d.rms:.3g}, "
                f"{d.rms_ratio:.3g} times the bfloat16 reference's {d.bf16_rms:.3g}"
            )
        return words


def check_step(
    executor: Executor,
    weights: ModelWeights,
    case: StepCase,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> StepCheck:
    """Runs one step of `case` and compares it; the state is left as it was before the step.

    executor: with a trace, over the same `weights`, which lie on its state's device. Page memory
    that holds no token is NaN, as are logits before the step. Raises what the executor raises.
    """
    state = executor.state
    start_case(state, case, seed)
    before = Before.of(state, case)
    progress("step")
    found = _run(executor, case)
    faults = closing_faults(state, case, before, found.logits, executor.emitted)
    faults += before.restore(state, case)
    faults += _stopping_faults(executor, case, before, found)
    faults += before.restore(state, case)
    return _compare(state, weights, case, found, list(dict.fromkeys(faults)), progress)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What a step left, for its live rows.

    logits [n, vocab]; outputs [layers, n, hidden]; router [layers, n, experts], its logits;
    emitted [n]; keys and values [layers, n, kv_heads * head_dim], as they were stored.
    """

    logits: Tensor
    outputs: Tensor
    router: Tensor
    emitted: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, executor: Executor, case: StepCase) -> _Found:
        if executor.layer_outputs is None:
            raise ValueError("the executor keeps no layer outputs: it needs trace=True")
        live = torch.tensor(case.live, device=executor.state.device)
        keys, values = new_tokens(executor.state, case)
        return cls(
            logits=executor.state.logits[live].clone(),
            outputs=executor.layer_outputs[:, live].clone(),
            router=executor.router_logits(len(case.lengths))[:, live].clone(),
            emitted=executor.emitted[live].long(),
            keys=keys.flatten(2),
            values=values.flatten(2),
        )


def _run(executor: Executor, case: StepCase) -> _Found:
    executor.state.logits.fill_(math.nan)
    executor.step(len(case.lengths))
    executor.check_fault()
    executor.check_guards()
    return _Found.of(executor, case)


def _stopping_faults(
    executor: Executor, case: StepCase, before: Before, found: _Found
) -> list[str]:
    """Runs the step again with what its first row emits among several stop tokens: the row has to
    stop, and nothing else to change."""
    state, stop_tokens = executor.state, executor.state.eos_tokens
    token = int(found.emitted[0])
    state.eos_tokens = torch.tensor([0, token, 1], dtype=torch.int32, device=state.device)
    try:
        again = _run(executor, case)
        faults = closing_faults(state, case, before, again.logits, executor.emitted)
    finally:
        state.eos_tokens = stop_tokens
    if not torch.equal(found.logits.view(torch.int32), again.logits.view(torch.int32)):
        faults.append("the same step gave other logits when it ran again")
    return faults


class _LayerCache(KvCache):
    """A row's K and V before the step, held for one layer at a time."""

    def __init__(self, spec: ModelSpec, length: int, device: torch.device) -> None:
        super().__init__(spec, torch.bfloat16, device)
        self._lengths = [length for _ in spec.layers]
        self._empty = self._given[0]

    def hold(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Gives layer `layer` its old tokens."""
        self._given[layer] = (keys, values)

    def new_token(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [kv_heads * head_dim], float32, that the step appended; the old ones go."""
        self._given[layer] = self._empty
        ((keys, values),) = self._appended[layer]
        return keys.float().flatten(), values.float().flatten()


class _Pass:
    """One reference on its way through the layers."""

    def __init__(self, reference: Reference, state: StepState, case: StepCase) -> None:
        self.reference = reference
        positions = state.positions.tolist()
        live = torch.tensor(case.live, device=state.device)
        self.caches = [
            _LayerCache(reference.spec, positions[row], reference.device) for row in case.live
        ]
        self.step: ReferenceStep = reference.begin(state.tokens[live].long(), self.caches)

    def feed(self, x: Tensor) -> None:
        """Replaces the input of the next layer, [rows, hidden]."""
        self.step.x = x.to(self.reference.dtype)

    def finish(self) -> StepResult:
        """What the pass computed."""
        weights = self.reference.weights
        return self.reference.finish(weights.final_norm(), weights.head(), self.step)

    def new_tokens(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [rows, kv_heads * head_dim] of the fed tokens."""
        pairs = [cache.new_token(layer) for cache in self.caches]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def _compare(
    state: StepState,
    weights: ModelWeights,
    case: StepCase,
    found: _Found,
    faults: list[str],
    progress: Callable[[str], None],
) -> StepCheck:
    """Runs the references over the state, which is as before the step, and judges what it left."""
    spec, rows = state.plan.spec, case.live
    references = [
        Reference(spec, weights, dtype, state.device) for dtype in (torch.float32, torch.bfloat16)
    ]
    alone = [_Pass(reference, state, case) for reference in references]
    chained = [] if case.edges else [_Pass(reference, state, case) for reference in references]
    experts, layers = [], []
    for index in range(len(spec.layers)):
        progress(f"layer {index}")
        for place, row in enumerate(rows):
            keys, values = state.read_kv(row, index)
            for one in (*alone, *chained):
                one.caches[place].hold(index, keys, values)
            del keys, values
        experts.append(chosen_experts(state.plan, index, found.router[index]))
        if index:
            for one in alone:
                one.feed(found.outputs[index - 1])
        layer = weights.layer(index)
        for one in (*alone, *chained):
            one.reference.run_layer(index, layer, one.step, experts[index])
        layers.append(_compare_layer(index, case, found, alone, chained))
    progress("head")
    for one in alone:
        one.feed(found.outputs[-1])
    exact, bf16 = (one.finish() for one in alone)
    ids = {index: chosen for index, chosen in enumerate(experts) if chosen is not None}
    ours, theirs, wanted = (
        {index: logits[index, :, : state.plan.tiling.layers[index].matrices] for index in ids}
        for logits in (found.router, bf16.router_logits, exact.router_logits)
    )
    router, choices = compare_routing(ours, theirs, wanted, ids, rows, noise_by_layer=False)
    logits_chained = [one.finish().logits for one in chained]
    return StepCheck(
        case=case,
        layers=tuple(replace(layer, experts=choices.get(layer.layer)) for layer in layers),
        router=router,
        logits=deviation(found.logits, bf16.logits, exact.logits, rows),
        logits_chained=_pooled(found.logits, logits_chained, rows),
        tokens=compare_tokens(found.emitted, exact.logits, bf16.logits, rows),
        faults=tuple(faults),
    )


def chosen_experts(plan: Plan, layer: int, router_logits: Tensor) -> Tensor | None:
    """The experts [rows, k], ascending, that router logits [rows, experts] choose; None: dense."""
    tiling = plan.tiling.layers[layer]
    if not tiling.routed:
        return None
    return choose_experts(router_logits[:, : tiling.matrices], tiling.slots)


def _compare_layer(
    index: int, case: StepCase, found: _Found, alone: list[_Pass], chained: list[_Pass]
) -> LayerCheck:
    rows = case.live
    (keys, values), (bf16_keys, bf16_values) = (one.new_tokens(index) for one in alone)
    for one in chained:
        one.new_tokens(index)
    exact, bf16 = (one.step.layer_outputs[index] for one in alone)
    return LayerCheck(
        layer=index,
        alone=deviation(found.outputs[index], bf16, exact, rows, pooled=case.edges),
        chained=_pooled(
            found.outputs[index], [one.step.layer_outputs[index] for one in chained], rows
        ),
        keys=deviation(found.keys[index], bf16_keys, keys, rows),
        values=deviation(found.values[index], bf16_values, values, rows),
        experts=None,
    )


def _pooled(values: Tensor, chained: list[Tensor], rows: list[int]) -> Deviation | None:
    """The deviation over all rows from float32's and bfloat16's chain, if there are chains."""
    if not chained:
        return None
    exact, bf16 = chained
    return deviation(values, bf16, exact, rows, pooled=True)
