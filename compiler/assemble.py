"""Pass `assemble`: CUDA text -> cubin by NVRTC, with the assembler's own report read back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkc.compiler.errors import ToolchainError

SOURCE_NAME = b"/kernel.cu"  # a relative name would put the current folder into the line table
REINSTALL = "`mkc doctor` shows what is missing; reinstalling mkc brings it"


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What the assembler says of one entry point: registers a thread, bytes of spills and stack."""

    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class Assembly:
    """A cubin, the PTX it came from, and the resources of each entry point."""

    cubin: bytes
    ptx: str
    compiler: str
    kernels: tuple[KernelResources, ...]

    @property
    def spills(self) -> bool:
        """Whether any entry point spills registers or uses local memory."""
        return any(k.spill_store_bytes or k.spill_load_bytes or k.stack_bytes for k in self.kernels)


def compile_options(arch: str) -> list[str]:
    """NVRTC's options for a kernel of this project."""
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--generate-line-info",
        "--extra-device-vectorization",
        "--ptxas-options=-v",
        f"--include-path={_cuda_include()}",
    ]


def assemble(cuda: str, arch: str) -> Assembly:
    """CUDA source -> Assembly for `arch` (such as sm_90a).

    Raises ToolchainError MKC401 with the compiler's log if it rejects the source, MKC402 if NVRTC
    is missing or of no use.
    """
    nvrtc, version = _load_nvrtc()
    (program,) = _call(nvrtc, nvrtc.nvrtcCreateProgram, cuda.encode(), SOURCE_NAME, 0, [], [])
    try:
        options = [option.encode() for option in compile_options(arch)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _read_text(nvrtc, "ProgramLog", program)
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            raise ToolchainError("MKC401", f"the rendered CUDA does not compile:\n{log}")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise ToolchainError("MKC402", f"NVRTC: {status.name}\n{log}")
        cubin = _read_bytes(nvrtc, "CUBIN", program)
        ptx = _read_text(nvrtc, "PTX", program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Assembly(cubin, ptx, version, read_resources(log))


def _load_nvrtc() -> tuple[Any, str]:
    """The bindings, and the version of the library behind them."""
    try:
        from cuda.bindings import nvrtc

        major, minor = _call(nvrtc, nvrtc.nvrtcVersion)
    except (ImportError, RuntimeError) as error:
        raise ToolchainError("MKC402", f"NVRTC cannot be loaded: {error}", REINSTALL) from error
    return nvrtc, f"nvrtc {major}.{minor}"


def _call(nvrtc: Any, function: Any, *arguments: Any) -> tuple[Any, ...]:
    """What a function of NVRTC returns behind its status."""
    status, *results = function(*arguments)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError("MKC402", f"NVRTC: {function.__name__}: {status.name}")
    return tuple(results)


def _read_bytes(nvrtc: Any, what: str, program: Any) -> bytes:
    """One of a program's outputs: `ProgramLog`, `CUBIN` or `PTX`."""
    (size,) = _call(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size"), program)
    buffer = bytearray(size)
    _call(nvrtc, getattr(nvrtc, f"nvrtcGet{what}"), program, buffer)
    return bytes(buffer)


def _read_text(nvrtc: Any, what: str, program: Any) -> str:
    return _read_bytes(nvrtc, what, program).decode("utf-8", "replace").rstrip("\0")


def read_resources(log: str) -> tuple[KernelResources, ...]:
    """The assembler's report in a log of NVRTC -> resources of each entry point.

    Raises ToolchainError MKC402 if an entry point is named without its figures.
    """
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\w+)'(?:(?!Compiling entry).)*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads(?:(?!Compiling entry).)*?Used (?P<registers>\d+) reg",
        re.DOTALL,
    )
    kernels = tuple(
        KernelResources(
            match["name"],
            int(match["registers"]),
            int(match["stores"]),
            int(match["loads"]),
            int(match["stack"]),
        )
        for match in pattern.finditer(log)
    )
    if len(kernels) != log.count("Compiling entry function"):
        raise ToolchainError("MKC402", f"the assembler's report is not understood:\n{log}")
    return kernels


def _cuda_include() -> str:
    """The folder of the CUDA headers that come with the nvidia-cuda-runtime wheel."""
    import importlib.metadata

    try:
        files = importlib.metadata.files("nvidia-cuda-runtime") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "cuda_bf16.h":
            return str(Path(str(file.locate())).parent)
    raise ToolchainError("MKC402", "nvidia-cuda-runtime has no cuda_bf16.h", REINSTALL)
