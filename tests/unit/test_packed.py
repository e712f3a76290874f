"""Packed copies hold the arena bit by bit; whatever does not fit is refused before it is used."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from checkpoints import make_layout, separate_tensors, small_spec, write_single
from mkc.api.cli import app, run
from mkc.compiler.parse import load_model
from mkc.compiler.place import Layout, place
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import load_target
from mkc.compiler.tile import tile
from mkc.runtime import packed
from mkc.runtime.packed import (
    PRELUDE,
    PackedHeader,
    layout_hash,
    open_packed,
    read_packed_header,
    spec_hash,
    write_packed,
)
from mkc.runtime.packing import pack_weights
from mkc.runtime.weights import LayerWeights, RandomWeights, StateDictWeights, WeightsError

SPEC = small_spec(tied_head=False)


def write(path: Path, spec: ModelSpec = SPEC, seed: int = 0) -> PackedHeader:
    layout = make_layout(spec)
    return write_packed(path, layout, spec, RandomWeights(spec, seed), f"checkpoint {seed}")


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(WeightsError) as error:
        open_packed(path, make_layout(SPEC), SPEC, **options)
    assert error.value.exit_status == 2
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "small.mkcpack")
    return tmp_path / "small.mkcpack"


def test_the_arena_comes_back(tmp_path: Path) -> None:
    layout, path = make_layout(SPEC), tmp_path / "new" / "small.mkcpack"
    heard: list[str] = []
    weights = RandomWeights(SPEC, 0)
    header = write_packed(path, layout, SPEC, weights, "abc", heard.append)
    arena = open_packed(path, layout, SPEC, checkpoint="abc", verify=True)
    assert torch.equal(arena, pack_weights(layout, SPEC, weights, "cpu"))
    assert arena.data_ptr() % 1024 == 0
    assert read_packed_header(path) == header
    assert heard == ["layer 0", "layer 1", "head", "embedding", "checksums", "writing"]
    assert path.stat().st_size == header.arena_offset + layout.arena_bytes
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o400


def test_same_inputs_same_bytes(tmp_path: Path, file: Path) -> None:
    write(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


def test_the_format_of_the_page(file: Path) -> None:
    """Bytes as docs/format.md has them, read without the module."""
    content = file.read_bytes()
    magic, version, length, offset, size, _ = struct.unpack_from("<8sIIQQ32s", content)
    assert (magic, version, size) == (b"MKCPACK\0", 1, len(content))
    header = json.loads(content[64 : 64 + length])
    assert list(header) == [field.name for field in dataclasses.fields(PackedHeader)]
    assert offset == header["arena_offset"] == 4096
    assert content[64 + length : offset] == bytes(offset - 64 - length)
    names = [(region.name, region.layer) for region in make_layout(SPEC).regions]
    assert [tuple(region[:2]) for region in header["regions"]] == names
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name in header)


@pytest.mark.parametrize("model", ["tiny", "north_mini_code"])
def test_one_copy_serves_every_target_and_batch(model: str) -> None:
    spec = load_model(model)
    hashes = set()
    for target in (load_target("h100"), load_target("h200")):
        for max_batch, fragments in ((1, 32), (3, 16), (8, 32)):
            layout = place(spec, tile(spec, target, max_batch, fragments), target)
            hashes.add(layout_hash(layout))
    assert len(hashes) == 1


def test_another_model_layout_or_checkpoint_is_refused(tmp_path: Path, file: Path) -> None:
    other = SPEC.model_copy(update={"logit_scale": 0.5})
    with pytest.raises(WeightsError, match="has the weights of another model"):
        open_packed(file, make_layout(other), other)
    renamed = SPEC.model_copy(update={"name": "renamed"})
    assert spec_hash(renamed) == spec_hash(SPEC)
    open_packed(file, make_layout(renamed), renamed)
    moved = dataclasses.replace(make_layout(SPEC), arena_bytes=make_layout(SPEC).arena_bytes + 1)
    with pytest.raises(WeightsError, match="has the weights in another layout"):
        open_packed(file, moved, SPEC)
    assert "has the weights of another checkpoint" in refused(file, checkpoint="checkpoint 1")
    write(file, seed=1)
    open_packed(file, make_layout(SPEC), SPEC, checkpoint="checkpoint 1")


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


def replaced(place: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + new + content[place + len(new) :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut(0), "is no packed copy"),
        (cut(63), "is no packed copy"),
        (cut(64), "is cut short or damaged: it has 64 bytes, its header says"),
        (cut(5000), "is cut short or damaged: it has 5000 bytes, its header says"),
        (cut(-1), "is cut short or damaged"),
        (lambda content: content + b"\0", "is cut short or damaged"),
        (replaced(0, b"GGUF"), "is no packed copy"),
        (replaced(8, b"\2"), "has format version 2; this mkc reads version 1"),
        (replaced(12, b"\xff" * 4), "is cut short or damaged"),
        (replaced(16, b"\1"), "has a header that contradicts itself"),
        (replaced(12, b"\1"), "has a damaged header"),
        (replaced(17, b"\x20"), "has a header that contradicts itself"),
        (replaced(70, b"!"), "has a damaged header"),
    ],
)
def test_damaged_headers(file: Path, change: Callable[[bytes], bytes], said: str) -> None:
    content = file.read_bytes()
    file.write_bytes(change(content))
    assert said in refused(file)


def test_a_missing_file(tmp_path: Path) -> None:
    assert "error MKC608" in refused(tmp_path / "absent")
    assert "it is not a regular file" in refused(tmp_path)


def test_a_header_that_was_made_up(file: Path) -> None:
    content = file.read_bytes()
    offset = read_packed_header(file).arena_offset
    for text in (b"{}", b'{"regions": 3}', b'{"regions": [[1, 2]]}', b'{"regions": []}', b"[]"):
        prelude = PRELUDE.pack(
            packed.MAGIC, 1, len(text), offset, len(content), hashlib.sha256(text).digest()
        )
        file.write_bytes(prelude + text + content[len(prelude) + len(text) :])
        refused(file)


def test_changed_weights_are_found_on_request_and_named(file: Path) -> None:
    layout, content = make_layout(SPEC), bytearray(file.read_bytes())
    start = len(content) - layout.arena_bytes
    content[start + layout.region("down", 1).offset + 77] ^= 1
    content[-1] ^= 0x80
    file.write_bytes(content)
    open_packed(file, layout, SPEC)
    said = refused(file, verify=True)
    assert "small.mkcpack is damaged: down of layer 1, embedding" in said
    first, second = layout.regions[:2]
    assert first.offset + first.bytes < second.offset
    content = bytearray(file.read_bytes())
    content[start + second.offset - 1] = 1
    file.write_bytes(content)
    assert "embedding, what lies between regions" in refused(file, verify=True)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 4095), st.integers(0, 3), st.binary(max_size=3))
def test_any_changed_header_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, place: int, removed: int, new: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.mkcpack"
    if not path.exists():
        write(path)
    content = path.read_bytes()
    header = read_packed_header(path)
    path.write_bytes(content[:place] + new + content[place + removed :])
    said, found = "", header
    try:
        open_packed(path, make_layout(SPEC), SPEC)
        found = read_packed_header(path)
    except WeightsError as error:
        said = str(error)
    finally:
        path.write_bytes(content)
    assert str(path) in said or found == header


class Failing(RandomWeights):
    def layer(self, index: int) -> LayerWeights:
        if index == 1:
            raise KeyboardInterrupt
        return super().layer(index)


def test_an_unfinished_copy_is_never_seen(tmp_path: Path, file: Path) -> None:
    content = file.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_packed(file, make_layout(SPEC), SPEC, Failing(SPEC, 3), "")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == content


def test_a_mapped_copy_survives_its_replacement(file: Path) -> None:
    arena = open_packed(file, make_layout(SPEC), SPEC)
    before = arena.clone()
    write(file, seed=1)
    assert torch.equal(arena, before)
    assert not torch.equal(open_packed(file, make_layout(SPEC), SPEC), before)


def test_other_files_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for name in ("notes", "."):
        with pytest.raises(WeightsError, match="MKC60"):
            write(tmp_path / name)
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_full_disk_is_told_before_anything_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", fail)
    with pytest.raises(OSError, match="No space"):
        write_packed(tmp_path / "small", make_layout(SPEC), SPEC, Failing(SPEC, 0), "")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in the current folder, called `model`."""
    monkeypatch.chdir(tmp_path)
    write_single(Path("model"), SPEC, separate_tensors(SPEC))
    return Path("model")


