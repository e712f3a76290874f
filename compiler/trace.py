"""Traces for Perfetto (ui.perfetto.dev): predicted and measured tasks side by side, SM by SM.

The file is gzipped Chrome JSON. Each SM is a process. Its tracks are the stream that its producer
keeps up, the tasks that all consumer warps share, those that one warp or a helper does, and beside
them what was measured of each warp. Times are microseconds from the first request of the step.
Slices of a track nest: a task's slice holds one for the time that it waited.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mkc.compiler.errors import ArtifactError
from mkc.compiler.place import CONSUMER_WARPS
from mkc.compiler.program import EntryKind
from mkc.compiler.simulate import SimulatedStep
from mkc.compiler.simulate_tasks import SimTask

TRACE_FILE = "trace.json.gz"
STREAM_TRACK, SHARED_TRACK, FIRST_WARP_TRACK, FIRST_MEASURED_TRACK = 1, 2, 10, 30


class MeasuredEvent(NamedTuple):
    """One task as a warp of a GPU saw it; the clock of all SMs is the same, its zero is any.

    start: the warp took it up; ready: all that it needed was there; end: its results were stored.
    """

    sm: int
    warp: int
    kind: EntryKind
    layer: int
    tile: int
    start_ns: int
    ready_ns: int
    end_ns: int


class _Slice(NamedTuple):
    """A task on a track, in seconds."""

    track: int
    name: str
    start: float
    ready: float
    end: float
    details: dict[str, Any]


def read_measured(path: Path) -> list[MeasuredEvent]:
    """Measured events from JSON: {"events": [[sm, warp, kind, layer, tile, start, ready, end]]}.

    Kinds are names (`qkv`) or numbers, times nanoseconds. Raises ArtifactError MKC502 if it is not
    such a file, OSError if it cannot be read.
    """
    content = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        return [_measured(*event) for event in document["events"]]
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ArtifactError(
            "MKC502", f"{path} is not a file of measured events: {error}"
        ) from error


def _measured(
    sm: int, warp: int, kind: str | int, layer: int, tile: int, *ns: int
) -> MeasuredEvent:
    start, ready, end = (int(time) for time in ns)
    known = EntryKind[kind.upper()] if isinstance(kind, str) else EntryKind(kind)
    return MeasuredEvent(int(sm), int(warp), known, int(layer), int(tile), start, ready, end)


def dump_trace(
    step: SimulatedStep | None = None, measured: Sequence[MeasuredEvent] = (), name: str = ""
) -> bytes:
    """A predicted step, measured events or both -> the bytes of a trace file."""
    by_sm: dict[int, list[_Slice]] = {}
    if step is not None:
        for sm in range(len(step.times)):
            by_sm.setdefault(sm, []).extend(_predicted_slices(step, sm))
    for sm, slices in _measured_slices(measured).items():
        by_sm.setdefault(sm, []).extend(slices)
    lines = [
        json.dumps(event, separators=(",", ":"))
        for sm in sorted(by_sm)
        for event in _events(sm, by_sm[sm])
    ]
    head = json.dumps({"model": name})
    text = (
        f'{{"otherData":{head},"displayTimeUnit":"ns","traceEvents":[\n'
        + ",\n".join(lines)
        + "\n]}\n"
    )
    return gzip.compress(text.encode(), 6, mtime=0)


def task_name(task: SimTask) -> str:
    """What a task is called on a track: its op and tile."""
    part = f".{task.part}" if task.part else ""
    return f"{task.entry.kind.name.lower()} {task.entry.tile}{part}"


def _predicted_slices(step: SimulatedStep, sm: int) -> Iterator[_Slice]:
    times, stream = step.times[sm], step.streams[sm]
    for place, (task, (first, behind)) in enumerate(
        zip(step.tasks.programs[sm], pairwise(times.first_piece), strict=True)
    ):
        details = {"layer": task.entry.layer, "warp": task.warp}
        name, is_shared = task_name(task), not task.runs or len(task.runs[0].warps) > 1
        track = SHARED_TRACK if is_shared else FIRST_WARP_TRACK + task.warp
        yield _Slice(track, name, times.start[place], times.ready[place], times.end[place], details)
        if behind > first:
            before = stream.landed[first - 1] if first else 0.0
            start, end = max(stream.issued[first], before), stream.landed[behind - 1]
            size = {"layer": task.entry.layer, "bytes": sum(stream.bytes[first:behind])}
            yield _Slice(STREAM_TRACK, name, start, start, end, size)


def _measured_slices(events: Iterable[MeasuredEvent]) -> dict[int, list[_Slice]]:
    events = list(events)
    zero = min((event.start_ns for event in events), default=0)
    slices: dict[int, list[_Slice]] = {}
    for event in events:
        start, ready, end = ((ns - zero) * 1e-9 for ns in event[5:])
        name = f"{event.kind.name.lower()} {event.tile}"
        track = FIRST_MEASURED_TRACK + event.warp
        one = _Slice(track, name, start, ready, end, {"layer": event.layer})
        slices.setdefault(event.sm, []).append(one)
    return slices


def _track_name(track: int) -> str:
    if track >= FIRST_MEASURED_TRACK:
        return f"measured: warp {track - FIRST_MEASURED_TRACK}"
    if track >= FIRST_WARP_TRACK:
        warp = track - FIRST_WARP_TRACK
        is_helper = warp >= CONSUMER_WARPS
        return (
            f"predicted: helper {warp - CONSUMER_WARPS}" if is_helper else f"predicted: warp {warp}"
        )
    return {STREAM_TRACK: "predicted: stream", SHARED_TRACK: "predicted: all warps"}[track]


def _events(sm: int, slices: list[_Slice]) -> Iterator[dict[str, Any]]:
    """Names, then slices by track and time; a slice begins where the one before it ended."""
    yield _meta("process_name", sm, 0, {"name": f"SM {sm}"})
    yield _meta("process_sort_index", sm, 0, {"sort_index": sm})
    for track in sorted({one.track for one in slices}):
        yield _meta("thread_name", sm, track, {"name": _track_name(track)})
        yield _meta("thread_sort_index", sm, track, {"sort_index": track})
        until = 0.0
        own = (one for one in slices if one.track == track)
        for one in sorted(own, key=lambda one: (one.start, one.end)):
            start, end = max(one.start, until), max(one.end, until)
            ready = min(max(one.ready, start), end)
            until = end
            yield _slice(sm, track, one.name, start, end, one.details)
            if ready - start >= 1e-9:
                yield _slice(sm, track, "wait", start, ready, {})


def _meta(name: str, sm: int, track: int, value: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": sm, "tid": track, "args": value}


def _slice(
    sm: int, track: int, name: str, start: float, end: float, details: dict[str, Any]
) -> dict[str, Any]:
    """Whole nanoseconds, so that a slice never ends after the one that holds it."""
    begin, stop = round(start * 1e9), round(end * 1e9)
    event = {"ph": "X", "name": name, "pid": sm, "tid": track}
    event |= {"ts": begin / 1e3, "dur": (stop - begin) / 1e3}
    return event | ({"args": details} if details else {})
