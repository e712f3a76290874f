"""Pass `render`: plan -> one self-contained CUDA file.

The CUDA itself lives in `templates/*.cuh`, real headers that know nothing of Jinja. Two files are
rendered: `model.cuh`, which holds the plan's constants, and `kernel.cu`, which holds the entry
points. The headers are put into `kernel.cu` in the order of their includes, so that the artifact
can be read and compiled without anything else.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

import jinja2
import numpy as np

from mkc.compiler.plan import Plan

ROOT_HEADER = "decode_step.cuh"
MODEL_HEADER = "model.cuh"
_INCLUDE = re.compile(r'^#include "(?P<header>[\w.]+)"\n', re.MULTILINE)


def render(plan: Plan) -> str:
    """Plan -> text of kernel.cu."""
    return (
        _environment()
        .get_template("kernel.cu.j2")
        .render(
            spec=plan.spec,
            target=plan.target,
            layout=plan.layout,
            headers=expand_headers(ROOT_HEADER, render_model(plan)),
        )
    )


def render_model(plan: Plan) -> str:
    """Plan -> text of model.cuh, the constants that all headers are compiled against."""
    spec, tiling, layout = plan.spec, plan.tiling, plan.layout
    layers = []
    for index, (layer, tiles) in enumerate(zip(spec.layers, tiling.layers, strict=True)):
        group, place = layout.kv_group_of(index)
        layers.append(
            {
                "router": layout.region("router", index).offset if tiles.routed else 0,
                "qkv": layout.region("qkv", index).offset,
                "gate_up": layout.region("gate_up", index).offset,
                "out": layout.region("out", index).offset,
                "down": layout.region("down", index).offset,
                "width_tiles": tiles.width_tiles,
                "matrices": tiles.matrices,
                "slots": tiles.slots,
                "routed": str(tiles.routed),
                "rope": str(layer.rope),
                "window": "kNoWindow" if layer.window is None else layer.window,
                "kv_group": group,
                "kv_offset": place * tiling.kv_heads * 2 * tiling.page_bytes,
                "kv_block_bytes": layout.kv_groups[group].block_bytes,
            }
        )
    return (
        _environment()
        .get_template("model.cuh.j2")
        .render(
            spec=spec,
            target=plan.target,
            tiling=tiling,
            layout=layout,
            layers=layers,
            hidden_parcels=layout.packets("hidden").shape[-1],
            embedding_offset=layout.region("head" if spec.tied_head else "embedding").offset,
            options=plan.options,
            window_chunks=plan.options.window_bytes // tiling.chunk_bytes,
            inverse_frequencies=[
                _float32(value)
                for value in inverse_frequencies(spec.rope.theta, spec.attention.head_dim)
            ],
        )
    )


def inverse_frequencies(theta: float, head_dim: int) -> list[float]:
    """Radians per position of each of head_dim / 2 pairs, rounded as float32 arithmetic rounds."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    values = np.float32(1) / np.power(np.float32(theta), exponents, dtype=np.float32)
    return [float(value) for value in values]


def expand_headers(root: str, model: str) -> str:
    """The text of `root` and of all it includes, each header once, before its first use."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = model if name == MODEL_HEADER else header_text(name)
        includes = "".join(expand(match["header"]) for match in _INCLUDE.finditer(text))
        body = _INCLUDE.sub("", text).replace("#pragma once\n", "").strip()
        rule = f"// ==== {name} " + "=" * max(4, 96 - len(name))
        return f"{includes}\n{rule}\n{body}\n"

    return expand(root)


def header_text(name: str) -> str:
    """The text of one header of the templates folder."""
    return (resources.files("mkc.templates") / name).read_text("utf-8")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(header_text),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["camel"] = lambda name: "".join(p.capitalize() for p in name.split("_"))
    environment.filters["float32"] = _float32
    return environment


def _float32(value: float) -> str:
    """A float as C++ text that reads back as the same float32."""
    text = repr(float(np.float32(value)))
    return (text if "." in text or "e" in text else f"{text}.0") + "f"
