"""Times decode steps on the GPU and sets them beside the memory floor and the card's own ceiling.

The floor of a step is the bytes that it needs (weights of the experts that the rows chose, whole
pages of K and V) over the datasheet's bandwidth. The ceiling is the same plan on the same card with
every wait for another SM answered at once: what the card could do if hand-offs cost nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mkc.compiler.errors import CheckError
from mkc.compiler.plan import Plan
from mkc.compiler.traffic import step_bytes
from mkc.runtime.megakernel import Megakernel
from mkc.runtime.state import NO_BLOCK

Routing = Literal["uniform", "correlated"]
WARM_UP_STEPS = 5
NO_LIMIT = 2**31 - 1
QUEUE_CYCLES = 1_000_000  # half a millisecond


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """Steps of `batch` rows that see `context` tokens each, one length or one for each row.

    ms_per_step: median of single steps; ms_p10 and ms_p90: their spread; ms_queued: time per step
    of all steps queued at once, gaps included. bytes and floor_ms: medians over the steps.
    """

    batch: int
    context: int | tuple[int, ...]
    routing: Routing
    steps: int
    ms_per_step: float
    ms_p10: float
    ms_p90: float
    ms_queued: float
    ceiling_ms: float
    bytes: int
    floor_ms: float
    active_experts: float

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together, from steps queued one behind the other."""
        return self.batch / self.ms_queued * 1e3

    @property
    def share_of_floor(self) -> float:
        """Floor over measured time; 1 is the datasheet's bandwidth."""
        return self.floor_ms / self.ms_per_step

    @property
    def share_of_ceiling(self) -> float:
        """Time without any wait over measured time."""
        return self.ceiling_ms / self.ms_per_step


