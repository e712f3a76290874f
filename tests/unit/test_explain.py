"""`mkc explain`: golden texts for the tiny model, and what the texts claim."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import golden_files
from mkc.api.cli import app, run
from mkc.compiler.explain import Explainer, Explanation, UnknownName, find_entry, find_item
from mkc.compiler.placement import BY_BYTES, candidates, entry_bytes, placement_rule
from mkc.compiler.program import EntryKind
from mkc.compiler.simulate import simulate_step
from mkc.compiler.simulate_tasks import BEHAVIOUR
from plan_damage import tiny_plan
from stand_in import compile_tiny


@cache
def explainer() -> Explainer:
    return Explainer(simulate_step(tiny_plan(), [640, 200, 1]))


def text_of(explanation: Explanation) -> str:
    """All of an explanation but its times, which follow the target's measured figures."""
    lines = [explanation.title, *(f"{name}: {text}" for name, text in explanation.facts)]
    for table in explanation.tables:
        lines += ["", table.title, " | ".join(table.headers)]
        lines += [" | ".join(row) for row in table.rows]
    return "".join(line + "\n" for line in lines)


def masked(text: str) -> str:
    """Times follow the target's measured figures, and with them who comes last."""
    import re

    text = re.sub(r"\d+\.\d\d us", "#.## us", text)
    text = re.sub(r"the last \w+(\.\w+)? tile \d+ on SM \d+", "the last of them", text)
    return re.sub(r"\| (yes)?\n", "|\n", text)


@pytest.mark.parametrize(
    "name", ["layer2.qkv:17", "layer2.ffn_up:3", "layer3.residual:8", "head:0", "layer1.stage:4"]
)
def test_tasks(name: str) -> None:
    text = masked(text_of(explainer().task(name)))
    golden_files.compare(f"explain_{name.replace(':', '_')}.txt", text)


def test_every_entry_can_be_explained() -> None:
    plan = tiny_plan()
    for sm in (0, 6):
        for index, entry in enumerate(plan.programs[sm]):
            if entry.layer not in (0, 2, len(plan.spec.layers)):
                continue
            own = sm if entry.kind in (EntryKind.STAGE, EntryKind.SAMPLE) else entry.tile
            name = f"layer{entry.layer}.{entry.kind.name.lower()}:{own}"
            assert find_entry(plan, name) == (sm, index, entry)
            assert explainer().task(name).facts[0] == (
                "where",
                f"SM {sm}, entry {index} of {len(plan.programs[sm])}",
            )


def test_the_scheduler_chose_what_the_text_says() -> None:
    """Tiles of qkv went to the SM that had streamed least among those that could take one more."""
    plan = tiny_plan()
    limit = -(-plan.tiling.qkv_tiles // plan.target.sms)
    for sm, program in enumerate(plan.programs):
        for entry in program:
            if entry.kind != EntryKind.QKV or entry.layer not in (0, 3):
                continue
            free = [c for c in candidates(plan, entry) if c.tiles < limit]
            assert free[0].sm == sm
    ranks = {
        entry.tile: sm
        for sm, program in enumerate(plan.programs)
        for entry in program
        if entry.kind == EntryKind.FFN_UP and entry.layer == 2
    }
    (first,) = (e for e in plan.programs[ranks[0]] if (e.kind, e.layer) == (EntryKind.FFN_UP, 2))
    assert [c.sm for c in candidates(plan, first)] == [ranks[rank] for rank in range(len(ranks))]


def test_all_kinds_have_a_rule_and_bytes() -> None:
    plan = tiny_plan()
    seen = {entry.kind: entry for program in plan.programs for entry in program}
    assert set(seen) == set(BEHAVIOUR)
    for kind, entry in seen.items():
        assert placement_rule(plan, entry)
        assert (entry_bytes(plan, entry) > 0) == (kind in BY_BYTES or kind in _ALSO_STREAM)


_ALSO_STREAM = (EntryKind.OUT, EntryKind.FFN_DOWN)


@pytest.mark.parametrize("name", ["merged[3,5,0]", "layer_input[0,0,2]", "candidates[1,6]"])
def test_packets(name: str) -> None:
    plan = tiny_plan()
    packets, item = find_item(plan, name)
    explanation = explainer().packet(str(packets.index(*item)))
    assert explanation == explainer().packet(name)
    assert f"packets {packets.index(*item)}" in " ".join(map(" ".join, explanation.facts))
    assert explanation.tables[0].rows


def test_layers_and_step() -> None:
    layer = explainer().layer(2)
    ops, path = layer.tables
    assert {row[0] for row in ops.rows} == {
        kind.name.lower()
        for kind in BEHAVIOUR
        if kind not in (EntryKind.EMBED, EntryKind.HEAD, EntryKind.SAMPLE)
    }
    assert path.rows
    whole = explainer().whole_step()
    shares = [float(row[3].rstrip("%")) for row in whole.tables[0].rows]
    launch = tiny_plan().target.measured.launch_seconds / explainer().step.seconds
    assert sum(shares) == pytest.approx(100 * (1 - launch), abs=0.4)


@pytest.mark.parametrize(
    "name", ["qkv", "qkv:1", "layer2.fly:1", "layer99.qkv:0", "layer2.qkv:999", "layer2.qkv:x"]
)
def test_unknown_tasks(name: str) -> None:
    with pytest.raises(UnknownName):
        explainer().task(name)


@pytest.mark.parametrize("name", ["merged", "merged[1]", "merged[99,0,0]", "99999999", "x[1]"])
def test_unknown_packets(name: str) -> None:
    with pytest.raises(UnknownName):
        explainer().packet(name)


@pytest.fixture
def artifact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    from mkc.compiler.artifact import write_artifact

    monkeypatch.chdir(tmp_path)
    write_artifact(compile_tiny(monkeypatch, max_batch=2), tmp_path / "tiny")
    return tmp_path / "tiny"


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, prog_name="mkc", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_command_line(artifact: Path) -> None:
    import json

    assert "waiting for the layer input" in output_of("explain", str(artifact))
    text = output_of("explain", str(artifact), "task", "layer2.qkv:3", "--lengths", "50,9")
    assert text.startswith("layer2.qkv tile 3\n")
    shown: dict[str, Any] = json.loads(
        output_of("explain", str(artifact), "layer", "2", "--seed", "3", "--json")
    )
    assert shown["tables"][0]["rows"][0]["op"]
    output_of("explain", str(artifact), "--report", "r.html", "--trace", "t.json.gz")
    assert Path("r.html").read_text("utf-8").startswith("<!doctype html>")
    assert Path("t.json.gz").read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "3"], "takes no name"),
        (["task"], "takes a name"),
        (["task", "qkv:1"], "names no layer"),
        (["layer", "x"], "takes a number"),
        (["layer", "6"], "there is no layer 6"),
        (["--lengths", "a"], "is no list of 1 to 2 lengths"),
        (["--lengths", "1,2,3"], "no list of 1 to 2 lengths"),
        (["--lengths", "0"], "no list of 1 to 2 lengths"),
        (["--measured", "nope.json"], "nope.json"),
    ],
)
def test_bad_arguments(
    artifact: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(["explain", str(artifact), *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split()).replace("│ ", "").replace(" │", "")
