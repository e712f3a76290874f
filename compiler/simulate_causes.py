"""Why a simulated step takes as long as it does: the causes of each time, and the critical path.

Every time in a `SimulatedStep` is the largest of a few others. A *moment* is one such time, and its
*cause* the one that was largest; following causes from the end of the step back to its first
request gives the critical path. The *slack* of a hop is how much sooner it could have come before
something else would have held up what follows.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mkc.compiler.simulate import SimulatedStep, pieces_before, window_chunks
from mkc.compiler.simulate_tasks import BEHAVIOUR, NONE, Run, SimTask


class MomentKind(StrEnum):
    """What happens at a moment; `number` counts the SM's tasks, its pieces, or the signals."""

    END = "end"  # a task has ended
    USED = "used"  # consumers are done with a piece
    LANDED = "landed"  # a piece is in shared memory
    ISSUED = "issued"  # a piece was sent for
    SEEN = "seen"  # packets have reached all SMs


class Moment(NamedTuple):
    """A time in the step; `sm` is -1 for SEEN."""

    kind: MomentKind
    sm: int
    number: int


class Cause(NamedTuple):
    """What a moment followed from, None for the start; slack: by how much it was the last."""

    moment: Moment | None
    slack: float


END, USED, LANDED, ISSUED, SEEN = MomentKind
NEVER = -1.0
EPSILON = 1e-12
LOOK_BACK = 32  # tasks


class Causes:
    """Finds the causes of moments of one step."""

    def __init__(self, step: SimulatedStep) -> None:
        self.step = step
        self.measured = step.plan.target.measured
        self.window = window_chunks(step.plan)
        self._after_landed = [pieces_before(stream.chunks, self.window) for stream in step.streams]
        self._rates = (
            1 / self.measured.warp_bytes_per_second,
            1 / self.measured.attention_bytes_per_second,
        )

    def time(self, moment: Moment) -> float:
        """When a moment was, in seconds from the first request."""
        kind, sm, number = moment
        if kind == SEEN:
            return self.step.seen[number]
        times, stream = self.step.times[sm], self.step.streams[sm]
        if kind == END:
            return times.end[number]
        return {USED: stream.used, LANDED: stream.landed, ISSUED: stream.issued}[kind][number]

    def task_of_piece(self, sm: int, piece: int) -> int:
        """The place of the task that a piece belongs to."""
        return bisect_right(self.step.times[sm].first_piece, piece) - 1

    def cause(self, moment: Moment) -> Cause:
        """What a moment followed from."""
        sm, number = moment.sm, moment.number
        match moment.kind:
            case MomentKind.END:
                return self._of_end(sm, number)
            case MomentKind.USED:
                return self._of_used(sm, number)
            case MomentKind.LANDED:
                return Cause(Moment(ISSUED, sm, number), 0.0)
            case MomentKind.ISSUED:
                return self._of_issued(sm, number)
        writer = self.step.last_writer[number]
        return Cause(Moment(END, *writer), 0.0)

    def _of_end(self, sm: int, place: int) -> Cause:
        """A task ends with the last of its pieces, or with packets, or once its warps are there."""
        task, times = self.step.tasks.programs[sm][place], self.step.times[sm]
        first, behind = times.first_piece[place : place + 2]
        collects = BEHAVIOUR[task.entry.kind].collects
        met = times.end[place] - (self.measured.join_seconds if collects else 0.0)
        if behind > first:
            used = self.step.streams[sm].used
            last = max(range(first, behind), key=lambda piece: (used[piece], piece))
            if used[last] >= met - EPSILON:
                return Cause(Moment(USED, sm, last), 0.0)
        seen, signal, gather = NEVER, NONE, 0.0
        if task.runs and behind == first:
            seen, signal, gather = self._seen(task.runs[0])
        before = self._before(sm, place, met - gather)
        free = gather if before is None else times.end[before] + gather
        if seen >= free:
            return Cause(Moment(SEEN, NONE, signal), seen - free)
        return Cause(None if before is None else Moment(END, sm, before), 0.0)

    def _seen(self, run: Run) -> tuple[float, int, float]:
        """When a run's inputs are there by its packets, their signal, and what gathering takes."""
        load = self.measured.load_seconds
        if run.signal == NONE:
            return NEVER, NONE, run.gathers * load
        seen = self.step.seen[run.signal] + max(0, run.gathers - 1) * load
        return seen, run.signal, run.gathers * load

    def _before(self, sm: int, place: int, time: float) -> int | None:
        """The task before this one that ended last, as far as it ended until `time`."""
        ends, program = self.step.times[sm].end, self.step.tasks.programs[sm]
        helps = BEHAVIOUR[program[place].entry.kind].helps
        found: int | None = None
        for earlier in range(place - 1, max(-1, place - LOOK_BACK), -1):
            if BEHAVIOUR[program[earlier].entry.kind].helps != helps:
                continue
            if helps and program[earlier].warp != program[place].warp:
                continue
            if ends[earlier] <= time + EPSILON and (found is None or ends[earlier] > ends[found]):
                found = earlier
        return found

    def _of_used(self, sm: int, piece: int) -> Cause:
        """A piece is used once it has landed, its packets are there and its warps are free."""
        step, place = self.step, self.task_of_piece(sm, piece)
        task, stream = step.tasks.programs[sm][place], step.streams[sm]
        first = step.times[sm].first_piece[place]
        run, number = _find(task, piece - first)
        moved = run.pieces[number]
        cost = moved.each * self._rates[BEHAVIOUR[task.entry.kind].attends]
        begin = stream.used[piece] - cost
        landed = stream.landed[piece] + cost * (min(1.0, moved.warps / moved.chunks) - 1.0)
        seen, signal, _ = self._seen(run)
        if max(landed, seen) < begin - EPSILON:
            if number:
                return Cause(Moment(USED, sm, piece - 1), 0.0)
            before = self._before(sm, place, begin)
            return Cause(None if before is None else Moment(END, sm, before), 0.0)
        if seen > landed:
            return Cause(Moment(SEEN, NONE, signal), seen - landed)
        others = max(seen, step.times[sm].begin[place])
        return Cause(Moment(LANDED, sm, piece), max(0.0, landed - others))

    def _of_issued(self, sm: int, piece: int) -> Cause:
        """A piece is sent for after the pieces before it, into a free slot, its expert known."""
        stream = self.step.streams[sm]
        time = stream.issued[piece]
        in_window = self._after_landed[sm][piece]
        landed = 0.0 if in_window == NONE else stream.landed[in_window]
        before = stream.issued[piece - 1] if piece else 0.0
        held_by = stream.holds.get(piece)
        if held_by is not None:
            slack = time - max(landed, before)
            if held_by == NONE:
                gate = self.step.tasks.programs[sm][self.task_of_piece(sm, piece)].gate
                return Cause(Moment(SEEN, NONE, gate), slack)
            while stream.used[held_by] < time - EPSILON:
                held_by -= 1
            return Cause(Moment(USED, sm, held_by), slack)
        if piece and before >= landed:
            return Cause(Moment(ISSUED, sm, piece - 1), 0.0)
        return Cause(None if in_window == NONE else Moment(LANDED, sm, in_window), 0.0)


