"""Where the time of a simulated step goes on each SM, and how much later each task could end."""

from __future__ import annotations

from enum import StrEnum

from mkc.compiler.simulate import SimulatedStep
from mkc.compiler.simulate_causes import Causes, Moment, MomentKind
from mkc.compiler.simulate_tasks import BEHAVIOUR, NONE, Run


class Spent(StrEnum):
    """What an SM's stream does with its time: bytes arrive, or it waits and has run dry."""

    STREAMING = "streaming"
    INPUT = "waiting for the layer input"
    ROUTING = "waiting for the routing"
    ATTENTION = "waiting for attention's packets"
    HIDDEN = "waiting for hidden states"
    RING = "waiting for the ring"
    ENDS = "before the first and after the last byte"


_SPENT_BY_SET = {
    "layer_input": Spent.INPUT,
    "router_logits": Spent.ROUTING,
    "qkv": Spent.ATTENTION,
    "partials": Spent.ATTENTION,
    "merged": Spent.ATTENTION,
    "hidden": Spent.HIDDEN,
    "candidates": Spent.ENDS,
}
_LONGEST_WALK = 64


def time_spent(step: SimulatedStep) -> list[dict[Spent, float]]:
    """Of each SM, seconds by what its stream did; they add up to the step without its launch.

    A stream has run dry where a piece was sent for, held up by routing or ring, later than would
    have kept bytes coming. A ring is full because consumers wait for something: that is named, and
    the ring itself only where they did not wait.
    """
    causes = Causes(step)
    latency = step.plan.target.measured.latency_seconds
    end = max(times.end[-1] for times in step.times)
    spent = []
    for sm, stream in enumerate(step.streams):
        seconds = dict.fromkeys(Spent, 0.0)
        if not stream.landed:
            spent.append(seconds | {Spent.ENDS: end})
            continue
        seconds[Spent.ENDS] = latency + end - stream.landed[-1]
        for piece in sorted(stream.holds):
            before = stream.landed[piece - 1] if piece else latency
            dry = stream.issued[piece] + latency - before
            if dry > 0:
                seconds[_reason(causes, sm, piece)] += dry
        seconds[Spent.STREAMING] = end - sum(seconds.values())
        spent.append(seconds)
    return spent


def _reason(causes: Causes, sm: int, piece: int) -> Spent:
    """What held up a piece: the first packets on the way back, or the ring if bytes come first."""
    moment: Moment | None = Moment(MomentKind.ISSUED, sm, piece)
    for _ in range(_LONGEST_WALK):
        moment = causes.cause(moment).moment if moment is not None else None
        if moment is None:
            return Spent.ENDS
        if moment.kind == MomentKind.SEEN:
            return _SPENT_BY_SET[causes.step.tasks.signals[moment.number].set]
        if moment.kind == MomentKind.LANDED:
            return Spent.RING
    return Spent.RING


class Slacks:
    """How much later each task of a step could end before anything would notice."""

    def __init__(self, step: SimulatedStep) -> None:
        self.step = step
        self._rest: dict[int, float] = {}
        self._readers: list[list[tuple[int, int, int]]] = [[] for _ in step.tasks.signals]
        self._gates: list[list[tuple[int, int]]] = [[] for _ in step.tasks.signals]
        for sm, program in enumerate(step.tasks.programs):
            for place, task in enumerate(program):
                for number, run in enumerate(task.runs):
                    if run.signal != NONE:
                        self._readers[run.signal].append((sm, place, number))
                if task.gate != NONE:
                    self._gates[task.gate].append((sm, place))

    def readers(self, signal: int) -> list[tuple[int, int]]:
        """(SM, place) of all tasks that wait for a signal."""
        return list(dict.fromkeys((sm, place) for sm, place, _ in self._readers[signal]))

    def of_task(self, sm: int, place: int) -> float:
        """Seconds that a task could end later without holding up a reader of what it wrote or, of a
        task that writes nothing, the next task of its SM that needs it."""
        task, end = self.step.tasks.programs[sm][place], self.step.times[sm].end[place]
        if task.writes == NONE:
            return max(0.0, self._next_use(sm, place) - end)
        last_sm, last_place = self.step.last_writer[task.writes]
        written = self.step.times[last_sm].end[last_place]
        return written - end + self.of_signal(task.writes)

    def of_signal(self, signal: int) -> float:
        """Seconds that a signal could be seen later."""
        if signal not in self._rest:
            uses = [self._use(*reader) for reader in self._readers[signal]]
            for sm, place in self._gates[signal]:
                piece = self.step.times[sm].first_piece[place]
                if piece < len(self.step.streams[sm].issued):
                    uses.append(self.step.streams[sm].issued[piece])
            self._rest[signal] = max(0.0, min(uses, default=0.0) - self.step.seen[signal])
        return self._rest[signal]

    def _use(self, sm: int, place: int, number: int) -> float:
        """When a run of a task used its packets, less the rounds of loads that it needed first."""
        step = self.step
        task, times = step.tasks.programs[sm][place], step.times[sm]
        run: Run = task.runs[number]
        measured = step.plan.target.measured
        if not run.pieces:
            return times.start[place] + (measured.load_seconds if run.gathers else 0.0)
        further = max(0, run.gathers - 1) * measured.load_seconds
        piece = times.first_piece[place] + sum(len(r.pieces) for r in task.runs[:number])
        attends = BEHAVIOUR[task.entry.kind].attends
        rate = measured.attention_bytes_per_second if attends else measured.warp_bytes_per_second
        return step.streams[sm].used[piece] - run.pieces[0].each / rate - further

    def _next_use(self, sm: int, place: int) -> float:
        """When a later task of the SM took up what one left there."""
        program, times = self.step.tasks.programs[sm], self.step.times[sm]
        is_stage = (
            program[place].runs and not times.first_piece[place + 1] - times.first_piece[place]
        )
        for later in range(place + 1, len(program)):
            if is_stage:
                return times.ready[later]
            if BEHAVIOUR[program[later].entry.kind].collects and not program[later].runs:
                return times.end[later] - self.step.plan.target.measured.join_seconds
        return times.end[place]
