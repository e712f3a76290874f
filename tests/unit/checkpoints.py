"""Small checkpoints on disk, for tests: written by transformers, or tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM

from mkc.compiler.parse import load_model
from mkc.compiler.place import Layout, place
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import load_target
from mkc.compiler.tile import tile
from mkc.runtime.checkpoint import CONFIG, INDEX, SINGLE_FILE
from mkc.runtime.oracle import checkpoint, hf_config
from mkc.runtime.weights import RandomWeights, tensor_shapes


@cache
def small_spec(tied_head: bool = True) -> ModelSpec:
    """A dense layer and one of experts, 2 MB."""
    tiny = load_model("tiny")
    changes = {"layers": tiny.layers[:2], "vocab_size": 70, "tied_head": tied_head, "name": "small"}
    return tiny.model_copy(update=changes)


@cache
def layout_of(spec_json: str) -> Layout:
    spec, target = ModelSpec.model_validate_json(spec_json), load_target("h200")
    return place(spec, tile(spec, target, 8, 32), target)


def make_layout(spec: ModelSpec) -> Layout:
    """Addresses of a model on an h200."""
    return layout_of(spec.model_dump_json())


def transformers_model(
    spec: ModelSpec, dtype: torch.dtype = torch.bfloat16, logit_std: float = 0.5
) -> Any:
    """`Cohere2MoeForCausalLM` with random weights."""
    module: Any = Cohere2MoeForCausalLM
    config = Cohere2MoeConfig(**hf_config(spec))
    model = module._from_config(config, dtype=dtype).eval()
    model.load_state_dict(checkpoint(spec, RandomWeights(spec, 0, logit_std=logit_std)))
    return model


def separate_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """All tensors with a name for each matrix of each expert; no head where it is tied."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(shape).normal_(generator=generator).bfloat16()
        for name, shape in tensor_shapes(spec, ()).items()
    }


def write_single(folder: Path, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(hf_config(spec)))
    save_file(dict(tensors), folder / SINGLE_FILE)


def write_shards(
    folder: Path, spec: ModelSpec, tensors: Mapping[str, Tensor], shards: Sequence[Sequence[str]]
) -> list[str]:
    """config.json, a file with each of `shards`' tensors, and the index; returns the files' names.

    A name may be in several shards; the index then has the last one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(hf_config(spec)))
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        save_file({name: tensors[name] for name in names}, folder / file)
    write_index(folder, {n: file for file, names in zip(files, shards, strict=True) for n in names})
    return files


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
