"""The report: well-formed HTML by itself, with every claim, the same bytes each time."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mkc.compiler.pipeline import Compiled
from mkc.compiler.program import EntryKind
from mkc.compiler.report import render_report
from mkc.compiler.report_charts import Window, stream_chart, work_chart
from mkc.compiler.report_data import ReportInputs, layer_kinds, op_shares
from mkc.compiler.simulate import simulate_step
from mkc.compiler.trace import MeasuredEvent
from plan_damage import tiny_plan
from stand_in import compile_tiny

VOID = {"meta", "br", "path", "rect", "link", "img", "hr"}


class Checker(HTMLParser):
    """Collects text and ids; elements must close in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        for name in ("href", "src", "xlink:href"):
            value = values.get(name) or "#"
            assert value.startswith("#"), f"{tag} {name}={value} leaves the page"
            self.targets += [value[1:]] if len(value) > 1 else []
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if tag == "p" and self.open[-1] != "p":
            raise AssertionError(f"</p> while {self.open[-1]} is open")
        while self.open[-1] in ("td", "th", "tr", "dd", "dt", "li") and self.open[-1] != tag:
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    return compile_tiny(monkeypatch, max_batch=2)


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    assert len(checker.ids) == len(set(checker.ids))
    assert set(checker.targets) <= set(checker.ids)
    return checker


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_page(compiled: Compiled) -> None:
    page = render_report(ReportInputs.of_compiled(compiled))
    text = words(" ".join(checked(page).text))
    for shown in compiled.proof.properties:
        assert words(shown.name) in text
        assert words(shown.shown) in text
    for kernel in compiled.assembly.kernels:
        assert kernel.name in text
    assert "tiny on NVIDIA H200" in text
    assert not re.search(r"https?://|<script|@import|url\((?!#)", page)
    assert str(Path(__file__).parents[2]) not in page
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b", page)
    assert page == render_report(ReportInputs.of_compiled(compiled))


def test_measured_layers_are_shown(compiled: Compiled) -> None:
    inputs = ReportInputs.of_compiled(compiled)
    kinds = layer_kinds(inputs.step)
    events = tuple(
        MeasuredEvent(sm, 0, EntryKind.QKV, kinds[0].layer, sm, 1000, 1400, 2500) for sm in range(9)
    )
    page = render_report(replace(inputs, measured=events))
    text = words(" ".join(checked(page).text))
    assert text.count("measured on the GPU") == 1
    assert "1.5 µs" in text
    assert "measured on the GPU" not in render_report(inputs)


def test_bytes_by_op_are_those_of_the_step() -> None:
    step = simulate_step(tiny_plan(), [640, 9])
    shares = op_shares(step)
    assert sum(share.bytes for share in shares) == step.bytes
    assert sum(share.floor_seconds for share in shares) == pytest.approx(step.floor_seconds)
    assert [share.bytes for share in shares] == sorted((s.bytes for s in shares), reverse=True)
    kinds = layer_kinds(step)
    assert sum(kind.count for kind in kinds) == len(step.plan.spec.layers)


def test_bars_stay_in_their_chart() -> None:
    step = simulate_step(tiny_plan(), [640])
    window = Window(step.layer_begin(2), step.layer_begin(3))
    for chart in (work_chart(step, window), stream_chart(step, window)):
        bars = [
            tuple(map(int, bar))
            for shape in chart.shapes
            for bar in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", shape.path)
        ]
        assert len(bars) > 7
        for x, y, width, height in bars:
            assert x >= 0
            assert x + width <= 2001
            assert y >= 0
            assert y + height <= chart.height
        assert all(0 <= share <= 1 for share, _ in chart.ticks)
        assert len(chart.ticks) >= 2
