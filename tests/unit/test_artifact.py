"""Artifacts: what is written is read back the same, and nothing damaged is read at all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mkc.compiler.artifact import (
    EXTRAS,
    REQUIRED_FILES,
    copy_artifact,
    load_artifact,
    write_artifact,
)
from mkc.compiler.artifact_json import dump_plan, entry_text, read_plan
from mkc.compiler.errors import ArtifactError
from mkc.compiler.pipeline import Compiled
from mkc.compiler.program import Entry, EntryKind
from stand_in import compile_tiny


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    return compile_tiny(monkeypatch, max_batch=3)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_plan_is_rebuilt_from_the_files(compiled: Compiled, tmp_path: Path) -> None:
    written = write_artifact(compiled, tmp_path / "a")
    loaded = load_artifact(tmp_path / "a")
    assert loaded.plan == compiled.plan
    assert loaded.cubin == compiled.assembly.cubin
    assert json.dumps(loaded.manifest) == json.dumps(written.manifest)
    layer, dense, experts = (1024 + 768) * 208, 3 * 80 * 208, (6 * 3 * 48 + 6) * 208
    assert loaded.manifest["parameters"] == 6 * layer + dense + 5 * experts + (1003 + 7) * 208
    assert not loaded.spills


def test_same_inputs_same_bytes(compiled: Compiled, tmp_path: Path) -> None:
    write_artifact(compiled, tmp_path / "a", ["dot", "ptx", "trace"])
    write_artifact(compiled, tmp_path / "elsewhere" / "b", ["trace", "ptx", "dot"])
    files = contents(tmp_path / "a")
    assert files == contents(tmp_path / "elsewhere" / "b")
    assert set(files) == {"manifest.json", *REQUIRED_FILES, *EXTRAS.values()}
    assert not any(str(tmp_path).encode() in content for content in files.values())


def test_bytes_do_not_depend_on_hash_seeds() -> None:
    program = """
import hashlib, sys
from mkc.compiler.artifact_json import dump_dot, dump_layout, dump_ops, dump_plan
from mkc.compiler.ops import build_ops
from mkc.compiler.parse import load_model
from mkc.compiler.place import place
from mkc.compiler.plan import Options, Plan
from mkc.compiler.render import render
from mkc.compiler.schedule import schedule
from mkc.compiler.target import load_target
from mkc.compiler.tile import tile
spec, target, options = load_model("tiny"), load_target("h200"), Options()
tiling = tile(spec, target, 8, 16)
layout = place(spec, tiling, target)
plan = Plan(spec, target, options, tiling, layout, schedule(tiling, target))
graph = build_ops(spec)
texts = (dump_ops(graph), dump_dot(graph), dump_plan(plan), dump_layout(layout), render(plan))
print(*(hashlib.sha256(text.encode()).hexdigest() for text in texts))
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]


def test_a_program_takes_a_line_a_layer(compiled: Compiled) -> None:
    text = dump_plan(compiled.plan)
    layers = len(compiled.plan.spec.layers) + 1
    assert text.count("stage") == layers * len(compiled.plan.programs)
    assert len(text.splitlines()) == layers * len(compiled.plan.programs) + layers - 1 + 7
    assert read_plan(text.encode()) == (compiled.plan.tiling, compiled.plan.programs)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (Entry(EntryKind.STAGE, 3), "stage"),
        (Entry(EntryKind.QKV, 3, 17), "qkv:17"),
        (Entry(EntryKind.QKV, 3, 0, 5), "qkv:0/5"),
        (Entry(EntryKind.FFN_UP, 3, 12, 7), "ffn_up:12/7"),
    ],
)
def test_entry_text(entry: Entry, text: str) -> None:
    assert entry_text(entry) == text


@pytest.mark.parametrize("name", ["manifest.json", *REQUIRED_FILES])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "changed"])
def test_damaged_files_are_refused(
    compiled: Compiled, tmp_path: Path, name: str, damage: str
) -> None:
    write_artifact(compiled, tmp_path / "a")
    path = tmp_path / "a" / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(content.replace(b"t", b"x", 1))
    else:
        path.write_bytes(b"" if damage == "empty" else content[: len(content) // 2])
    with pytest.raises(ArtifactError, match=name) as error:
        load_artifact(tmp_path / "a")
    assert error.value.exit_status == 2


def change_manifest(folder: Path, **changes: object) -> None:
    """Rewrites the manifest as someone would who knows how its digest is made."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    del manifest["digest"]
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"format_version": 2}, "MKC504"),
        ({"format": "something else"}, "MKC502"),
        ({"files": {}}, "MKC501"),
        ({"files": {"../outside": "0"}}, "MKC502"),
        ({"files": None}, "MKC502"),
        ({"spec": {"name": "no model"}}, "MKC502"),
        ({"options": {"max_batch": 8, "unknown": 1}}, "MKC502"),
        ({"target": None}, "MKC502"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(
    compiled: Compiled, tmp_path: Path, changes: dict[str, object], code: str
) -> None:
    write_artifact(compiled, tmp_path / "a")
    change_manifest(tmp_path / "a", **changes)
    with pytest.raises(ArtifactError, match=r"manifest\.json") as error:
        load_artifact(tmp_path / "a")
    assert error.value.code == code


@pytest.mark.parametrize("name", ["plan.json", "layout.json"])
@pytest.mark.parametrize("content", [b"{}", b"[]", b"1", b"not json"])
def test_a_file_of_the_right_hash_may_still_be_wrong(
    compiled: Compiled, tmp_path: Path, name: str, content: bytes
) -> None:
    artifact = write_artifact(compiled, tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(content)
    files = artifact.manifest["files"] | {name: hashlib.sha256(content).hexdigest()}
    change_manifest(tmp_path / "a", files=files)
    with pytest.raises(ArtifactError, match=name) as error:
        load_artifact(tmp_path / "a")
    assert error.value.code == "MKC502"


@pytest.mark.parametrize("content", [b"[1, 2]", b'{"model": "foreign"}', b"\xff\xfe"])
def test_a_foreign_folder_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        load_artifact(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no folder") as error:
        load_artifact(tmp_path / "nowhere")
    assert error.value.code == "MKC501"


def test_an_artifact_is_replaced_as_a_whole(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_artifact(compiled, tmp_path / "a", ["ptx", "dot"])
    other = compile_tiny(monkeypatch, max_batch=1)
    write_artifact(other, tmp_path / "a")
    assert load_artifact(tmp_path / "a").plan == other.plan
    assert not (tmp_path / "a" / "kernel.ptx").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_other_things_are_never_replaced(compiled: Compiled, tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    if kind == "folder":
        precious.mkdir()
        (precious / "thesis.tex").write_text("years of work")
    else:
        precious.write_text("years of work")
    with pytest.raises(ArtifactError, match="left as it is"):
        write_artifact(compiled, precious)
    assert precious.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_a_write_that_fails_leaves_the_old_artifact(compiled: Compiled, tmp_path: Path) -> None:
    write_artifact(compiled, tmp_path / "a")
    before = contents(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        copy_artifact(tmp_path / "nowhere", tmp_path / "a")
    assert contents(tmp_path / "a") == before
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
