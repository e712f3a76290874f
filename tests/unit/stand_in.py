"""A compilation of the tiny model with stand-ins for the passes that render and assemble."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mkc.compiler import pipeline
from mkc.compiler.assemble import Assembly, KernelResources
from mkc.compiler.parse import load_model
from mkc.compiler.plan import Options, Plan
from mkc.compiler.target import load_target

ASSEMBLY = Assembly(
    cubin=b"\x7fELF stand-in",
    ptx="// stand-in PTX\n",
    compiler="nvrtc 13.0",
    kernels=tuple(KernelResources(f"decode_step_{rows}", 128, 0, 0, 0) for rows in (1, 2, 4, 8)),
)
SPILLING = replace(ASSEMBLY, kernels=(KernelResources("decode_step_1", 168, 64, 96, 48),))


def stand_in(monkeypatch: pytest.MonkeyPatch, assembly: Assembly = ASSEMBLY) -> list[str]:
    """Replaces the two passes; the list returned names each model that is compiled from now on."""
    compiled: list[str] = []

    def render(plan: Plan) -> str:
        compiled.append(plan.spec.name)
        return f"// stand-in CUDA of {plan.spec.name}\n"

    monkeypatch.setattr(pipeline, "render", render)
    monkeypatch.setattr(pipeline, "assemble", lambda cuda, arch: assembly)
    return compiled


def compile_tiny(monkeypatch: pytest.MonkeyPatch, **options: Any) -> pipeline.Compiled:
    """The tiny model for an H200."""
    stand_in(monkeypatch)
    return pipeline.compile_model(load_model("tiny"), load_target("h200"), Options(**options))