class Bench:
    """Measures one kernel. `state` needs room for the longest context and all steps after it."""

    def __init__(self, kernel: Megakernel, seed: int = 0) -> None:
        self.kernel, self.plan, self.state = kernel, kernel.plan, kernel.state
        self.state.eos_tokens = self.state.eos_tokens[:0]  # rows must not stop while timed
        self._random = torch.Generator(self.state.device).manual_seed(seed)

    @staticmethod
    def room(steps: int) -> int:
        """Tokens that a row needs beyond its length."""
        return 2 * WARM_UP_STEPS + steps

    def measure(
        self, lengths: Sequence[int], steps: int = 50, routing: Routing = "uniform"
    ) -> BenchPoint:
        """One point: `lengths` has the tokens that each row sees in the first step; every step, the
        few that warm up too, adds one.

        Before every step each row is fed a token drawn at random, so that it chooses experts
        afresh; with correlated routing all rows share token, K and V. Raises KernelFault if a wait
        in the kernel ran past its limit.
        """
        if routing == "correlated" and len(set(lengths)) > 1:
            raise ValueError("rows that share K and V have one length")
        batch = len(lengths)
        self._prepare(lengths, steps, routing)
        self._start(lengths)
        times, active = self._timed(batch, steps, routing)
        self._start(lengths)
        queued = self._queued(batch, steps, routing)
        self._start(lengths)
        self.kernel.free_run = True
        try:
            ceiling, _ = self._timed(batch, max(10, steps // 2), routing)
        finally:
            self.kernel.free_run = False
        self.kernel.check_fault()
        size = _needed_bytes(self.plan, lengths, active)
        deciles = statistics.quantiles(times, n=10)
        return BenchPoint(
            batch=batch,
            context=lengths[0] if len(set(lengths)) == 1 else tuple(lengths),
            routing=routing,
            steps=steps,
            ms_per_step=statistics.median(times),
            ms_p10=deciles[0],
            ms_p90=deciles[-1],
            ms_queued=queued,
            ceiling_ms=statistics.median(ceiling),
            bytes=size,
            floor_ms=size / self.plan.target.hbm_bytes_per_second * 1e3,
            active_experts=_mean_active(self.plan, active),
        )

    def _prepare(self, lengths: Sequence[int], steps: int, routing: Routing) -> None:
        """Gives rows their pages, with random K and V in them; with correlated routing one row's
        pages to all rows."""
        state = self.state
        for table in state.page_tables:
            table[1:][(table[1:] == table[0]).all(-1)] = NO_BLOCK  # shared, not theirs to release
        for row in range(state.max_rows):
            state.release_row(row)
        owners = 1 if routing == "correlated" else len(lengths)
        for row, length in enumerate(lengths[:owners]):
            state.allocate_row(row, length + self.room(steps))
            state.fill_random_kv(row, length, self._random.initial_seed())
        for table in state.page_tables:
            table[owners : len(lengths)] = table[0]

    def _start(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            self.state.start_row(row, 0, length - 1, NO_LIMIT)

    def _feed(self, batch: int, routing: Routing) -> None:
        # Without waits a step computes from what was there before; its logits may be no numbers,
        # which ends a row.
        self.state.active[:batch] = 1
        tokens = self.state.tokens[:batch]
        tokens.random_(self.plan.spec.vocab_size, generator=self._random)
        if routing == "correlated":
            tokens.fill_(tokens[0])

    def _timed(self, batch: int, steps: int, routing: Routing) -> tuple[list[float], Tensor]:
        """Milliseconds of each step by events, and active experts [steps, layers] (NaN: dense)."""
        events, active, live = [], [], []
        for step in range(WARM_UP_STEPS + steps):
            self._feed(batch, routing)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The GPU waits a little, so that the step is queued behind the event, as in serving.
            torch.cuda._sleep(QUEUE_CYCLES)
            before.record()
            self.kernel.step(batch)
            after.record()
            live.append(self.state.active[:batch].clone())
            if step >= WARM_UP_STEPS:
                events.append((before, after))
                active.append(count_active(self.plan, self.kernel.router_logits(batch)))
        torch.cuda.synchronize()
        if not self.kernel.free_run:
            _require_live(torch.stack(live))
        return [before.elapsed_time(after) for before, after in events], torch.stack(active)

    def _queued(self, batch: int, steps: int, routing: Routing) -> float:
        """Milliseconds per step of steps that feed each other, queued without a pause."""
        self._feed(batch, routing)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(WARM_UP_STEPS):
            self.kernel.step(batch)
        before.record()
        for _ in range(steps):
            self.kernel.step(batch)
        after.record()
        torch.cuda.synchronize()
        _require_live(self.state.active[:batch][None])
        return float(before.elapsed_time(after)) / steps


def _require_live(active: Tensor) -> None:
    """Raises CheckError MKC601 if a row of [steps, rows] ended while steps were timed."""
    if not bool(active.all()):
        row = int((active == 0).any(0).nonzero()[0])
        raise CheckError("MKC601", f"row {row} ended while it was timed: its logits are no numbers")


def count_active(plan: Plan, router_logits: Tensor) -> Tensor:
    """Distinct experts that rows chose: [layers, rows, experts] -> float32 [layers], NaN: dense."""
    counts = []
    for layer, logits in zip(plan.tiling.layers, router_logits, strict=True):
        if not layer.routed:
            counts.append(logits.new_full((), torch.nan))
            continue
        chosen = torch.zeros_like(logits, dtype=torch.bool)
        chosen.scatter_(-1, logits.topk(layer.slots, dim=-1).indices, True)
        counts.append(chosen.any(0).sum().float())
    return torch.stack(counts)


def _needed_bytes(plan: Plan, lengths: Sequence[int], active: Tensor) -> int:
    """Median over the steps; the lengths that grow meanwhile are taken at the middle step."""
    middle = [length + WARM_UP_STEPS + active.shape[0] // 2 for length in lengths]
    sizes = [step_bytes(plan, len(lengths), middle, counts) for counts in active.tolist()]
    return round(statistics.median(sizes))


def _mean_active(plan: Plan, active: Tensor) -> float:
    routed = [index for index, layer in enumerate(plan.tiling.layers) if layer.routed]
    return float(active[:, routed].mean()) if routed else 0.0
