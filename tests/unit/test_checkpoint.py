"""Checkpoints load to the bits that their state dicts pack to; whatever is wrong is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoints import (
    make_layout,
    separate_tensors,
    small_spec,
    transformers_model,
    write_index,
    write_shards,
    write_single,
)
from mkc.compiler.errors import MkcError
from mkc.compiler.parse import load_model
from mkc.compiler.place import place
from mkc.compiler.plan import Options, Plan
from mkc.compiler.schedule import schedule
from mkc.compiler.target import load_target
from mkc.compiler.tile import tile
from mkc.runtime import reading
from mkc.runtime.checkpoint import CONFIG, INDEX, SINGLE_FILE, load_checkpoint, open_checkpoint
from mkc.runtime.interpreter import Interpreter
from mkc.runtime.packing import pack_weights
from mkc.runtime.shard import read_header
from mkc.runtime.state import StepState
from mkc.runtime.weights import StateDictWeights, WeightsError

DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint of three shards, without the head that is tied."""
    names = sorted(separate_tensors(small_spec()))
    shards = [names[i::3] for i in range(3)]
    write_shards(tmp_path / "good", small_spec(), separate_tensors(small_spec()), shards)
    return tmp_path / "good"


def refused(folder: Path) -> str:
    """What `open_checkpoint` says of a folder."""
    with pytest.raises(WeightsError) as error:
        open_checkpoint(folder, small_spec())
    assert error.value.exit_status == 2
    return str(error.value)


@pytest.mark.parametrize("is_separate", [True, False], ids=["separate", "fused"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_what_transformers_writes_loads_to_the_same_bits(
    tmp_path: Path, is_tied: bool, is_separate: bool
) -> None:
    spec = load_model("tiny").model_copy(update={"tied_head": is_tied})
    layout = make_layout(spec)
    model = transformers_model(spec)
    model.save_pretrained(tmp_path, max_shard_size="1MB", save_original_format=is_separate)
    names = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert (DOWN in names, "lm_head.weight" in names) == (is_separate, not is_tied)
    assert len(set(names.values())) > 5
    expected = pack_weights(layout, spec, StateDictWeights(spec, model.state_dict()), "cpu")
    heard: list[str] = []
    assert torch.equal(load_checkpoint(tmp_path, layout, spec, progress=heard.append), expected)
    assert heard[:2] == ["layer 0", "layer 1"]


def test_one_file_and_several_are_alike(tmp_path: Path, folder: Path) -> None:
    spec = small_spec()
    write_single(tmp_path / "single", spec, separate_tensors(spec))
    arenas = [load_checkpoint(f, make_layout(spec), spec) for f in (folder, tmp_path / "single")]
    assert torch.equal(*arenas)


def test_a_head_that_is_tied_may_be_there_if_it_is_the_embedding(tmp_path: Path) -> None:
    tensors = separate_tensors(small_spec())
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
    write_single(tmp_path, small_spec(), tensors)
    open_checkpoint(tmp_path, small_spec()).weights()
    tensors["lm_head.weight"][3, 5] += 1
    write_single(tmp_path, small_spec(), tensors)
    with pytest.raises(WeightsError, match="is tied but differs"):
        open_checkpoint(tmp_path, small_spec()).weights()


def test_every_tensor_that_does_not_fit_is_named_with_its_file(tmp_path: Path) -> None:
    tensors = separate_tensors(small_spec())
    missing = [name for name in tensors if ".experts.2." in name]
    for name in missing:
        del tensors[name]
    bias = "model.layers.0.self_attn.q_proj.bias"
    tensors[bias] = torch.zeros(3).bfloat16()
    tensors[DOWN] = tensors[DOWN].T.contiguous()
    tensors[EMBEDDING] = tensors[EMBEDDING].float()
    write_shards(tmp_path, small_spec(), tensors, [[EMBEDDING, bias], sorted(tensors)[1:]])
    names = [n for n in sorted(tensors) if n not in (EMBEDDING, bias)]
    first, second = write_shards(tmp_path, small_spec(), tensors, [[EMBEDDING, bias], names])
    said = refused(tmp_path).splitlines()
    assert said[0] == "error MKC603: 6 tensors do not fit the description:"
    assert sorted(said[1:]) == sorted(
        [
            *(f"  {name} is missing" for name in missing),
            f"  {bias} in {first} has no place in the model description",
            f"  {EMBEDDING} in {first} is F32 [70, 208], the model description needs BF16 "
            "[70, 208]",
            f"  {DOWN} in {second} is BF16 [48, 208], the model description needs BF16 [208, 48]",
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_refused_not_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: t.to(dtype) for name, t in separate_tensors(small_spec()).items()}
    write_single(tmp_path, small_spec(), tensors)
    assert f"error MKC603: {len(tensors)} tensors do not fit" in refused(tmp_path)


def test_a_layer_with_half_of_its_experts_fused(tmp_path: Path) -> None:
    tensors = separate_tensors(small_spec())
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(6, 208, 48).bfloat16()
    write_single(tmp_path, small_spec(), tensors)
    said = refused(tmp_path)
    assert "model.layers.1.mlp.experts.gate_up_proj is missing" in said
    assert f"{DOWN} in {SINGLE_FILE} has no place" in said


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rope_theta", 10000.0, r"rope_theta \(rope.theta\): the checkpoint has 10000.0, the plan"),
        ("vocab_size", 80, r"vocab_size: the checkpoint has 80, the plan 70"),
        ("eos_token_id", 3, r"eos_token_id \(eos_tokens\): .* has \(3,\), the plan \(7,\)"),
        ("num_experts_per_tok", 3, r"num_experts_per_tok \(layers\[1\]\.ffn\.experts_per_token\)"),
        ("tie_word_embeddings", False, r"tie_word_embeddings .*: the checkpoint has False"),
        ("rms_norm_eps", 1e-5, r"rms_norm_eps \(norm\.epsilon\): the checkpoint has 1e-05"),
    ],
)
def test_the_key_of_another_model_is_named(folder: Path, key: str, value: Any, said: str) -> None:
    config = json.loads((folder / CONFIG).read_text()) | {key: value}
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=f"config.json: error MKC603: (.|\n)*\n  {said}"):
        open_checkpoint(folder, small_spec())


