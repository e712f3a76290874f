"""The report's charts as SVG paths: numbers in, text out, with as few bytes as will do.

Charts are drawn in a box of CHART_WIDTH units and stretched to the page; labels are HTML beside
them, so that they stay readable on any screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mkc.compiler.simulate import SimulatedStep
from mkc.compiler.simulate_waits import Spent
from mkc.compiler.trace import MeasuredEvent

CHART_WIDTH = 2000
ROW_HEIGHT = 4
OP_ORDER = (
    "embed",
    "stage",
    "router",
    "qkv",
    "attention",
    "ffn_up",
    "merge",
    "out",
    "ffn_down",
    "residual",
    "head",
    "sample",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One path: its CSS class and its data."""

    css: str
    path: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Shapes in a box of CHART_WIDTH x height units; ticks are (share of the width, text)."""

    height: int
    shapes: list[Shape]
    ticks: list[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, in seconds, that a chart shows."""

    begin: float
    end: float

    def x(self, time: float) -> int:
        """Where a time lies, in units, cut to the chart."""
        share = (time - self.begin) / (self.end - self.begin)
        return round(min(1.0, max(0.0, share)) * CHART_WIDTH)

    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers of microseconds from the window's begin."""
        span = (self.end - self.begin) * 1e6
        distance = next(d for d in _DISTANCES if span / d <= 7)
        count = int(span / distance)
        return [(n * distance / span, f"{n * distance:g}") for n in range(count + 1)]


_DISTANCES = [m * 10**e for e in range(-2, 7) for m in (1, 2, 5)]


class _Bars:
    """Horizontal bars by CSS class, each class one path."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {}

    def add(self, css: str, x: int, y: int, width: int, height: int) -> None:
        """A bar; one without width is left out."""
        if width > 0:
            self._parts.setdefault(css, []).append(f"M{x} {y}h{width}v{height}h-{width}z")

    def shapes(self, order: Iterable[str]) -> list[Shape]:
        """The paths, classes in that order."""
        return [Shape(css, "".join(self._parts[css])) for css in order if css in self._parts]


def work_chart(step: SimulatedStep, window: Window) -> Chart:
    """What the warps of each SM do: a row an SM, tasks by op, waiting in between."""
    bars = _Bars()
    for sm, (program, times) in enumerate(zip(step.tasks.programs, step.times, strict=True)):
        y, until = sm * ROW_HEIGHT, window.begin
        for task, start, ready, end in zip(
            program, times.start, times.ready, times.end, strict=True
        ):
            if end < window.begin or start > window.end or not task.runs:
                continue
            if len(task.runs[0].warps) == 1:  # seen only where the other warps wait
                _bar(bars, task.entry.kind.name.lower(), window, ready, end, y)
                continue
            begin, ready = max(start, until), max(ready, until)
            until = max(until, end)
            _bar(bars, "wait", window, begin, ready, y)
            _bar(bars, task.entry.kind.name.lower(), window, ready, end, y)
    order = ("wait", "merge", *(op for op in OP_ORDER if op != "merge"))
    return Chart(len(step.times) * ROW_HEIGHT, bars.shapes(order), window.ticks())


def stream_chart(step: SimulatedStep, window: Window) -> Chart:
    """Whose bytes arrive at each SM, a row an SM; gaps are time in which none do."""
    bars = _Bars()
    for sm, (program, times, stream) in enumerate(
        zip(step.tasks.programs, step.times, step.streams, strict=True)
    ):
        for task, (first, behind) in zip(program, pairwise(times.first_piece), strict=True):
            if behind == first or stream.landed[behind - 1] < window.begin:
                continue
            if stream.issued[first] > window.end:
                break
            _arrivals(bars, task.entry.kind.name.lower(), step, sm, range(first, behind), window)
    return Chart(len(step.times) * ROW_HEIGHT, bars.shapes(OP_ORDER), window.ticks())


def _arrivals(
    bars: _Bars, css: str, step: SimulatedStep, sm: int, pieces: range, window: Window
) -> None:
    """Bars of one task's bytes: as one while they follow each other, apart where the SM ran dry."""
    stream = step.streams[sm]
    latency = step.plan.target.measured.latency_seconds
    begin = end = -1.0
    for piece in pieces:
        before = stream.landed[piece - 1] if piece else 0.0
        first_byte = max(before, stream.issued[piece] + latency if piece in stream.holds else 0.0)
        if first_byte > end:
            _bar(bars, css, window, begin, end, sm * ROW_HEIGHT)
            begin = first_byte
        end = stream.landed[piece]
    _bar(bars, css, window, begin, end, sm * ROW_HEIGHT)


def measured_chart(
    events: Sequence[MeasuredEvent], layer: int, sms: int
) -> tuple[Chart, Window] | None:
    """What warps of a GPU did in a layer, from its first event to its last; None without events."""
    own = [event for event in events if event.layer == layer and event.sm < sms]
    if not own:
        return None
    zero = min(event.start_ns for event in own)
    window = Window(0.0, max(event.end_ns - zero for event in own) * 1e-9)
    bars = _Bars()
    for event in own:
        start, ready, end = ((ns - zero) * 1e-9 for ns in event[5:])
        y = event.sm * ROW_HEIGHT
        _bar(bars, "wait", window, start, ready, y)
        _bar(bars, event.kind.name.lower(), window, ready, end, y)
    chart = Chart(sms * ROW_HEIGHT, bars.shapes(("wait", *OP_ORDER)), window.ticks())
    return chart, window


def _bar(bars: _Bars, css: str, window: Window, begin: float, end: float, y: int) -> None:
    """A bar of a row, if any of it lies in the window; what is seen has at least a unit."""
    if end <= window.begin or begin >= window.end or end <= begin:
        return
    x = window.x(begin)
    bars.add(css, x, y, max(1, window.x(end) - x), ROW_HEIGHT)


SPENT_CSS = {
    Spent.STREAMING: "streaming",
    Spent.INPUT: "on-input",
    Spent.ATTENTION: "on-attention",
    Spent.ROUTING: "on-routing",
    Spent.HIDDEN: "on-hidden",
    Spent.RING: "on-ring",
    Spent.ENDS: "on-ends",
}


def spent_chart(spent: Sequence[dict[Spent, float]], height: int = 600) -> Chart:
    """A column an SM: time by cause, streaming at the bottom, to the length of the step."""
    bars = _Bars()
    edges = [round(sm * CHART_WIDTH / len(spent)) for sm in range(len(spent) + 1)]
    total = max(sum(one.values()) for one in spent)
    for sm, one in enumerate(spent):
        below = 0.0
        for cause in SPENT_CSS:
            top = below + one[cause]
            y = height - round(top / total * height)
            tall = height - round(below / total * height) - y
            if tall:
                bars.add(SPENT_CSS[cause], edges[sm], y, edges[sm + 1] - edges[sm], tall)
            below = top
    named = range(0, len(spent), max(1, len(spent) // 4))
    ticks = [((sm + 0.5) / len(spent), str(sm)) for sm in named]
    return Chart(height, bars.shapes(SPENT_CSS.values()), ticks)
