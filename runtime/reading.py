"""Bytes of files to tensors, on the CPU or through pinned memory on a GPU, as fast as files allow.

A large run of bytes is read by several threads at once: one alone copies from the page cache at a
fraction of what a disk or a GPU takes. On a GPU two pinned buffers take turns, so that one is
filled while the other is copied; they are all the host memory that reading takes.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from mkc.runtime.shard import damaged, open_file

BUFFER_BYTES = 64 << 20
SLICE_BYTES = 1 << 20
THREADS = 8


class Reader:
    """Reads to tensors on `device`. Not to be used by several threads at once."""

    def __init__(
        self, device: torch.device | str = "cpu", buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self.device = torch.device(device)
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0
        self._pool = ThreadPoolExecutor(THREADS)  # starts threads when they have work
        if self.device.type == "cuda":
            self._buffers = [
                (torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(2)
            ]

    def read(self, path: Path, offset: int, out: Tensor) -> None:
        """Fills `out`, contiguous uint8 [n] on the reader's device, from byte `offset` on.

        On a GPU the copy is queued on the current stream. Raises WeightsError MKC608 if the file
        cannot be read or ends too early.
        """
        with open_file(path) as stream:
            try:
                if self._buffers:
                    self._read_pinned(stream.fileno(), offset, out)
                else:
                    self._fill(stream.fileno(), offset, out)
            except EOFError as error:
                end = offset + out.numel()
                raise damaged(path, f"it ends before byte {end}") from error
            except OSError as error:
                raise damaged(path, f"reading it failed: {error.strerror}") from error

    def _read_pinned(self, descriptor: int, offset: int, out: Tensor) -> None:
        size = self._buffers[0][0].numel()
        stream = torch.cuda.current_stream(self.device)
        for start in range(0, out.numel(), size):
            part = out[start : start + size]
            buffer, is_copied = self._buffers[self._turn]
            self._turn = 1 - self._turn
            is_copied.synchronize()
            piece = buffer[: part.numel()]
            self._fill(descriptor, offset + start, piece)
            part.copy_(piece, non_blocking=True)
            is_copied.record(stream)

    def _fill(self, descriptor: int, offset: int, out: Tensor) -> None:
        """Reads to a uint8 tensor on the CPU. Raises EOFError at the file's end."""
        view = out.numpy().data

        def fill(start: int) -> None:
            _fill_slice(descriptor, offset + start, view[start : start + SLICE_BYTES])

        if len(view) <= SLICE_BYTES:
            fill(0)
        else:
            list(self._pool.map(fill, range(0, len(view), SLICE_BYTES)))


def _fill_slice(descriptor: int, offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise EOFError
        done += count
