"""The interpreter: runs a plan's own programs on the CPU, task by task and packet by packet.

It is the oracle for the plan and the backend of a machine without a GPU. Each SM is a coroutine
over its program's entries; it stops where packets that it needs have not been written. How the SMs
interleave is a policy, and results don't depend on it. What would be a hang, a race or a stale read
on the device is an error here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.tile import FRAGMENT_EDGE, MERGE_DIMS
from mkc.runtime.executor import IDLE_ROW
from mkc.runtime.numerics import PackedWeights
from mkc.runtime.packets import (
    DeadlockError,
    Floats,
    PacketStore,
    RewrittenPacketError,
    Site,
    UnwrittenPacketError,
    Wait,
)
from mkc.runtime.state import StepState
from mkc.runtime.tasks import ProgramError, StepTasks

__all__ = [
    "DeadlockError",
    "Interpreter",
    "Order",
    "ProgramError",
    "RewrittenPacketError",
    "UnwrittenPacketError",
]

Order = Literal["round_robin", "reverse", "random", "one_sm_first"]
WHOLE_PROGRAM = 1 << 30
RANDOM_ENTRIES = 8

# Values of one item: 16, and one more for the sum of squares of a layer's input.
ITEM_WIDTHS = {
    "layer_input": FRAGMENT_EDGE + 1,
    "router_logits": FRAGMENT_EDGE,
    "qkv": FRAGMENT_EDGE,
    "partials": MERGE_DIMS + 2,
    "merged": FRAGMENT_EDGE,
    "hidden": FRAGMENT_EDGE,
    "candidates": 2,
}


class Interpreter:
    """Runs steps of one plan over a packed arena and a state, both on the CPU.

    What it leaves beside the state is an `Executor`'s: `emitted`, `layer_outputs`, router logits.

    The epoch of what belongs to layer l in step s is s * (layers + 2) + l, steps counting from 1;
    candidates count as layer `layers` + 1.

    order: how SMs take turns: one entry each, from the first SM on or from the last; a random
    number of entries each, in random order (`seed`); or as far as each gets before the next starts.
    """

    def __init__(
        self,
        plan: Plan,
        arena: Tensor,
        state: StepState,
        order: Order = "round_robin",
        seed: int = 0,
        trace: bool = False,
    ) -> None:
        if arena.device.type != "cpu" or state.device.type != "cpu":
            raise ValueError("the interpreter needs arena and state on the CPU")
        self.plan = plan
        self.state = state
        self.order = order
        self.steps = 0
        self.emitted = torch.full((state.max_rows,), IDLE_ROW, dtype=torch.int32)
        self.layer_outputs: Tensor | None = None
        self.fault = torch.zeros(1, dtype=torch.int64)
        self._trace: Floats | None = None
        if trace:
            shape = (len(plan.spec.layers), plan.tiling.max_rows, plan.spec.hidden_size)
            self.layer_outputs = torch.zeros(shape)
            self._trace = self.layer_outputs.numpy()
        self._random = random.Random(seed)
        self._weights = PackedWeights(plan, arena)
        self._stores = {
            packets.name: PacketStore(
                packets,
                ITEM_WIDTHS[packets.name],
                np.float64 if packets.name == "candidates" else np.float32,
            )
            for packets in plan.layout.packet_sets
        }

    def step(self, rows: int | None = None) -> None:
        """Runs one step and updates the state.

        rows: rows of the step (default: all that the plan has); idle ones cost little. With `trace`
        `layer_outputs` [layers, max_rows, hidden] then holds the residual after each layer. Logits
        are written for idle rows too.
        Raises DeadlockError, UnwrittenPacketError, RewrittenPacketError or ProgramError where the
        plan is wrong, ValueError where a live row lies outside of the step or lacks a page.
        """
        rows = self.plan.tiling.max_rows if rows is None else rows
        if any(position is not None for position in self.state.live_positions()[rows:]):
            raise ValueError(f"a live row lies outside of the step's {rows} rows")
        self.steps += 1
        epoch_base = self.steps * (len(self.plan.spec.layers) + 2)
        tasks = StepTasks(
            self.plan, self._weights, self.state, self._stores, epoch_base, rows, self._trace
        )
        with np.errstate(over="ignore"):
            self._run({sm: tasks.program(sm) for sm in range(len(self.plan.programs))})
        if tasks.emitted is None:
            site = Site(0, len(self.plan.programs[0]), Entry(EntryKind.END))
            raise ProgramError(site, "the program ended without a SAMPLE entry to close the step")
        self.emitted[:rows] = torch.tensor(tasks.emitted, dtype=torch.int32)

    def router_logits(self, rows: int) -> Tensor:
        """Float32 [layers, rows, experts] of the last step, NaN for dense layers, from packets."""
        values = torch.from_numpy(self._stores["router_logits"].values)
        layers, max_rows = values.shape[:2]
        logits = values.reshape(layers, max_rows, -1)[:, :rows].clone()
        for layer, tiling in enumerate(self.plan.tiling.layers):
            if not tiling.routed:
                logits[layer] = torch.nan
        experts = max((t.matrices for t in self.plan.tiling.layers if t.routed), default=0)
        return logits[..., :experts]

    def check_fault(self) -> None:
        """Does nothing: a step has ended when `step` returns, and what is wrong is raised there."""

    def check_guards(self) -> None:
        """Does nothing: packets are arrays here, and numpy checks every index."""

    def _run(self, programs: dict[int, Iterator[Wait | None]]) -> None:
        """Runs all programs to their ends, in turns by the policy."""
        waits: dict[int, Wait] = {}
        while programs:
            has_progress = False
            for sm, entries in self._turns(list(programs)):
                if sm in waits and not waits[sm].is_over():
                    continue
                has_progress = True
                waits.pop(sm, None)
                wait = _advance(programs[sm], entries)
                if isinstance(wait, Wait):
                    waits[sm] = wait
                elif wait == "ended":
                    del programs[sm]
            if not has_progress:
                raise DeadlockError({sm: str(waits[sm]) for sm in programs})

    def _turns(self, sms: list[int]) -> Iterable[tuple[int, int]]:
        """(SM, entries it may run) of the next round over those that have not ended."""
        if self.order == "random":
            self._random.shuffle(sms)
            return [(sm, self._random.randint(1, RANDOM_ENTRIES)) for sm in sms]
        if self.order == "one_sm_first":
            return [(sm, WHOLE_PROGRAM) for sm in sms]
        return [(sm, 1) for sm in (sms if self.order == "round_robin" else reversed(sms))]


def _advance(program: Iterator[Wait | None], entries: int) -> Wait | Literal["paused", "ended"]:
    """Runs up to so many entries, or up to a wait that is not over."""
    while entries > 0:
        try:
            wait = next(program)
        except StopIteration:
            return "ended"
        if wait is None:
            entries -= 1
        elif not wait.is_over():
            return wait
    return "paused"
