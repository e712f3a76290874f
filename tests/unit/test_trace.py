"""Traces: JSON that Perfetto reads, with slices that nest, and measured events beside."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from mkc.compiler.errors import ArtifactError
from mkc.compiler.program import EntryKind
from mkc.compiler.simulate import simulate_step
from mkc.compiler.trace import MeasuredEvent, dump_trace, read_measured
from plan_damage import tiny_plan

MEASURED = [
    MeasuredEvent(3, 0, EntryKind.QKV, 1, 7, 1000, 1500, 1900),
    MeasuredEvent(3, 0, EntryKind.FFN_UP, 1, 2, 1900, 1900, 2600),
    MeasuredEvent(3, 4, EntryKind.MERGE, 1, 5, 1100, 1200, 1300),
]


def events_of(trace: bytes) -> list[dict[str, Any]]:
    document: dict[str, Any] = json.loads(gzip.decompress(trace))
    return list(document["traceEvents"])


def test_slices_nest() -> None:
    """On each track a slice lies within the one that is open, or begins after it has ended."""
    events = events_of(dump_trace(simulate_step(tiny_plan(), [640, 200, 1]), MEASURED))
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            span = (begin, begin + round(event["dur"] * 1000))
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    assert len(tracks) > 3 * 7
    for spans in tracks.values():
        open_slices: list[tuple[int, int]] = []
        for begin, end in spans:
            assert begin <= end
            while open_slices and open_slices[-1][1] <= begin:
                open_slices.pop()
            assert not open_slices or (open_slices[-1][0] <= begin and end <= open_slices[-1][1])
            open_slices.append((begin, end))


def test_every_task_is_there() -> None:
    step = simulate_step(tiny_plan(), [9])
    events = events_of(dump_trace(step))
    slices = [e for e in events if e["ph"] == "X" and e["tid"] != 1 and e["name"] != "wait"]
    assert len(slices) == sum(len(program) for program in step.tasks.programs)
    streamed = sum(e["args"]["bytes"] for e in events if e["ph"] == "X" and e["tid"] == 1)
    assert streamed == step.bytes


def test_predicted_and_measured_stand_side_by_side() -> None:
    events = events_of(dump_trace(simulate_step(tiny_plan(), [9]), MEASURED, "tiny"))
    names = {
        event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == 3
    }
    assert {"predicted: stream", "predicted: all warps"} <= names
    assert {"measured: warp 0", "measured: warp 4"} <= names
    measured = [e for e in events if e["ph"] == "X" and e["pid"] == 3 and e["tid"] == 30]
    assert [(e["name"], e["ts"], e["dur"]) for e in measured] == [
        ("qkv 7", 0.0, 0.9),
        ("wait", 0.0, 0.5),
        ("ffn_up 2", 0.9, 0.7),
    ]


def test_same_step_same_bytes() -> None:
    first, second = (dump_trace(simulate_step(tiny_plan(), [50])) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("compress", [False, True])
def test_measured_files(tmp_path: Path, compress: bool) -> None:
    rows = [[*event[:2], event.kind.name.lower(), *event[3:]] for event in MEASURED]
    content = json.dumps({"events": rows}).encode()
    path = tmp_path / "measured.json"
    path.write_bytes(gzip.compress(content) if compress else content)
    assert read_measured(path) == MEASURED
    path.write_text(json.dumps({"events": [[int(v) for v in event] for event in MEASURED]}))
    assert read_measured(path) == MEASURED


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"events": 3}', '{"events": [[1]]}', '{"events": [[0,0,"fly",0,0,1,2,3]]}'],
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(content)
    with pytest.raises(ArtifactError, match="MKC502"):
        read_measured(path)
