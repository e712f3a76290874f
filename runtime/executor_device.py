"""`ExecutorDevice`: the scheduler's device over an executor, its state and a prefill.

Everything is queued on torch's current stream in the order it was asked for, so pages can be given
to another sequence while steps that still write them are under way. Only `save` and the results of
steps wait.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from mkc.runtime.device import Piece
from mkc.runtime.executor import Executor
from mkc.runtime.prefill import Prefill
from mkc.runtime.request import Sampling
from mkc.runtime.state import NO_BLOCK

Saved = list[Tensor]


class ExecutorDevice:
    """Owns the rows and pages of `executor.state` from now on.

    Which tokens end a request is the scheduler's to say, so the device itself stops at none.
    """

    def __init__(self, executor: Executor, prefill: Prefill) -> None:
        self.executor, self.state = executor, executor.state
        self.max_rows = self.state.max_rows
        self._prefill = prefill
        self.state.eos_tokens = self.state.eos_tokens[:0]
        self.state.active.zero_()

    def prefill(self, pieces: Seq[Piece]) -> None:
        self._prefill.run(pieces)

    def start_row(
        self,
        row: int,
        token: int,
        position: int,
        limit: int,
        tables: Seq[Seq[int]],
        sampling: Sampling,
    ) -> None:
        sampling.require_greedy()
        for table, blocks in zip(self.state.page_tables, tables, strict=True):
            table[row] = NO_BLOCK
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.state.start_row(row, token, position, limit)

    def set_block(self, row: int, group: int, page: int, block: int) -> None:
        self.state.page_tables[group][row, page] = block

    def move_row(self, source: int, target: int) -> None:
        state = self.state
        rows = (state.tokens, state.positions, state.limits, state.active, *state.page_tables)
        for values in rows:
            values[target] = values[source]

    def stop_row(self, row: int) -> None:
        self.state.active[row] = 0

    def copy_block(self, group: int, source: int, target: int) -> None:
        pool = self.state.pools[group]
        pool[target] = pool[source]

    def save(self, blocks: Seq[Seq[int]]) -> Saved:
        return [
            pool[torch.tensor(group, dtype=torch.int64, device=pool.device)].cpu()
            for pool, group in zip(self.state.pools, blocks, strict=True)
        ]

    def load(self, saved: Saved, blocks: Seq[Seq[int]]) -> None:
        for pool, group, values in zip(self.state.pools, blocks, saved, strict=True):
            places = torch.tensor(group, dtype=torch.int64, device=pool.device)
            pool[places] = values.to(pool.device)

    def step(self, rows: int) -> Callable[[], list[int]]:
        self.executor.step(rows)
        emitted = self.executor.emitted[:rows]
        if emitted.device.type == "cpu":
            tokens = emitted.tolist()
            self.executor.check_fault()
            return lambda: tokens
        fault = self.executor.fault
        copies = [
            torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            for values in (emitted, fault)
        ]
        for copy, values in zip(copies, (emitted, fault), strict=True):
            copy.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def result() -> list[int]:
            done.synchronize()
            if int(copies[1]) != 0:
                self.executor.check_fault()
            found: list[int] = copies[0].tolist()
            return found

        return result
