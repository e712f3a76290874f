"""Hugging Face checkpoints: a folder of safetensors files, checked whole and then read as needed.

`open_checkpoint` reads config.json, the index and the headers, and holds them against the model
description: every tensor that is missing, left over, of another shape or type is named in one
error, before any weight is read. `Checkpoint.weights` then reads tensors when asked for them, to
the CPU or through pinned memory to a GPU, so that packing holds one layer beside the arena.

Weights are bfloat16. Checkpoints in float32, float16 or fewer bits are refused, not converted: what
rounding does to a model is for its owner to see and judge. Pickle files are never opened, and
nothing outside of the folder is (but for the blobs that a hub cache's folder links to).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mkc.compiler.errors import Location
from mkc.compiler.parse_hf import parse_config
from mkc.compiler.place import Layout
from mkc.compiler.source import read_text
from mkc.compiler.spec import ModelSpec
from mkc.runtime.packing import pack_weights
from mkc.runtime.reading import Reader
from mkc.runtime.shard import (
    MAX_HEADER_BYTES,
    TensorEntry,
    open_file,
    parse_object,
    read_header,
    shown_name,
)
from mkc.runtime.weights import (
    NO_PLACE,
    StateDictWeights,
    WeightsError,
    raise_for_tensors,
    tensor_shapes,
)

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
DTYPE = "BF16"
SAMPLES = 64
SAMPLE_BYTES = 4096

CONFIG_KEYS = {
    "max_positions": "max_position_embeddings",
    "norm.epsilon": "rms_norm_eps",
    "attention.query_heads": "num_attention_heads",
    "attention.kv_heads": "num_key_value_heads",
    "attention.head_dim": "head_dim",
    "rope.theta": "rope_theta",
    "tied_head": "tie_word_embeddings",
    "eos_tokens": "eos_token_id",
    "layers": "num_hidden_layers",
    "window": "sliding_window or layer_types",
    "rope": "layer_types",
    "ffn.kind": "mlp_layer_types or first_k_dense_replace",
    "ffn.width": "intermediate_size or prefix_dense_intermediate_size",
    "ffn.experts": "num_experts",
    "ffn.experts_per_token": "num_experts_per_tok",
}
"""Keys of descriptions by their names in a config.json; those of layers without the layer."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose headers were found to fit `spec`; no weight has been read."""

    folder: Path
    spec: ModelSpec
    entries: Mapping[str, TensorEntry]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.bytes for entry in self.entries.values())

    def weights(self, device: torch.device | str = "cpu") -> StateDictWeights:
        """The model's weights on `device`, each read from its file whenever it is asked for.

        Raises WeightsError MKC603 if a head that is tied to the embedding differs from it.
        """
        return StateDictWeights(self.spec, _Tensors(self.entries, device))

    def fingerprint(self) -> str:
        """A hash over every file's size, header and samples of its weights, in under a second.

        Checkpoints of other weights have other fingerprints; a change of single values may escape.
        """
        digest = hashlib.sha256()
        for path in sorted({entry.file for entry in self.entries.values()}):
            starts = [entry.offset for entry in self.entries.values() if entry.file == path]
            with open_file(path) as stream:
                size = path.stat().st_size
                digest.update(f"{path.name!a} {size}\n".encode())
                digest.update(stream.read(min(starts)))
                for sample in range(SAMPLES):
                    stream.seek(min(starts) + (size - min(starts)) * sample // SAMPLES)
                    digest.update(stream.read(SAMPLE_BYTES))
        return digest.hexdigest()


def open_checkpoint(folder: Path, spec: ModelSpec) -> Checkpoint:
    """The checkpoint in `folder`, found to be one of `spec` by its config.json and headers.

    The model's name may differ. Raises WeightsError: MKC608 (a file is missing, damaged or not to
    be trusted), MKC603 (another model's; every tensor that does not fit is named, with its file);
    DescriptionError if config.json is not one of a supported model.
    """
    if not folder.is_dir():
        raise WeightsError("MKC608", f"there is no folder {folder}")
    _check_config(_inside(folder, CONFIG), spec)
    index = _read_index(folder)
    files = [SINGLE_FILE] if index is None else list(dict.fromkeys(index.values()))
    paths = _present(folder, files)
    entries: dict[str, TensorEntry] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            if name in entries:
                raise WeightsError(
                    "MKC608",
                    f"{shown_name(name)} lies twice in {folder}: in {entries[name].file.name} and "
                    f"in {path.name}",
                )
            entries[name] = entry
    problems = {} if index is None else _index_problems(index, entries)
    raise_for_tensors([*(_tensor_problems(spec, entries) | problems).values()])
    return Checkpoint(folder, spec, entries)


def load_checkpoint(
    folder: Path,
    layout: Layout,
    spec: ModelSpec,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> Tensor:
    """The packed arena of the checkpoint in `folder`, uint8 [layout.arena_bytes] on `device`.

    Beside the arena one layer is held, on `device`, and on a GPU two pinned buffers. Raises what
    `open_checkpoint` does.
    """
    weights = open_checkpoint(folder, spec).weights(device)
    return pack_weights(layout, spec, weights, device, progress)


class _Tensors(Mapping[str, Tensor]):
    """The tensors of checked bfloat16 entries; every look-up reads the file anew."""

    def __init__(self, entries: Mapping[str, TensorEntry], device: torch.device | str) -> None:
        self._entries, self._reader = entries, Reader(device)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        values = torch.empty(entry.bytes, dtype=torch.uint8, device=self._reader.device)
        self._reader.read(entry.file, entry.offset, values)
        return values.view(torch.bfloat16).view(entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _inside(folder: Path, name: str) -> Path:
    """The file of a plain name in `folder`. Raises WeightsError MKC608 if it leads out of it.

    The folders of a hub cache link to blobs beside them, so links may lead there.
    """
    if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise WeightsError("MKC608", f"{_named(folder, name)} is not a file name")
    allowed = [folder.resolve()]
    if folder.absolute().parent.name == "snapshots":
        allowed.append(folder.absolute().parent.parent.resolve() / "blobs")
    path = folder / name
    try:
        target = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise WeightsError("MKC608", f"{_named(folder, name)} cannot be followed") from error
    if not any(target.is_relative_to(place) for place in allowed):
        raise WeightsError("MKC608", f"{path} links to a file outside of its folder")
    return path


def _named(folder: Path, name: str) -> str:
    """A file's name as a checkpoint gives it, and which checkpoint."""
    return f"{shown_name(name)}, named in {folder},"


def _read_index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor; None for a checkpoint of one file."""
    has_index, has_single = ((folder / name).is_file() for name in (INDEX, SINGLE_FILE))
    if has_index and has_single:
        raise WeightsError(
            "MKC608", f"{folder} has both {INDEX} and {SINGLE_FILE}", "remove the one that is stale"
        )
    if not has_index:
        if not has_single:
            raise _nothing_to_read(folder)
        return None
    path = _inside(folder, INDEX)
    with open_file(path) as stream:
        text = stream.read(MAX_HEADER_BYTES + 1)
    if len(text) > MAX_HEADER_BYTES:
        raise WeightsError("MKC608", f"{path} has more than {MAX_HEADER_BYTES} bytes")
    weight_map = parse_object(text, str(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError("MKC608", f"{path} has no weight_map that names a tensor")
    for name, file in weight_map.items():
        where = f"{path} places {shown_name(name)} in"
        if not isinstance(file, str):
            raise WeightsError("MKC608", f"{where} something that is not a file name")
        if file.endswith(PICKLE_SUFFIXES):
            raise WeightsError("MKC608", f"{where} {shown_name(file)}: {PICKLES}", CONVERT)
        if not file.endswith(SUFFIX) or any(c in file for c in "/\\\0"):
            wanted = f"not the plain name of a {SUFFIX} file beside it"
            raise WeightsError("MKC608", f"{where} {shown_name(file)}, {wanted}")
    return weight_map


PICKLES = "pickle files can run any code and are never read"
CONVERT = "write the model as safetensors: save_pretrained of a current transformers does"


def _nothing_to_read(folder: Path) -> WeightsError:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        what = f"{folder} has its weights in {shown_name(pickles[0])}: {PICKLES}"
        return WeightsError("MKC608", what, CONVERT)
    return WeightsError("MKC608", f"{folder} has neither {SINGLE_FILE} nor {INDEX}")


def _present(folder: Path, files: list[str]) -> list[Path]:
    """The paths of all files; one error names each that is not there."""
    paths = [_inside(folder, file) for file in files]
    absent = [path.name for path in paths if not _exists(path)]
    if absent:
        names = ", ".join(map(shown_name, absent))
        raise WeightsError(
            "MKC608", f"{folder} lacks files that {INDEX} names: {names}", "finish the download"
        )
    return paths


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _index_problems(index: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """By tensor, what the index says otherwise than the files."""
    problems = {}
    for name, file in index.items():
        entry, shown = entries.get(name), shown_name(name)
        if entry is None:
            problems[name] = f"{shown} is missing: {INDEX} places it in {shown_name(file)}"
        elif entry.file.name != file:
            where = shown_name(entry.file.name)
            problems[name] = f"{shown} lies in {where}, {INDEX} places it in {shown_name(file)}"
    for name, entry in entries.items():
        if name not in index:
            problems[name] = f"{shown_name(name)} lies in {entry.file.name}, {INDEX} has it not"
    return problems


def _tensor_problems(spec: ModelSpec, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """By tensor, what does not fit the description."""
    shapes = tensor_shapes(spec, entries.keys())
    problems = {name: f"{name} is missing" for name in shapes if name not in entries}
    for name, entry in entries.items():
        where = f"{shown_name(name)} in {entry.file.name}"
        if name not in shapes:
            problems[name] = f"{where} {NO_PLACE}"
        elif entry.dtype != DTYPE or entry.shape != shapes[name]:
            problems[name] = (
                f"{where} is {shown_name(entry.dtype)} {list(entry.shape)}, "
                f"the model description needs {DTYPE} {list(shapes[name])}"
            )
    return problems


def _check_config(path: Path, spec: ModelSpec) -> None:
    """Raises WeightsError MKC603 that names each key of config.json which says another model."""
    open_file(path).close()
    found = parse_config(read_text(path), str(path), spec.name)
    lines: dict[str, str] = {}
    for key, (theirs, ours) in _differences(found.model_dump(), spec.model_dump(), "").items():
        config_key = CONFIG_KEYS.get(key.split("].", 1)[-1], key)
        name = key if key == config_key else f"{config_key} ({key})"
        line = f"\n  {name}: the checkpoint has {theirs}, the plan {ours}"
        lines.setdefault(config_key, line)
    if lines:
        raise WeightsError(
            "MKC603",
            f"the checkpoint is of another model than the plan:{''.join(lines.values())}",
            f"compile the model from this folder: mkc compile {path.parent}",
            Location(str(path)),
        )


def _differences(theirs: Any, ours: Any, path: str) -> dict[str, tuple[Any, Any]]:
    """Paths of leaves that differ; a list of another length is one difference."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in dict.fromkeys([*theirs, *ours]):
            inner = f"{path}.{key}" if path else key
            found |= _differences(theirs.get(key), ours.get(key), inner)
        return found
    is_list = isinstance(theirs, tuple) and isinstance(ours, tuple)
    if is_list and path == "layers":
        if len(theirs) != len(ours):
            return {path: (len(theirs), len(ours))}
        pairs = enumerate(zip(theirs, ours, strict=True))
        parts = [_differences(a, b, f"{path}[{i}]") for i, (a, b) in pairs]
        return {key: value for part in parts for key, value in part.items()}
    return {} if theirs == ours else {path: (theirs, ours)}
