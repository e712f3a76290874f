"""Pass `assemble`: CUDA text -> cubin by NVRTC, with the assembler's own report read back."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mkc.compiler.errors import ToolchainError


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
        "--extra-device-vectorization",
        "--ptxas-options=-v",
        f"--include-path={_cuda_include()}",
    ]


def assemble(cuda: str, arch: str) -> Assembly:
    """CUDA source -> Assembly for `arch` (such as sm_90a).

    Raises ToolchainError MKC401 if NVRTC is missing, MKC402 with the compiler's log if it fails.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError("MKC401", f"cuda-bindings cannot be imported: {error}") from error

    def check(result: tuple[object, ...]) -> tuple[object, ...]:
        status = result[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise ToolchainError("MKC402", f"NVRTC: {status}")
        return result[1:]

    try:
        major, minor = check(nvrtc.nvrtcVersion())
    except RuntimeError as error:
        raise ToolchainError("MKC401", f"NVRTC cannot be loaded: {error}") from error
    (program,) = check(nvrtc.nvrtcCreateProgram(cuda.encode(), b"kernel.cu", 0, [], []))
    options = [option.encode() for option in compile_options(arch)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError("MKC402", f"the rendered CUDA does not compile:\n{log}")
    cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    nvrtc.nvrtcDestroyProgram(program)
    return Assembly(cubin, ptx, f"nvrtc {major}.{minor}", _read_resources(log))


def _bytes(size: object, get: object, program: object) -> bytes:
    length = size(program)[1]  # type: ignore[operator]
    buffer = bytearray(length)
    view = (bytes(length),)
    buffer = view[0]
    get(program, buffer)  # type: ignore[operator]
    return bytes(buffer)


def _text(size: object, get: object, program: object) -> str:
    return _bytes(size, get, program).decode("utf-8", "replace").rstrip("\0")


def _read_resources(log: str) -> tuple[KernelResources, ...]:
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\w+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return tuple(
        KernelResources(
            match["name"],
            int(match["registers"]),
            int(match["stores"]),
            int(match["loads"]),
            int(match["stack"]),
        )
        for match in pattern.finditer(log)
    )


def _cuda_include() -> str:
    """The folder of the CUDA headers that come with the nvidia-cuda-runtime wheel."""
    import importlib.metadata

    files = importlib.metadata.files("nvidia-cuda-runtime") or []
    for file in files:
        if file.name == "cuda_bf16.h":
            return str(file.locate().parent)
    raise ToolchainError("MKC401", "nvidia-cuda-runtime has no cuda_bf16.h; reinstall it")
