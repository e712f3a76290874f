"""The simulator: discrete events over a plan's own programs, with the target's measured figures.

What is modelled is what the kernel does:

- Each SM's producer sends for chunks in program order, as far as ring and window let it, and stops
  at a layer's first expert chunk until the experts are known.
- Memory is one queue, served in the order of requests at the rate that all SMs together reach; what
  comes out travels for `latency_seconds`, and one SM takes it no faster than a stream alone. So SMs
  share the bandwidth by what they ask for, and a full window means a loaded latency.
- Consumer warps take tasks in program order, a task beginning once its warp is free, its packets
  are here and its first chunk has landed; they use a chunk in the time that its bytes take a warp.
  Helper warps do their tasks beside them.
- A packet is seen in all SMs `hand_off_seconds` after it was stored; what one round of loads cannot
  bring takes further rounds of `load_seconds`.

Chunks move in pieces of up to `piece_bytes`; that a warp may be at most two tiles ahead of the
warp that adds up their sums is left out. Events are handled in the order of requests to memory,
and everything that follows from a request lies after it, so the order is exact. Ties go to the
lower SM: the same inputs give the same result.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from mkc.compiler.place import CONSUMER_WARPS
from mkc.compiler.plan import Plan
from mkc.compiler.proof import VerifyError
from mkc.compiler.simulate_tasks import (
    ALL,
    BEHAVIOUR,
    HELPER_WARPS,
    NONE,
    Piece,
    Routing,
    Run,
    Signal,
    SimTask,
    StepTasks,
    draw_routing,
    unfold,
)

PIECE_BYTES = 16384
UNKNOWN = -1.0


@dataclass(slots=True)
class TaskTimes:
    """Of each task of an SM, in order; seconds from the first request.

    start: its warp was free (the first of them, where all share it); begin: its inputs had been
    gathered; ready: its first chunk had landed too, or, of a task without chunks, its packets had
    been seen; end: its results were stored. first_piece: number of its first piece in the SM's
    stream (one item more than there are tasks).
    """

    start: list[float]
    begin: list[float]
    ready: list[float]
    end: list[float]
    first_piece: list[int]


@dataclass(slots=True)
class Stream:
    """Of each piece that an SM streamed: when it was sent for, landed, and had been used.

    holds: pieces that had to wait for something else than landings, and what for: the piece up to
    which all had to be used, or NONE for the routing.
    """

    bytes: list[int]
    chunks: list[int]
    issued: list[float] = field(default_factory=list)
    landed: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    holds: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class SimulatedStep:
    """One simulated step. Times are seconds from the first request; `seconds` is the whole step
    with its launch.

    seen: of each signal, when its last packets had reached all SMs; last_writer: (SM, place) of the
    task that sent them.
    """

    plan: Plan
    tasks: StepTasks
    times: list[TaskTimes]
    streams: list[Stream]
    seen: list[float]
    last_writer: list[tuple[int, int]]
    seconds: float
    bytes: int

    @property
    def floor_seconds(self) -> float:
        """The bytes streamed over the datasheet's bandwidth."""
        return self.bytes / self.plan.target.hbm_bytes_per_second

    @property
    def share_of_floor(self) -> float:
        """Floor over predicted time: 1 is the datasheet's bandwidth."""
        return self.floor_seconds / self.seconds

    def layer_begin(self, layer: int) -> float:
        """When a layer's whole input had reached all SMs; the number of layers gives the head's."""
        return self.seen[self.tasks.signals.index(Signal("layer_input", layer, 0))]

    def layer_seconds(self) -> list[float]:
        """Of each layer, from its input's arrival to that of the next."""
        begins = [self.layer_begin(layer) for layer in range(len(self.plan.spec.layers) + 1)]
        return [end - begin for begin, end in pairwise(begins)]

    def layer_bytes(self) -> list[int]:
        """Bytes that each layer streams; the last item is the head's."""
        sizes = [0] * (len(self.plan.spec.layers) + 1)
        for program, times, stream in zip(
            self.tasks.programs, self.times, self.streams, strict=True
        ):
            for task, (first, behind) in zip(program, pairwise(times.first_piece), strict=True):
                sizes[task.entry.layer] += sum(stream.bytes[first:behind])
        return sizes


