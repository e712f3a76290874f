"""The CUDA before NVRTC: every header by itself, and whole kernels as the assembler sees them."""

from __future__ import annotations

import os
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest

from mkc.compiler.assemble import assemble
from mkc.compiler.errors import ToolchainError
from mkc.compiler.parse import load_model
from mkc.compiler.pipeline import Compiled, compile_model
from mkc.compiler.place import place
from mkc.compiler.plan import Options, Plan
from mkc.compiler.render import MODEL_HEADER, expand_headers, header_text, render_model
from mkc.compiler.schedule import schedule
from mkc.compiler.target import load_target
from mkc.compiler.tile import tile

pytestmark = pytest.mark.nvrtc

TARGET = load_target("h200")
OPTIONS = Options()
HEADERS = sorted(
    file.name for file in files("mkc.templates").iterdir() if file.name.endswith(".cuh")
)


@cache
def tiny_model_header() -> str:
    """model.cuh of the tiny model."""
    spec = load_model("tiny")
    tiling = tile(spec, TARGET, OPTIONS.max_batch, OPTIONS.chunk_fragments)
    layout = place(spec, tiling, TARGET, OPTIONS.ring_slots, OPTIONS.window_bytes)
    return render_model(Plan(spec, TARGET, OPTIONS, tiling, layout, schedule(tiling, TARGET)))


@cache
def compiled(model: str) -> Compiled:
    return compile_model(load_model(model), TARGET, OPTIONS)


@pytest.mark.parametrize("header", [MODEL_HEADER, *HEADERS])
def test_every_header_compiles_alone(header: str) -> None:
    """A source that includes this header only: so it brings all that it uses."""
    assembly = assemble(expand_headers(header, tiny_model_header()), TARGET.arch)
    assert assembly.kernels == ()


def test_a_header_without_its_includes_does_not_compile() -> None:
    """What the test above would say of a header that relies on others having been there before."""
    alone = header_text("ring.cuh").replace("#include", "// ")
    with pytest.raises(ToolchainError, match="is undefined") as error:
        assemble(alone, TARGET.arch)
    assert (error.value.code, error.value.exit_status) == ("MKC401", 70)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ToolchainError, match="invalid value for --gpu-architecture") as error:
        assemble("", "sm_1")
    assert error.value.code == "MKC402"


@pytest.mark.parametrize("model", ["tiny", "north_mini_code"])
def test_the_kernel_keeps_all_in_registers(model: str) -> None:
    """One kernel for each entry point, no spill and no stack."""
    result = compiled(model)
    entry_points = {f"decode_step_{shared.rows}" for shared in result.plan.layout.shared}
    assert {kernel.name for kernel in result.assembly.kernels} == entry_points
    for kernel in result.assembly.kernels:
        assert kernel.registers > 0
        assert (kernel.spill_store_bytes, kernel.spill_load_bytes) == (0, 0), kernel
        assert kernel.stack_bytes == 0, kernel
    assert not result.assembly.spills
    assert result.assembly.cubin.startswith(b"\x7fELF")


def test_a_kernel_that_spills_is_seen() -> None:
    """A thousand values alive at once in 128 registers."""
    source = """
        extern "C" __global__ void __launch_bounds__(512, 1) spilling(float* x, int n) {
          float v[256];
          #pragma unroll
          for (int i = 0; i < 256; i++) v[i] = x[i * 512 + threadIdx.x];
          for (int k = 0; k < n; k++)
          #pragma unroll
            for (int i = 0; i < 256; i++) v[i] = v[i] * v[(i + 77) % 256] + x[k];
          #pragma unroll
          for (int i = 0; i < 256; i++) x[i * 512 + threadIdx.x] = v[i];
        }
    """
    assembly = assemble(source, TARGET.arch)
    assert [kernel.name for kernel in assembly.kernels] == ["spilling"]
    assert assembly.spills
    assert assembly.kernels[0].spill_store_bytes > 0


def test_bytes_do_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = expand_headers("ptx.cuh", tiny_model_header())
    source = header + (
        'extern "C" __global__ void packs(uint32_t* x, float y) { *x = mkc::pack_bf16(y, y); }\n'
    )
    here = assemble(source, TARGET.arch)
    folder = os.getcwd().encode()
    monkeypatch.chdir(tmp_path)
    there = assemble(source, TARGET.arch)
    assert (there.ptx, there.cubin) == (here.ptx, here.cubin)
    assert folder not in here.cubin