def arena_of(tensors: dict[str, Tensor], layout: Layout) -> Tensor:
    return pack_weights(layout, SPEC, StateDictWeights(SPEC, tensors), "cpu")


def test_command(checkpoint: Path) -> None:
    layout = make_layout(SPEC)
    written = CliRunner().invoke(app, ["pack", "model"])
    assert written.output == "wrote build/model.mkcpack: model, 2.03 MB\n"
    arena = open_packed(Path("build/model.mkcpack"), layout, SPEC, verify=True)
    assert torch.equal(arena, arena_of(separate_tensors(SPEC), layout))
    for arguments in (["--verify"], ["--verify", "--checkpoint", "model"]):
        verified = CliRunner().invoke(app, ["pack", "model/config.json", *arguments])
        assert verified.output == "build/model.mkcpack: 12 regions match their checksums\n"
    assert run(["import", "model", "-o", "model.yaml"]) == 0
    shown = CliRunner().invoke(
        app, ["pack", "model.yaml", "--checkpoint", "model", "-o", "a", "--json"]
    )
    report = json.loads(shown.output)
    assert (report["packed"], report["written"], report["regions"]) == ("a", True, 12)
    assert report["checkpoint"] == read_packed_header(Path("a")).checkpoint


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny"], "MODEL is no Hugging Face folder"),
        (["tiny", "--checkpoint", "model"], "vocab_size: the checkpoint has 70, the plan 1003"),
        (["model", "--checkpoint", "absent"], "error MKC608: there is no folder absent"),
        (["model", "-o", "model/config.json"], "error MKC609: model/config.json exists"),
        (["model", "--verify", "-o", "model/config.json"], "error MKC609"),
        (["model", "--verify", "-o", "absent"], "error MKC608"),
        (["model", "-o", "model/config.json/file"], "error: model/config.json"),
    ],
)
def test_bad_input_ends_with_2(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(["pack", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_verify_tells_a_copy_of_another_checkpoint(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pack", "model", "-o", "a"]) == 0
    write_single(checkpoint, SPEC, separate_tensors(SPEC, seed=1))
    assert run(["pack", "model", "-o", "a", "--verify"]) == 2
    assert "a has the weights of another checkpoint" in capsys.readouterr().err