def simulate_step(
    plan: Plan,
    lengths: Sequence[int],
    seed: int = 0,
    routing: Routing | None = None,
    waits: bool = True,
    piece_bytes: int = PIECE_BYTES,
) -> SimulatedStep:
    """Simulates one step of rows that see `lengths` tokens each, their new one included.

    routing: each layer's active experts, by default drawn with `seed`. waits: False answers every
    wait for packets at once, which gives the card's ceiling for this plan. Raises ValueError for
    lengths that the plan does not allow, VerifyError MKC304 if the programs cannot end.
    """
    if not 1 <= len(lengths) <= plan.tiling.max_rows or min(lengths) < 1:
        raise ValueError(f"1 to {plan.tiling.max_rows} lengths of at least 1, not {list(lengths)}")
    with _no_collection():
        chosen = draw_routing(plan, len(lengths), seed) if routing is None else routing
        limit = min(piece_bytes, plan.tiling.chunk_bytes * _most_chunks(plan, len(lengths)))
        return _Simulation(plan, unfold(plan, lengths, chosen, limit), waits).run()


def window_chunks(plan: Plan) -> int:
    """Chunks that one SM may have in flight."""
    return max(1, plan.options.window_bytes // plan.tiling.chunk_bytes)


def ring_slots(plan: Plan, rows: int) -> int:
    """Chunks in the ring of the entry point that serves so many rows."""
    return next(shared.ring_slots for shared in plan.layout.shared if shared.rows >= rows)


def _most_chunks(plan: Plan, rows: int) -> int:
    """Chunks of a piece with which ring and window still work like those of single chunks."""
    return max(1, min(window_chunks(plan) // 2, ring_slots(plan, rows) // 4))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Spares the garbage collector half a million objects that have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True)
class _Sm:
    """The state of one SM. A task's chunks have all been sent for once `complete` pieces have."""

    number: int
    tasks: list[SimTask]
    times: TaskTimes
    stream: Stream
    gates: dict[int, int]  # piece -> signal that the producer waits for before it
    complete: int
    # The producer. A piece is sent for once one before it has landed and another has been used.
    after_landed: list[int]
    after_used: list[int]
    issued: int = 0  # pieces sent for
    issue_time: float = 0.0
    landing_time: float = 0.0
    free: list[float] = field(default_factory=list)  # when all pieces up to each had been used
    is_blocked: bool = False  # by a slot of which it is not known yet when it will be free
    # The consumers.
    at: int = 0  # task at hand, its run, the piece of that
    run: int = 0
    within: int = 0
    has_begun: bool = False  # the run at hand
    start: float = 0.0  # of the task at hand
    begin: float = 0.0
    seen: float = 0.0
    waiting: int = NONE  # for this signal
    warps: list[float] = field(default_factory=lambda: [0.0] * (CONSUMER_WARPS + HELPER_WARPS))
    helping: list[int] = field(default_factory=list)  # places of helpers' tasks that wait

    @staticmethod
    def of(number: int, tasks: list[SimTask], window: int, slots: int) -> _Sm:
        """An SM that has not begun."""
        sizes, chunks, first_piece = list[int](), list[int](), list[int]()
        gates: dict[int, int] = {}
        for task in tasks:
            first_piece.append(len(sizes))
            if task.gate != NONE:
                gates[len(sizes)] = task.gate
            for run in task.runs:
                for piece in run.pieces:
                    sizes.append(piece.bytes)
                    chunks.append(piece.chunks)
        first_piece.append(len(sizes))
        start, begin, ready, end = ([UNKNOWN] * len(tasks) for _ in range(4))
        return _Sm(
            number,
            tasks,
            TaskTimes(start, begin, ready, end, first_piece),
            Stream(sizes, chunks),
            gates,
            first_piece[1],
            pieces_before(chunks, window),
            pieces_before(chunks, slots),
        )


def pieces_before(chunks: Sequence[int], room: int) -> list[int]:
    """Of pieces with so many chunks: the last that must be gone, for each to have its chunks among
    `room` chunks; NONE if all fit."""
    until = np.cumsum(np.asarray(chunks, dtype=np.int64))
    gone = until - room
    before: list[int] = np.where(gone > 0, np.searchsorted(until, gone), NONE).tolist()
    return before


class _Simulation:
    """The events of one step."""

    def __init__(self, plan: Plan, tasks: StepTasks, waits: bool) -> None:
        self.plan, self.tasks, self.waits = plan, tasks, waits
        rows = len(tasks.lengths)
        room = window_chunks(plan), ring_slots(plan, rows)
        self.sms = [_Sm.of(sm, program, *room) for sm, program in enumerate(tasks.programs)]
        self.measured = measured = plan.target.measured
        # Seconds a byte in a consumer warp, by whether it is attention.
        self.rates = (1 / measured.warp_bytes_per_second, 1 / measured.attention_bytes_per_second)
        self.left = list(tasks.writers)
        self.seen = [UNKNOWN if waits else 0.0] * len(tasks.signals)
        self.written = [0.0] * len(tasks.signals)
        self.last_writer = [(NONE, NONE)] * len(tasks.signals)
        self.waiters: list[list[_Sm]] = [[] for _ in tasks.signals]
        self.gated: list[list[_Sm]] = [[] for _ in tasks.signals]
        routing = measured.routing_seconds * -(-rows // min(rows, HELPER_WARPS))
        self.delay = [
            measured.hand_off_seconds + (routing if signal.set == "router_logits" else 0.0)
            for signal in tasks.signals
        ]
        self.requests: list[tuple[float, int]] = []  # heap of (time, SM): the next of each SM
        self.awake = list(self.sms)  # SMs whose consumers may go on

    def run(self) -> SimulatedStep:
        """Serves requests to memory in order until none is left."""
        target = self.plan.target
        latency = self.measured.latency_seconds
        shared = 1.0 / (target.hbm_bytes_per_second * self.measured.stream_share)
        alone = 1.0 / self.measured.sm_bytes_per_second
        memory_free = 0.0
        for sm in self.sms:
            self._request(sm)
        self._run_awake()
        while self.requests:
            now, number = heapq.heappop(self.requests)
            sm = self.sms[number]
            stream, piece = sm.stream, sm.issued
            size = stream.bytes[piece]
            memory_free = (now if now > memory_free else memory_free) + size * shared
            landing, alone_landing = memory_free + latency, sm.landing_time + size * alone
            sm.landing_time = landing = landing if landing > alone_landing else alone_landing
            stream.issued.append(now)
            stream.landed.append(landing)
            sm.issued = piece = piece + 1
            self._request(sm)
            if piece >= sm.complete or sm.is_blocked:
                self.awake.append(sm)
                self._run_awake()
        return self._result()

    def _request(self, sm: _Sm) -> None:
        """Works out when the producer sends for its next piece, as soon as that is known."""
        piece, time = sm.issued, sm.issue_time
        sm.is_blocked = False
        if piece == len(sm.after_used):
            return
        landed, used = sm.after_landed[piece], sm.after_used[piece]
        if landed != NONE and sm.stream.landed[landed] > time:
            time = sm.stream.landed[landed]
        if used != NONE:
            if used >= len(sm.free):
                sm.is_blocked = True
                return
            if sm.free[used] > time:
                time = sm.free[used]
                sm.stream.holds[piece] = used
        gate = sm.gates.get(piece)
        if gate is not None:
            seen = self.seen[gate]
            if seen == UNKNOWN:
                self.gated[gate].append(sm)
                return
            if seen > time:
                time = seen
                sm.stream.holds[piece] = NONE
        sm.issue_time = time
        heapq.heappush(self.requests, (time, sm.number))

    def _run_awake(self) -> None:
        """Lets consumers go on that have something new, and all that they wake."""
        while self.awake:
            sm = self.awake.pop()
            tasks = sm.tasks
            if sm.helping:
                sm.helping = [place for place in sm.helping if not self._help(sm, place)]
            while sm.at < len(tasks) and sm.waiting == NONE:
                task = tasks[sm.at]
                if BEHAVIOUR[task.entry.kind].helps:
                    if not self._help(sm, sm.at):
                        sm.helping.append(sm.at)
                elif not self._work(sm, task):
                    break
                sm.at += 1
                sm.run = 0
                sm.complete = sm.times.first_piece[min(sm.at + 1, len(tasks))]
            if sm.is_blocked:
                self._request(sm)

    def _help(self, sm: _Sm, place: int) -> bool:
        """A helper's task, which gathers and writes; False if its packets are not known of yet."""
        task = sm.tasks[place]
        (run,) = task.runs
        seen = self.seen[run.signal]
        if seen == UNKNOWN:
            self.waiters[run.signal].append(sm)
            return False
        start, load = sm.warps[task.warp], self.measured.load_seconds
        ready = max(start, seen)
        end = max(start + run.gathers * load, seen + max(0, run.gathers - 1) * load)
        sm.warps[task.warp] = end
        self._finish(sm, place, (start, end, ready, end))
        return True

    def _work(self, sm: _Sm, task: SimTask) -> bool:
        """Goes on with a task; False if something that it needs is not known yet."""
        behaviour = BEHAVIOUR[task.entry.kind]
        warps, rate = sm.warps, self.rates[behaviour.attends]
        taking_part: Sequence[int] = ALL
        while sm.run < len(task.runs):
            run = task.runs[sm.run]
            taking_part = run.warps if len(task.runs) == 1 else ALL
            if not sm.has_begun and not self._begin(sm, run):
                return False
            if run.pieces and not self._use(sm, run.pieces, rate):
                return False
            sm.run, sm.within, sm.has_begun = sm.run + 1, 0, False
        end = max(warps[warp] for warp in taking_part)
        if behaviour.collects:
            end += self.measured.join_seconds
            warps[task.warp] = end
        if not task.runs:
            sm.start = sm.begin = sm.seen = end
        first, behind = sm.times.first_piece[sm.at], sm.times.first_piece[sm.at + 1]
        ready = max(sm.begin, sm.stream.landed[first]) if behind > first else sm.seen
        self._finish(sm, sm.at, (sm.start, sm.begin, ready, end))
        return True

    def _begin(self, sm: _Sm, run: Run) -> bool:
        """Gathers the inputs of a run; False if its packets' time is not known yet."""
        warps = sm.warps
        start = min(warps[warp] for warp in run.warps)
        seen = 0.0 if run.signal == NONE else self.seen[run.signal]
        if run.signal != NONE or run.gathers:
            if seen == UNKNOWN:
                sm.waiting = run.signal
                self.waiters[run.signal].append(sm)
                return False
            load = self.measured.load_seconds
            gather, gathered = run.gathers * load, seen + max(0, run.gathers - 1) * load
            for warp in run.warps:
                warps[warp] = max(warps[warp] + gather, gathered)
        if sm.run == 0:
            sm.start, sm.begin = start, min(warps[warp] for warp in run.warps)
            sm.seen = max(start, seen)
        sm.has_begun = True
        return True

    def _use(self, sm: _Sm, pieces: Sequence[Piece], rate: float) -> bool:
        """Uses the pieces of a run as they land; False if one is not on its way yet."""
        stream, warps = sm.stream, sm.warps
        landed, used = stream.landed, stream.used
        for number in range(sm.within, len(pieces)):
            if len(used) == len(landed):
                sm.within = number
                return False
            _, chunks, first, count, each = pieces[number]
            here, cost = landed[len(used)], each * rate
            if chunks > count:
                here += cost * (count / chunks - 1.0)  # earlier chunks were there earlier
            last = 0.0
            for warp in range(first, first + count):
                clock = warps[warp]
                warps[warp] = clock = (clock if clock > here else here) + cost
                if clock > last:
                    last = clock
            used.append(last)
            sm.free.append(max(last, sm.free[-1]) if sm.free else last)
        return True

    def _finish(self, sm: _Sm, place: int, moments: tuple[float, float, float, float]) -> None:
        """Notes a task's start, begin, ready and end, and tells those who wait for its packets."""
        times, task, end = sm.times, sm.tasks[place], moments[3]
        times.start[place], times.begin[place], times.ready[place], times.end[place] = moments
        signal = task.writes
        if signal == NONE:
            return
        if end >= self.written[signal]:
            self.written[signal] = end
            self.last_writer[signal] = (sm.number, place)
        self.left[signal] -= 1
        if self.left[signal] or not self.waits:
            return
        self.seen[signal] = self.written[signal] + self.delay[signal]
        for waiter in self.waiters[signal]:
            waiter.waiting = NONE
            self.awake.append(waiter)
        for gated in self.gated[signal]:
            self._request(gated)

    def _result(self) -> SimulatedStep:
        """The finished step. Raises VerifyError MKC304 if a program did not end."""
        for sm in self.sms:
            if sm.at < len(sm.tasks) or sm.helping:
                task = sm.tasks[sm.helping[0] if sm.helping else sm.at]
                what = "packets" if sm.helping or sm.waiting != NONE else "a chunk"
                reason = f"waits for {what} that never come"
                raise VerifyError("MKC304", reason, sm.number, task.entry_index, task.entry)
        end = max(max(sm.times.end) for sm in self.sms)
        return SimulatedStep(
            plan=self.plan,
            tasks=self.tasks,
            times=[sm.times for sm in self.sms],
            streams=[sm.stream for sm in self.sms],
            seen=self.seen,
            last_writer=self.last_writer,
            seconds=end + self.measured.launch_seconds,
            bytes=sum(sum(sm.stream.bytes) for sm in self.sms),
        )
