"""`Executor`: what kernel and interpreter have in common, all that a comparison needs of either."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mkc.compiler.plan import Plan
from mkc.runtime.state import StepState

IDLE_ROW = -1
NOT_A_TOKEN = -2


class Executor(Protocol):
    """Runs decode steps of a plan over a state.

    emitted: int32 [max_rows], the last step's tokens: IDLE_ROW for idle rows, NOT_A_TOKEN where no
    logit was a number. layer_outputs: float32 [layers, rows or more, hidden], the residual after
    each layer of the last step, None unless asked for. fault: int64 [1], not zero once a step went
    wrong in a way that `check_fault` tells of; it can be read without waiting.
    """

    plan: Plan
    state: StepState
    emitted: Tensor
    layer_outputs: Tensor | None
    fault: Tensor

    def step(self, rows: int | None = None) -> None:
        """Runs or queues one step over rows 0 to `rows` - 1 (default: all)."""
        ...

    def router_logits(self, rows: int) -> Tensor:
        """Float32 [layers, rows, experts] of the last step, NaN for dense layers."""
        ...

    def check_fault(self) -> None:
        """Waits for all steps. Raises MkcError if one of them went wrong."""
        ...

    def check_guards(self) -> None:
        """Raises MkcError if something outside of the packets was written."""
        ...