def _find(task: SimTask, piece: int) -> tuple[Run, int]:
    """The run that a task's piece, counted from its first, belongs to, and its number there."""
    for run in task.runs:
        if piece < len(run.pieces):
            return run, piece
        piece -= len(run.pieces)
    raise IndexError(f"the task has no piece {piece}")


class HopKind(StrEnum):
    """What time on the critical path goes by with."""

    STREAM = "stream"  # bytes are on their way to an SM
    WORK = "work"  # warps multiply, gather or add up
    HAND_OFF = "hand-off"  # packets are on their way from SM to SM


@dataclass(frozen=True, slots=True)
class Hop:
    """A stretch of the critical path on one SM: of the task at `place`, from begin to end.

    bytes: streamed in it; signal: the packets of a hand-off; slack_seconds: how much sooner it
    could have come before something else would have held up what follows it.
    """

    kind: HopKind
    sm: int
    place: int
    begin: float
    end: float
    bytes: int
    signal: int
    slack_seconds: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.begin


def critical_path(step: SimulatedStep) -> list[Hop]:
    """The chain of causes that ends with the step's last task, in order of time."""
    causes = Causes(step)
    sm = max(range(len(step.times)), key=lambda number: (step.times[number].end[-1], -number))
    moment: Moment | None = Moment(END, sm, len(step.tasks.programs[sm]) - 1)
    links: list[tuple[Moment, Cause]] = []
    while moment is not None:
        cause = causes.cause(moment)
        links.append((moment, cause))
        moment = cause.moment
    hops: list[_OpenHop] = []
    for moment, cause in reversed(links):
        begin = 0.0 if cause.moment is None else causes.time(cause.moment)
        kind = _HOP_KINDS[moment.kind]
        if not hops or (hops[-1].kind, hops[-1].sm) != (kind, moment.sm):
            if hops:
                hops[-1].slack = cause.slack
            hops.append(_OpenHop(kind, moment.sm, begin))
        hops[-1].moments.append(moment)
    return [_closed(causes, hop) for hop in hops]


_HOP_KINDS = {
    END: HopKind.WORK,
    USED: HopKind.WORK,
    LANDED: HopKind.STREAM,
    ISSUED: HopKind.STREAM,
    SEEN: HopKind.HAND_OFF,
}


@dataclass(slots=True)
class _OpenHop:
    """A hop to which moments are still added."""

    kind: HopKind
    sm: int
    begin: float
    moments: list[Moment] = field(default_factory=list)
    slack: float = 0.0


def _closed(causes: Causes, hop: _OpenHop) -> Hop:
    """The task of a hop is that of its last moment; a hand-off is its writer's."""
    last = hop.moments[-1]
    end, sm, size, signal = causes.time(last), hop.sm, 0, NONE
    if hop.kind == HopKind.HAND_OFF:
        signal = last.number
        sm, place = causes.step.last_writer[signal]
    elif last.kind == END:
        place = last.number
    else:
        place = causes.task_of_piece(sm, last.number)
        if hop.kind == HopKind.STREAM:
            size = sum(causes.step.streams[sm].bytes[hop.moments[0].number : last.number + 1])
    return Hop(hop.kind, sm, place, hop.begin, end, size, signal, hop.slack)