def test_layers_that_differ_are_one_line(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config |= {"layer_types": ["full_attention"], "num_hidden_layers": 1, "mlp_layer_types": None}
    (folder / CONFIG).write_text(json.dumps(config))
    assert "num_hidden_layers (layers): the checkpoint has 1, the plan 2" in refused(folder)


def test_the_name_may_differ_and_what_is_not_supported_is_said(folder: Path) -> None:
    open_checkpoint(folder, small_spec().model_copy(update={"name": "other"}))
    config = json.loads((folder / CONFIG).read_text()) | {"torch_dtype": "float32"}
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(MkcError, match=r"config.json:\d+:\d+: error MKC141: .*float32"):
        open_checkpoint(folder, small_spec())


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def make_fifo(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


def place_in(file: Any) -> Callable[[Path], None]:
    """The index has one tensor in `file`."""

    def change(folder: Path) -> None:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        write_index(folder, weight_map | {DOWN: file})

    return change


def place_elsewhere(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(file for file in weight_map.values() if file != weight_map[DOWN])
    write_index(folder, weight_map | {DOWN: other})


def index_text(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / INDEX).write_text(text)

    return change


def only_pickles(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")


def both_kinds(folder: Path) -> None:
    (folder / SINGLE_FILE).write_bytes(b"")


def link_outside(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shutil.move(shard, folder.parent / "outside")
    shard.symlink_to("../outside")


def link_in_a_circle(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.symlink_to(shard.name)


def fifo_shard(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    os.mkfifo(shard)


def twice(folder: Path) -> None:
    tensors = separate_tensors(small_spec())
    write_shards(folder, small_spec(), tensors, [sorted(tensors), [DOWN]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remove(CONFIG), "config.json cannot be read: No such file"),
        (make_fifo, "config.json cannot be read: it is not a regular file"),
        (remove(INDEX), "good has neither model.safetensors nor model.safetensors.index.json"),
        (remove("model-00002-of-00003.safetensors"), "names: model-00002-of-00003.safetensors"),
        (place_in("../x.safetensors"), f"{DOWN} in '../x.safetensors', not the plain name"),
        (place_in("/etc/x.safetensors"), f"{DOWN} in '/etc/x.safetensors', not the plain name"),
        (place_in("..\\x.safetensors"), "x.safetensors', not the plain name"),
        (place_in("a\0.safetensors"), r"'a\u0000.safetensors', not the plain name"),
        (place_in("x.json"), "in x.json, not the plain name of a .safetensors file"),
        (place_in(".safetensors"), "index.json names: .safetensors"),
        (place_in("\ud800.safetensors"), r"'\ud800.safetensors', named in "),
        (place_in("x" * 300 + ".safetensors"), "index.json names: 'xxx"),
        (place_in("pytorch_model.bin"), "in pytorch_model.bin: pickle files can run any code"),
        (place_in(["a"]), f"places {DOWN} in something that is not a file name"),
        (place_elsewhere, f"{DOWN} lies in model-0000"),
        (index_text("{"), "index.json is no JSON object"),
        (index_text("[" * 100_000), "index.json is no JSON object: it is nested too deeply"),
        (index_text('{"weight_map": {}}'), "has no weight_map that names a tensor"),
        (index_text('{"weight_map": {"a": "b", "a": "b"}}'), "no JSON object: it has a twice"),
        (only_pickles, "good has its weights in pytorch_model.bin: pickle files can run any code"),
        (both_kinds, "good has both model.safetensors.index.json and model.safetensors"),
        (link_outside, "model-00002-of-00003.safetensors links to a file outside of its folder"),
        (link_in_a_circle, "model-00002-of-00003.safetensors"),
        (fifo_shard, "model-00002-of-00003.safetensors cannot be read: it is not a regular file"),
        (twice, f"{DOWN} lies twice in "),
        (shutil.rmtree, "there is no folder"),
    ],
)
def test_folders_that_cannot_be_trusted(
    folder: Path, change: Callable[[Path], None], said: str
) -> None:
    change(folder)
    assert said in refused(folder)


def test_the_folder_of_a_hub_cache_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = (
        tmp_path / "models--a--b" / "snapshots" / "0f",
        tmp_path / "models--a--b/blobs",
    )
    write_single(snapshot, small_spec(), separate_tensors(small_spec()))
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        shutil.move(file, blobs / f"of-{file.name}")
        file.symlink_to(f"../../blobs/of-{file.name}")
    load_checkpoint(snapshot, make_layout(small_spec()), small_spec())
    (snapshot / SINGLE_FILE).unlink()
    (snapshot / SINGLE_FILE).symlink_to(blobs.parent / "outside")
    (blobs.parent / "outside").write_bytes(b"")
    assert "links to a file outside of its folder" in refused(snapshot)


def safetensors_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with a header of any kind."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: Any = (2,), dtype: Any = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "no JSON object: Expecting value"),
        (b"\xff\xfe", "no JSON object: 'utf-8' codec"),
        (b"[]", "no JSON object: it is []"),
        (b'{"a": 1, "a": 2}', "it has a twice"),
        (b'{"a": ' + b"[" * 50_000, "it is nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "no JSON object: Exceeds the limit"),
        ({"__metadata__": 3}, "its __metadata__ is 3"),
        ({"a": 3}, "a has not just dtype, shape and data_offsets: 3"),
        ({"a b": entry(0, 4) | {"device": "cpu"}}, "'a b' has not just dtype"),
        ({"a": entry(0, 4, dtype=[])}, "a has dtype []"),
        ({"a": entry(0, 4, shape=[-2])}, "a has shape [-2]"),
        ({"a": entry(0, 4, shape=[True, 2])}, "a has shape [true, 2]"),
        ({"a": entry(0, 4, shape=[2.0])}, "a has shape [2.0]"),
        ({"a": entry(0, 4, shape=[1] * 9)}, "a has shape [1, 1"),
        ({"a": entry(0, 4, shape=[1 << 64])}, "a has shape [18446744073709551616]"),
        ({"a": entry(0, 4, shape=[3])}, "a is BF16 [3], which does not take the 4 bytes"),
        ({"a": entry(4, 0)}, "a has data_offsets [4, 0]"),
        ({"a": entry(-4, 0)}, "a has data_offsets [-4, 0]"),
        ({"a": entry(0, 4) | {"data_offsets": [0, 4, 8]}}, "a has data_offsets [0, 4, 8]"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, "b overlaps the tensor before it"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, "overlaps the tensor before it"),
        ({"a": entry(0, 4), "b": entry(5, 9)}, "b leaves a gap behind the tensor before it"),
        ({"a": entry(1, 5)}, "a leaves a gap behind"),
        ({"a": entry(0, 8, shape=[4])}, "it has bytes behind its last tensor"),
        ({"a": entry(0, 4), "b": entry(4, 20, [8])}, "it is cut short"),
    ],
)
def test_malformed_headers(tmp_path: Path, header: Any, said: str) -> None:
    path = safetensors_file(tmp_path / "a.safetensors", header, bytes(10))
    with pytest.raises(WeightsError) as error:
        read_header(path)
    assert "error MKC608" in str(error.value)
    assert str(path) in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize("size", [0, 7, 8, 9, 200, -1, -1000])
def test_files_that_are_cut_short(folder: Path, size: int) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    content = path.read_bytes()
    path.write_bytes(content[:size])
    said = refused(folder)
    assert "error MKC608" in said
    assert f"{path} is damaged: it" in said
    path.write_bytes((1 << 62).to_bytes(8, "little") + content[8:])
    assert "do not hold a header of 4611686018427387904 bytes" in refused(folder)


def test_a_file_that_changes_after_it_was_checked(folder: Path) -> None:
    weights = open_checkpoint(folder, small_spec()).weights()
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-40000])
    with pytest.raises(WeightsError, match=r"MKC608: .*safetensors is damaged: it ends before"):
        pack_weights(make_layout(small_spec()), small_spec(), weights, "cpu")


def test_large_tensors_are_read_in_slices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_checkpoint(folder, make_layout(small_spec()), small_spec())
    monkeypatch.setattr(reading, "SLICE_BYTES", 1000)
    found = load_checkpoint(folder, make_layout(small_spec()), small_spec())
    assert torch.equal(found, expected)


class Event:
    """A CUDA event whose copy ends when somebody waits for it."""

    def __init__(self, copies: list[Callable[[], object]]) -> None:
        self.copies = copies
        self.before: list[Callable[[], object]] = []

    def record(self, stream: object) -> None:
        self.before = [*self.copies]

    def synchronize(self) -> None:
        for copy in self.before:
            if copy in self.copies:
                copy()
                self.copies.remove(copy)


class Late(torch.Tensor):
    """A tensor on a GPU, as far as reading goes: copies to it happen later."""

    copies: list[Callable[[], object]]

    def __getitem__(self, index: Any) -> Any:
        part: Any = torch.Tensor.__getitem__(self, index)
        part.copies = self.copies
        return part

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        target = self.as_subclass(torch.Tensor)
        self.copies.append(lambda: target.copy_(source))
        return self


def test_pinned_buffers_are_not_filled_before_their_copy_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of things on a GPU, with copies that end as late as they may."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    content = torch.randint(256, (1000,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(content.numpy().tobytes())
    copies: list[Callable[[], object]] = []
    reader, events = reading.Reader(), [Event(copies), Event(copies)]
    buffers: Any = [(torch.zeros(64, dtype=torch.uint8), event) for event in events]
    reader._buffers = buffers
    for offset, size in ((0, 1000), (10, 64), (3, 65), (990, 10), (500, 1)):
        out: Any = torch.zeros(size, dtype=torch.uint8).as_subclass(Late)
        out.copies = copies
        reader.read(tmp_path / "file", offset, out)
        for event in events:
            event.synchronize()
        assert torch.equal(out.as_subclass(torch.Tensor), content[offset : offset + size])


def test_fingerprints_tell_weights_apart(tmp_path: Path, folder: Path) -> None:
    first = open_checkpoint(folder, small_spec()).fingerprint()
    shutil.copytree(folder, tmp_path / "copy")
    copy = open_checkpoint(tmp_path / "copy", small_spec())
    assert copy.fingerprint() == first
    tensors = separate_tensors(small_spec(), seed=1)
    names = sorted(tensors)
    write_shards(tmp_path / "copy", small_spec(), tensors, [names[i::3] for i in range(3)])
    assert copy.fingerprint() != first


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["BF16", "F32", "I4"]) | json_values,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 12), min_size=2, max_size=2) | json_values,
    }
)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=40) | json_values | st.dictionaries(st.text(), entries, max_size=4),
    st.binary(max_size=12),
)
def test_any_header_is_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, header: Any, data: bytes
) -> None:
    path = safetensors_file(tmp_path_factory.getbasetemp() / "any.safetensors", header, data)
    said = ""
    try:
        found = read_header(path)
    except WeightsError as error:
        said = str(error)
    assert str(path) in said or sum(tensor.bytes for tensor in found.values()) == len(data)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint of two shards, whose files are changed and put back."""
    folder = tmp_path_factory.mktemp("fuzzed")
    tensors = separate_tensors(small_spec())
    write_shards(folder, small_spec(), tensors, [[DOWN, EMBEDDING], sorted(tensors)])
    names = [name for name in sorted(tensors) if name not in (DOWN, EMBEDDING)]
    write_shards(folder, small_spec(), tensors, [[DOWN, EMBEDDING], names])
    return folder


@settings(max_examples=150, deadline=None)
@given(
    file=st.sampled_from([INDEX, "model-00001-of-00002.safetensors"]),
    place=st.integers(0, 1 << 12),
    cut=st.integers(0, 3),
    new=st.binary(max_size=3),
)
def test_any_changed_byte_is_read_or_refused_by_name(
    fuzzed: Path, file: str, place: int, cut: int, new: bytes
) -> None:
    path = fuzzed / file
    content = path.read_bytes()
    place %= min(len(content), 400)
    path.write_bytes(content[:place] + new + content[place + cut :])
    said = ""
    try:
        open_checkpoint(fuzzed, small_spec()).weights().layer(1)
    except WeightsError as error:
        said = str(error)
    finally:
        path.write_bytes(content)
    assert not said or file in said or ".weight" in said


weight_maps = st.dictionaries(
    st.sampled_from([DOWN, EMBEDDING]) | st.text(),
    st.sampled_from(["model-00001-of-00002.safetensors", "../a.safetensors", ".", "a/../b"])
    | st.text().map(lambda text: f"{text}.safetensors")
    | json_values,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(json_values | st.fixed_dictionaries({"weight_map": weight_maps | json_values}))
def test_any_index_is_refused_by_name(fuzzed: Path, index: Any) -> None:
    path = fuzzed / INDEX
    content = path.read_bytes()
    path.write_text(json.dumps(index))
    try:
        with pytest.raises(WeightsError) as error:
            open_checkpoint(fuzzed, small_spec())
    finally:
        path.write_bytes(content)
    assert INDEX in str(error.value) or ".weight" in str(error.value)


NEAR_TIE = 0.05


def test_the_interpreter_generates_what_transformers_does(tmp_path: Path) -> None:
    """Prompts are fed token by token, so that K and V are the interpreter's own."""
    spec, new_tokens = load_model("tiny").model_copy(update={"eos_tokens": (1002,)}), 6
    model = transformers_model(spec, dtype=torch.float32, logit_std=1.0)
    transformers_model(spec, logit_std=1.0).save_pretrained(tmp_path, max_shard_size="2MB")
    target, options = load_target("h200").model_copy(update={"sms": 5}), Options(max_batch=4)
    tiling = tile(spec, target, options.max_batch, options.chunk_fragments)
    layout = place(spec, tiling, target, options.ring_slots, options.window_bytes)
    plan = Plan(spec, target, options, tiling, layout, schedule(tiling, target))
    arena = load_checkpoint(tmp_path, layout, spec)

    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(1000, (n,), generator=generator) for n in (1, 4, 7, 9)]
    state = StepState(plan, 64, poison=True)
    interpreter = Interpreter(plan, arena, state, "one_sm_first")
    for row, prompt in enumerate(prompts):
        state.allocate_row(row, 64)
        state.start_row(row, int(prompt[0]), 0, 64)
    found: list[list[int]] = [[] for _ in prompts]
    for step in range(max(map(len, prompts)) + new_tokens - 1):
        interpreter.step()
        for row, prompt in enumerate(prompts):
            if step + 1 < len(prompt):
                state.tokens[row] = int(prompt[step + 1])
            else:
                found[row].append(int(interpreter.emitted[row]))

    compared = 0
    for prompt, tokens in zip(prompts, found, strict=True):
        result = model.generate(
            prompt[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        wanted = result.sequences[0, len(prompt) :].tolist()
        for token, expected, scores in zip(tokens, wanted, result.scores, strict=False):
            first, second = scores[0].topk(2).values.tolist()
            if first - second < NEAR_TIE:
                break
            assert token == expected
            compared += 1
    assert compared >= 12


MEASURE = """
import sys
from pathlib import Path
import torch
from checkpoints import make_layout
from mkc.compiler.spec import ModelSpec
from mkc.runtime.checkpoint import load_checkpoint
from mkc.runtime.packing import pack_weights

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

folder, spec = Path(sys.argv[1]), ModelSpec.model_validate_json(Path(sys.argv[2]).read_text())
layout = make_layout(spec)
load_checkpoint(folder, layout, spec)  # so that libraries are in memory
before = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
arena = load_checkpoint(folder, layout, spec)
print(status("VmHWM:") - before - layout.arena_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_beside_the_arena_is_less_than_a_shard(tmp_path: Path) -> None:
    tiny = load_model("tiny")
    expert = tiny.layers[1].ffn.model_copy(update={"width": 256, "experts": 16})
    layers = [tiny.layers[1].model_copy(update={"ffn": expert})] * 6
    spec = tiny.model_copy(update={"layers": tuple(layers), "hidden_size": 512})
    tensors = separate_tensors(spec)
    names = list(tensors)
    shards = [names[: len(names) // 3], names[len(names) // 3 : -9], names[-9:]]
    files = write_shards(tmp_path, spec, tensors, shards)
    total, shard = (
        sum(x.numel() * 2 for n, x in tensors.items() if n in chosen)
        for chosen in (tensors, shards[0])
    )
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(tmp_path / "spec.json")]
    # Freed memory goes back at once, so that what is measured is held.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    beside = int(done.stdout)
    assert len(files) == 3
    assert 0 < beside < shard < total / 2


def test_weights_are_not_read_before_all_headers_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(reading.Reader, "read", read)
    open_checkpoint(folder, small_spec())
    path = folder / "model-00003-of-00003.safetensors"
    save_file({"more": torch.zeros(3)}, path)
    with pytest.raises(WeightsError, match="more lies in model-00003"):
        load_checkpoint(folder, make_layout(small_spec()), small_spec())
