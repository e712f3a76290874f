"""The GPU backend: loads an artifact's cubin and runs decode steps on the current CUDA device.

Packets, programs and the step's parameters live here; weights (the arena) and rows (`StepState`)
are the caller's. Steps are queued on torch's current stream and nothing waits for them, so several
can be in flight; `check_fault` is where a wait that ran past its limit becomes an error.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from mkc.compiler.errors import MkcError
from mkc.compiler.place import CONSUMER_WARPS, HELPER_WARPS
from mkc.compiler.plan import Plan
from mkc.compiler.program import EntryKind, encode_programs
from mkc.compiler.trace import MeasuredEvent
from mkc.runtime.state import StepState

PACKET_BYTES = 16
LAST_EPOCH = 2**32 - 1
DEFAULT_POLL_LIMIT = 4_000_000  # polls of one wait; a poll takes 20 ns to 1 us
WAIT_REASONS = {
    1: "packets from another SM",
    2: "a chunk in the ring",
    3: "a free slot of the ring",
    4: "the routing of its layer",
    5: "the SM's other warps to leave a layer",
    6: "the SM's other warps' parts of a result",
}


class GpuError(MkcError):
    """No suitable GPU (MKC602)."""

    exit_status = 2


class DriverError(MkcError):
    """The CUDA driver refused a call (MKC606)."""


class KernelFault(MkcError):
    """A wait inside the kernel ran past its limit (MKC604): SM, warp, entry and what it waited for.

    The step's results are void; the GPU and the process stay usable.
    """

    exit_status = 1


class _KvGroup(ctypes.Structure):
    _fields_ = (
        ("pool", ctypes.c_uint64),
        ("table", ctypes.c_uint64),
        ("pitch", ctypes.c_uint64),
    )


def _step_type(groups: int) -> type[ctypes.Structure]:
    """The layout of `mkc::Step` in templates/step.cuh for a plan with that many KV groups."""

    class Step(ctypes.Structure):
        _fields_ = (
            ("arena", ctypes.c_uint64),
            ("packets", ctypes.c_uint64),
            ("programs", ctypes.c_uint64),
            ("kv", _KvGroup * groups),
            ("tokens", ctypes.c_uint64),
            ("positions", ctypes.c_uint64),
            ("active", ctypes.c_uint64),
            ("limits", ctypes.c_uint64),
            ("stop_tokens", ctypes.c_uint64),
            ("emitted", ctypes.c_uint64),
            ("logits", ctypes.c_uint64),
            ("layer_outputs", ctypes.c_uint64),
            ("fault", ctypes.c_uint64),
            ("epoch", ctypes.c_uint32),
            ("program_pitch", ctypes.c_int32),
            ("rows", ctypes.c_int32),
            ("stop_count", ctypes.c_int32),
            ("poll_limit", ctypes.c_uint32),
            ("free_run", ctypes.c_int32),
            ("trace", ctypes.c_uint64),
        )

    return Step


class Megakernel:
    """Runs a plan's steps on the GPU that torch has current.

    arena: packed weights, uint8 on that GPU; state: rows and KV pages on that GPU.
    emitted: int32 [max_rows], the last step's tokens: -1 for idle rows, -2 where no logit was a
    number. layer_outputs: float32 [layers, rows, hidden] of the last step if `trace`, else None.
    Raises GpuError if the GPU is not the target, DriverError if the cubin does not load.
    """

    def __init__(
        self,
        plan: Plan,
        cubin: bytes,
        arena: Tensor,
        state: StepState,
        trace: bool = False,
        poll_limit: int = DEFAULT_POLL_LIMIT,
        guard_bytes: int = 0,
    ) -> None:
        """guard_bytes: NaN bytes kept before and after the packets, for `check_guards`."""
        from cuda.bindings import driver

        self._driver = driver
        self.plan, self.arena, self.state = plan, arena, state
        self.poll_limit = poll_limit
        self.free_run = False
        self.step_count = 0
        device = arena.device
        self._check_device(device)
        table = encode_programs(plan.programs)
        self._programs = torch.from_numpy(table.view("int32")).to(device)
        self._guard = guard_bytes // PACKET_BYTES * PACKET_BYTES
        packet_bytes = plan.layout.packet_count * PACKET_BYTES
        self._packet_memory = torch.full(
            (packet_bytes + 2 * self._guard,), 0xFF, dtype=torch.uint8, device=device
        )
        self._packets = self._packet_memory[self._guard : self._guard + packet_bytes]
        self._packets.zero_()
        self.fault = torch.zeros(1, dtype=torch.int64, device=device)
        self.emitted = torch.full((state.max_rows,), -1, dtype=torch.int32, device=device)
        self._trace = trace
        warps = CONSUMER_WARPS + 1 + HELPER_WARPS
        shape = (plan.target.sms, warps, self._programs.shape[1], 4) if plan.options.trace else (0,)
        self._events = torch.zeros(shape, dtype=torch.int32, device=device)
        self.layer_outputs: Tensor | None = None
        self._module = self._call(driver.cuModuleLoadData(cubin))
        self._entry_points = {
            shared.rows: self._entry_point(shared.rows, shared.bytes)
            for shared in plan.layout.shared
        }
        self._step_type = _step_type(len(plan.layout.kv_groups))

    def step(self, rows: int | None = None) -> None:
        """Queues one step over rows 0 to `rows` - 1 (default: all) on torch's current stream."""
        rows = self.state.max_rows if rows is None else rows
        if not 1 <= rows <= self.state.max_rows:
            raise ValueError(f"{rows} rows are outside of 1 to {self.state.max_rows}")
        epochs = len(self.plan.spec.layers) + 2
        self.step_count += 1
        if (self.step_count + 1) * epochs > LAST_EPOCH:
            self._packets.zero_()
            self.step_count = 1
        if self._trace:
            shape = (len(self.plan.spec.layers), rows, self.plan.spec.hidden_size)
            self.layer_outputs = torch.full(shape, torch.nan, device=self.arena.device)
        parameters = self._parameters(rows, self.step_count * epochs)
        function, shared_bytes, threads = self._entry_points[self._capacity(rows)]
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        self._call(
            self._driver.cuLaunchCooperativeKernel(
                function,
                self.plan.target.sms, 1, 1,
                threads, 1, 1,
                shared_bytes,
                torch.cuda.current_stream(self.arena.device).cuda_stream,
                ctypes.addressof(pointers),
            )
        )  # fmt: skip

    def check_fault(self) -> None:
        """Waits for all queued steps. Raises KernelFault if a wait of any of them gave up."""
        word = int(self.fault.item()) & (2**64 - 1)
        if word == 0:
            return
        self.fault.zero_()
        kind, layer, tile = (
            EntryKind(word & 0xF).name.lower(),
            word >> 7 & 0xFF,
            word >> 15 & 0x1FFFF,
        )
        code, warp, sm = word >> 32 & 0xF, word >> 36 & 0xFF, word >> 44
        raise KernelFault(
            "MKC604",
            f"SM {sm}, warp {warp} waited too long for {WAIT_REASONS[code]} "
            f"in entry {kind} of layer {layer}, tile {tile}",
        )

    def check_guards(self) -> None:
        """Raises KernelFault if anything outside of the packets was written."""
        edges = (self._packet_memory[: self._guard], self._packet_memory[-self._guard :])
        if self._guard and not all(bool((edge == 0xFF).all()) for edge in edges):
            raise KernelFault("MKC605", "the kernel wrote outside of its packets")

    def router_logits(self, rows: int) -> Tensor:
        """Float32 [layers, rows, experts] of the last step, NaN for dense layers, from packets."""
        logits: Tensor = self._read_packets("router_logits", torch.float32)  # layer, row, tile, 24
        layers, max_rows, tiles, _ = logits.shape
        logits = logits.view(layers, max_rows, tiles, -1, 3)[..., :2]
        logits = logits.reshape(layers, max_rows, tiles * 16)[:, :rows].clone()
        for layer, tiling in enumerate(self.plan.tiling.layers):
            if not tiling.routed:
                logits[layer] = torch.nan
        experts = max((t.matrices for t in self.plan.tiling.layers if t.routed), default=0)
        return logits[..., :experts]

    def events(self) -> list[MeasuredEvent]:
        """When each warp did what in the last step; waits for it. Empty unless the plan traces."""
        words = self._events.cpu().numpy().view("uint32")
        if not words.size:
            return []
        # The clock is modulo 2 ** 32 ns: times count from a first one that may lie behind others.
        zero = int(words[0, 0, 0, 1])
        times = (words[..., 1:] - words.dtype.type(zero)).view("int32").tolist()
        return [
            MeasuredEvent(sm, warp, entry.kind, entry.layer, entry.tile, *times[sm][warp][index])
            for sm, program in enumerate(self.plan.programs)
            for warp in range(words.shape[1])
            for index, entry in enumerate(program)
        ]

    def _read_packets(self, name: str, dtype: torch.dtype) -> Tensor:
        """A packet set's payload [*shape, words] of the last step, as 32-bit `dtype`."""
        packets = self.plan.layout.packets(name)
        words = self._packets.view(torch.int32).view(-1, 4)[packets.base :][: packets.size]
        payload = words[:, :3].reshape(*packets.shape, packets.packets * 3).contiguous()
        return payload.view(dtype)

    def _parameters(self, rows: int, epoch: int) -> ctypes.Structure:
        state, groups = self.state, len(self.plan.layout.kv_groups)
        parameters: Any = self._step_type()
        parameters.arena = self.arena.data_ptr()
        parameters.packets = self._packets.data_ptr()
        parameters.programs = self._programs.data_ptr()
        for index in range(groups):
            table = state.page_tables[index]
            parameters.kv[index] = _KvGroup(
                state.pools[index].data_ptr(), table.data_ptr(), table.stride(0)
            )
        parameters.tokens = state.tokens.data_ptr()
        parameters.positions = state.positions.data_ptr()
        parameters.active = state.active.data_ptr()
        parameters.limits = state.limits.data_ptr()
        parameters.stop_tokens = state.eos_tokens.data_ptr()
        parameters.emitted = self.emitted.data_ptr()
        parameters.logits = state.logits.data_ptr()
        parameters.layer_outputs = (
            0 if self.layer_outputs is None else self.layer_outputs.data_ptr()
        )
        parameters.fault = self.fault.data_ptr()
        parameters.epoch = epoch
        parameters.program_pitch = self._programs.shape[1]
        parameters.rows = rows
        parameters.stop_count = state.eos_tokens.numel()
        parameters.poll_limit = self.poll_limit
        parameters.free_run = int(self.free_run)
        parameters.trace = self._events.data_ptr()
        return parameters  # type: ignore[no-any-return]

    def _capacity(self, rows: int) -> int:
        return min(capacity for capacity in self._entry_points if capacity >= rows)

    def _entry_point(self, rows: int, shared_bytes: int) -> tuple[Any, int, int]:
        driver = self._driver
        function = self._call(
            driver.cuModuleGetFunction(self._module, f"decode_step_{rows}".encode())
        )
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call(driver.cuFuncSetAttribute(function, limit, shared_bytes))
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        threads = self._call(driver.cuFuncGetAttribute(most, function))
        return function, shared_bytes, threads

    def _check_device(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise GpuError("MKC602", f"the weights are on {device}, not on a GPU")
        properties = torch.cuda.get_device_properties(device)
        target = self.plan.target
        if (properties.major, properties.minor) != (9, 0):
            raise GpuError(
                "MKC602",
                f"{properties.name} is sm_{properties.major}{properties.minor}, "
                f"the artifact is for {target.arch}",
            )
        if properties.multi_processor_count < target.sms:
            raise GpuError(
                "MKC602",
                f"{properties.name} has {properties.multi_processor_count} SMs, "
                f"the artifact needs {target.sms}",
            )

    def _call(self, result: tuple[Any, ...]) -> Any:
        """Unwraps a driver call's (status, value). Raises DriverError with the driver's words."""
        status = result[0]
        if status != self._driver.CUresult.CUDA_SUCCESS:
            text = self._driver.cuGetErrorString(status)[1]
            message = text.decode() if isinstance(text, bytes) else str(text)
            raise DriverError("MKC606", f"{status.name}: {message}")
        return result[1] if len(result) > 1 else None
