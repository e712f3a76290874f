"""The pass `assemble` without its compiler: the assembler's report, and a compiler that is gone."""

from __future__ import annotations

import sys

import pytest

from mkc.compiler.assemble import Assembly, KernelResources, assemble, read_resources
from mkc.compiler.errors import ToolchainError

ENTRY = """\
ptxas info    : Compiling entry function '{name}' for 'sm_90a'
ptxas info    : Function properties for {name}
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 3 barriers, 520 bytes cmem[0]
ptxas info    : Compile time = 812.345 ms
"""
CLEAN = ENTRY.format(name="decode_step_1", stack=0, stores=0, loads=0, registers=168)
SPILLING = ENTRY.format(name="decode_step_2", stack=48, stores=64, loads=96, registers=255)
HEADER = "ptxas info    : 12 bytes gmem, 3664 bytes cmem[3]\n"


def test_the_report_is_read_entry_by_entry() -> None:
    kernels = read_resources(HEADER + CLEAN + SPILLING)
    assert kernels == (
        KernelResources("decode_step_1", 168, 0, 0, 0),
        KernelResources("decode_step_2", 255, 64, 96, 48),
    )
    assert Assembly(b"", "", "", kernels).spills
    assert not Assembly(b"", "", "", kernels[:1]).spills
    assert read_resources(HEADER) == ()


@pytest.mark.parametrize("missing", ["Used", "bytes stack frame", "spill loads"])
def test_a_report_without_a_figure_is_refused(missing: str) -> None:
    """Or the first entry point would take the second one's figures, or a spill would go unseen."""
    damaged = HEADER + CLEAN.replace(missing, "?") + SPILLING
    with pytest.raises(ToolchainError, match="report is not understood") as error:
        read_resources(damaged)
    assert error.value.code == "MKC402"


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ToolchainError, match="NVRTC cannot be loaded") as error:
        assemble("", "sm_90a")
    assert (error.value.code, error.value.exit_status) == ("MKC402", 70)
