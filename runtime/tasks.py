"""The numbers of every kind of program entry, over the packed weights, on the CPU.

Each task is a generator over one entry: it yields a `Wait` for each group of packets it needs and
goes on once they are there. Operands are bf16 values held as float32, sums are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mkc.compiler.errors import CheckError
from mkc.compiler.place import PARTIAL_BUFFERS
from mkc.compiler.plan import Plan
from mkc.compiler.program import EntryKind
from mkc.compiler.rules import (
    AttentionUnit,
    attention_units,
    ffn_up_tasks,
    first_token,
    split_count,
)
from mkc.compiler.spec import ExpertFfn
from mkc.compiler.tile import FRAGMENT_EDGE, MERGE_DIMS, PAGE_TOKENS
from mkc.runtime.executor import IDLE_ROW, NOT_A_TOKEN
from mkc.runtime.numerics import (
    PackedWeights,
    Routing,
    choose_experts,
    products,
    rope_angles,
    round_bf16,
)
from mkc.runtime.packets import Floats, Index, PacketStore, Site, Wait
from mkc.runtime.packing import unpack_k_pages, unpack_v_pages
from mkc.runtime.state import StepState

NO_TOKEN = 2**31 - 1  # the candidate of an SM without a numeric logit

Task = Generator[Wait, None, None]
Fetch = Generator[Wait, None, npt.NDArray[Any]]


class ProgramError(CheckError):
    """An entry lacks what earlier entries of the same program should have left to it."""

    def __init__(self, site: Site, problem: str) -> None:
        super().__init__("MKC614", f"{site}: {problem}")


@dataclass(slots=True)
class SmMemory:
    """What one SM keeps from entry to entry within a step.

    staged: the layer whose input x [rows, hidden], unnormalised, and rstd [rows, 1] are here.
    residual: the owned tiles [rows, 16]. sums: what OUT and FFN_DOWN of a layer add to a tile.
    best: per row the highest logit so far and its id, None before HEAD.
    """

    staged: int = -1
    x: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    rstd: Floats = field(default_factory=lambda: np.zeros((0, 1), np.float32))
    residual: dict[int, Floats] = field(default_factory=dict)
    sums: dict[tuple[int, int], dict[EntryKind, Floats]] = field(default_factory=dict)
    best: tuple[Floats, npt.NDArray[np.int64]] | None = None


class StepTasks:
    """All tasks of one step. Pure functions of what is read are computed once for all SMs.

    epoch_base: the epoch of layer 0. rows: rows of the step, idle ones included. trace
    [layers, rows, hidden], if given, receives the residual after each layer. `emitted` is each
    row's token (see `Executor`) once the step is closed, None before.
    """

    def __init__(
        self,
        plan: Plan,
        weights: PackedWeights,
        state: StepState,
        stores: dict[str, PacketStore],
        epoch_base: int,
        rows: int,
        trace: Floats | None = None,
    ) -> None:
        self.plan, self.weights, self.state, self.stores = plan, weights, state, stores
        self.epoch_base, self.rows, self.trace = epoch_base, rows, trace
        self.positions = state.live_positions()[:rows]
        self.tokens = state.tokens.tolist()[:rows]
        self.live = np.array([r for r, p in enumerate(self.positions) if p is not None], np.int64)
        self.emitted: list[int] | None = None
        self._cos, self._sin = rope_angles(plan.spec, [p or 0 for p in self.positions])
        self._inputs: dict[int, tuple[Floats, Floats]] = {}
        self._routings: dict[int, Routing] = {}

    def program(self, sm: int) -> Iterator[Wait | None]:
        """Runs an SM's program: yields each wait, and None after each entry."""
        memory = SmMemory()
        for place, entry in enumerate(self.plan.programs[sm]):
            if entry.kind == EntryKind.END:
                return
            yield from _TASKS[entry.kind](self, memory, Site(sm, place, entry))
            yield None

    def _fetch(self, site: Site, name: str, index: Index, layer: int) -> Fetch:
        """Waits for items of a packet set and returns their values [*selected, width]."""
        store, epoch = self.stores[name], self.epoch_base + layer
        wait = Wait(site, store, index, epoch)
        if not wait.is_over():
            yield wait
        return store.read(site, index, epoch)

    def _write(self, site: Site, name: str, index: Index, layer: int, values: Any) -> None:
        self.stores[name].write(site, index, self.epoch_base + layer, values)

    def _publish(self, site: Site, layer: int, tile: int, residual: Floats) -> None:
        """Hands a tile of residuals [rows, 16] to `layer`, times the norm's weight, and squares."""
        start = tile * FRAGMENT_EDGE
        weight = self.weights.norms[layer, start : start + FRAGMENT_EDGE]
        parcels = np.empty((self.rows, FRAGMENT_EDGE + 1), np.float32)
        parcels[:, :FRAGMENT_EDGE] = round_bf16(residual * weight)
        parcels[:, FRAGMENT_EDGE] = np.square(residual).sum(axis=1)
        self._write(site, "layer_input", (layer, tile, slice(self.rows)), layer, parcels)

    def _embed(self, memory: SmMemory, site: Site) -> Task:
        tile = site.entry.tile
        residual = np.zeros((self.rows, FRAGMENT_EDGE), np.float32)
        for row in self.live.tolist():
            residual[row] = self.weights.embed(self.tokens[row], tile)
        memory.residual[tile] = residual
        self._publish(site, 0, tile, residual)
        yield from ()

    def _stage(self, memory: SmMemory, site: Site) -> Task:
        layer = site.entry.layer
        index = (layer, slice(None), slice(self.rows))
        parcels = yield from self._fetch(site, "layer_input", index, layer)
        if layer not in self._inputs:
            hidden = self.plan.spec.hidden_size
            values, squares = parcels[..., :FRAGMENT_EDGE], parcels[..., FRAGMENT_EDGE]
            x = np.ascontiguousarray(values.transpose(1, 0, 2)).reshape(self.rows, hidden)
            sums = np.ascontiguousarray(squares.T).sum(axis=1)  # one order for any number of rows
            mean_square = sums / np.float32(hidden)
            rstd = 1 / np.sqrt(mean_square + np.float32(self.plan.spec.norm.epsilon))
            self._inputs[layer] = (x, rstd[:, None])
        memory.staged = layer
        memory.x, memory.rstd = self._inputs[layer]

    def _staged(self, memory: SmMemory, site: Site) -> tuple[Floats, Floats]:
        if memory.staged != site.entry.layer:
            raise ProgramError(site, "the layer's input is not staged")
        return memory.x, memory.rstd

    def _router(self, memory: SmMemory, site: Site) -> Task:
        layer, tile = site.entry.layer, site.entry.tile
        x, rstd = self._staged(memory, site)
        logits = rstd * products(self.weights.tile("router", layer, tile), x)
        self._write(site, "router_logits", (layer, slice(self.rows), tile), layer, logits)
        yield from ()

    def _qkv(self, memory: SmMemory, site: Site) -> Task:
        layer, tile, tiling = site.entry.layer, site.entry.tile, self.plan.tiling
        x, rstd = self._staged(memory, site)
        y = rstd * products(self.weights.tile("qkv", layer, tile), x)
        rotated_tiles = (tiling.query_heads + tiling.kv_heads) * tiling.head_tiles
        if self.plan.spec.layers[layer].rope and tile < rotated_tiles:
            start = tile % tiling.head_tiles * (FRAGMENT_EDGE // 2)
            pairs = slice(start, start + FRAGMENT_EDGE // 2)
            cos, sin = self._cos[:, pairs], self._sin[:, pairs]
            even, odd = y[:, 0::2], y[:, 1::2]
            y = np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
            y = y.reshape(self.rows, FRAGMENT_EDGE)
        self._write(site, "qkv", (layer, tile, slice(self.rows)), layer, round_bf16(y))
        yield from ()

    def _attention(self, memory: SmMemory, site: Site) -> Task:
        layer, tiling = site.entry.layer, self.plan.tiling
        window = self.plan.spec.layers[layer].window
        sms = len(self.plan.programs)
        for unit in attention_units(
            site.entry.tile, sms, self.positions, window, tiling.kv_heads, tiling.max_splits
        ):
            yield from self._attend(site, unit, window)

    def _attend(self, site: Site, unit: AttentionUnit, window: int | None) -> Task:
        """One split: partials of the group's heads, and the new token's K and V to their page."""
        layer, row, tiling = site.entry.layer, unit.row, self.plan.tiling
        head_tiles, group = tiling.head_tiles, tiling.group
        position = self.positions[row]
        assert position is not None
        queries = yield from self._heads(site, unit.kv_head * group, group, row)
        keys, values = self._old_tokens(layer, unit, position, first_token(position, window))
        if unit.is_last:
            key = yield from self._heads(site, tiling.query_heads + unit.kv_head, 1, row)
            v_head = tiling.query_heads + tiling.kv_heads + unit.kv_head
            value = yield from self._heads(site, v_head, 1, row)
            new = torch.from_numpy(key[0]).bfloat16(), torch.from_numpy(value[0]).bfloat16()
            self.state.store_token(layer, row, unit.kv_head, position, *new)
            keys, values = np.concatenate([keys, key]), np.concatenate([values, value])
        head_dim = head_tiles * FRAGMENT_EDGE
        scores = (queries @ keys.T) * np.float32(1 / math.sqrt(head_dim))
        scores *= np.float32(math.log2(math.e))
        maximum = scores.max(axis=1, keepdims=True)
        shares = np.exp2(scores - maximum)
        partials = np.empty((group, tiling.merge_parts, MERGE_DIMS + 2), np.float32)
        partials[..., 0] = maximum
        partials[..., 1] = shares.sum(axis=1, keepdims=True)
        mixed = round_bf16(shares) @ values
        partials[..., 2:] = mixed.reshape(group, tiling.merge_parts, MERGE_DIMS)
        heads = slice(unit.kv_head * group, (unit.kv_head + 1) * group)
        index = (layer % PARTIAL_BUFFERS, row, heads, slice(None), unit.split)
        self._write(site, "partials", index, layer, partials)

    def _heads(self, site: Site, first: int, count: int, row: int) -> Fetch:
        """[count, head_dim]: heads of a row, counted over Q, K and V together."""
        layer, head_tiles = site.entry.layer, self.plan.tiling.head_tiles
        tiles = slice(first * head_tiles, (first + count) * head_tiles)
        parcels = yield from self._fetch(site, "qkv", (layer, tiles, row), layer)
        return parcels.reshape(count, head_tiles * FRAGMENT_EDGE)

    def _old_tokens(
        self, layer: int, unit: AttentionUnit, position: int, first: int
    ) -> tuple[Floats, Floats]:
        """K and V [tokens, head_dim] of the split's tokens `first` to `position` - 1."""
        head_dim = self.plan.spec.attention.head_dim
        keys, values = [np.zeros((0, head_dim), np.float32)], [np.zeros((0, head_dim), np.float32)]
        for page in range(unit.first_page, unit.end_page):
            base = page * PAGE_TOKENS
            tokens = slice(max(first - base, 0), min(position - base, PAGE_TOKENS))
            if tokens.start >= tokens.stop:
                continue
            k_page, v_page = self.state.pages(layer, unit.row, unit.kv_head, page)
            keys.append(unpack_k_pages(k_page, head_dim)[tokens].float().numpy())
            values.append(unpack_v_pages(v_page, head_dim)[tokens].float().numpy())
        return np.concatenate(keys), np.concatenate(values)

    def _merge(self, memory: SmMemory, site: Site) -> Task:
        layer, tiling = site.entry.layer, self.plan.tiling
        head, part = divmod(site.entry.tile, tiling.merge_parts)
        window = self.plan.spec.layers[layer].window
        merged = np.zeros((self.rows, MERGE_DIMS), np.float32)
        for row in self.live.tolist():
            splits = split_count(self.positions[row], window, tiling.max_splits)
            index = (layer % PARTIAL_BUFFERS, row, head, part, slice(splits))
            partials = yield from self._fetch(site, "partials", index, layer)
            scales = np.exp2(partials[:, 0] - partials[:, 0].max())[:, None]
            total = (partials[:, 1:] * scales).sum(axis=0)
            merged[row] = total[1:] / total[0]
        tiles = MERGE_DIMS // FRAGMENT_EDGE
        first = head * tiling.head_tiles + tiles * part
        parcels = round_bf16(merged).reshape(self.rows, tiles, FRAGMENT_EDGE).transpose(1, 0, 2)
        merged_index = (layer, slice(first, first + tiles), slice(self.rows))
        self._write(site, "merged", merged_index, layer, parcels)

    def _route(self, site: Site) -> Generator[Wait, None, Routing]:
        """The routing of a layer; a routed one first waits for the live rows' router logits."""
        layer = site.entry.layer
        ffn = self.plan.spec.layers[layer].ffn
        logits: npt.NDArray[Any] = np.full((len(self.live), 1), np.inf, np.float32)
        if isinstance(ffn, ExpertFfn):
            tiles = slice(-(-ffn.experts // FRAGMENT_EDGE))
            logits = yield from self._fetch(site, "router_logits", (layer, self.live, tiles), layer)
            logits = logits.reshape(len(self.live), tiles.stop * FRAGMENT_EDGE)[:, : ffn.experts]
        if layer not in self._routings:
            count = self.plan.tiling.layers[layer].slots
            self._routings[layer] = choose_experts(self.rows, self.live, logits, count)
        return self._routings[layer]

    def _ffn_up(self, memory: SmMemory, site: Site) -> Task:
        layer, sms = site.entry.layer, len(self.plan.programs)
        x, rstd = self._staged(memory, site)
        routing = yield from self._route(site)
        width_tiles = self.plan.tiling.layers[layer].width_tiles
        for place, tile in ffn_up_tasks(site.entry.tile, sms, len(routing.active), width_tiles):
            expert = routing.active[place]
            rows, slots, scores = routing.users[expert]
            y = rstd[rows] * products(self.weights.tile("gate_up", layer, tile, expert), x[rows])
            gate, up = y[:, :FRAGMENT_EDGE], y[:, FRAGMENT_EDGE:]
            hidden = round_bf16(gate / (1 + np.exp(-gate)) * up * scores)
            self._write(site, "hidden", (layer, rows, slots * width_tiles + tile), layer, hidden)

    def _out(self, memory: SmMemory, site: Site) -> Task:
        layer, tile = site.entry.layer, site.entry.tile
        index = (layer, slice(None), slice(self.rows))
        parcels = yield from self._fetch(site, "merged", index, layer)
        merged = np.ascontiguousarray(parcels.transpose(1, 0, 2)).reshape(self.rows, -1)
        self._add(memory, site, products(self.weights.tile("out", layer, tile), merged))

    def _ffn_down(self, memory: SmMemory, site: Site) -> Task:
        layer, tile = site.entry.layer, site.entry.tile
        routing = yield from self._route(site)
        width_tiles = self.plan.tiling.layers[layer].width_tiles
        total = np.zeros((self.rows, FRAGMENT_EDGE), np.float32)
        for expert in routing.active:
            rows, slots, _ = routing.users[expert]
            parcels = slots[:, None] * width_tiles + np.arange(width_tiles)
            index = (layer, rows[:, None], parcels)
            hidden = (yield from self._fetch(site, "hidden", index, layer)).reshape(len(rows), -1)
            total[rows] += products(self.weights.tile("down", layer, tile, expert), hidden)
        self._add(memory, site, total)

    def _add(self, memory: SmMemory, site: Site, values: Floats) -> None:
        """Keeps a sum [rows, 16] for the tile's RESIDUAL entry."""
        entry = site.entry
        sums = memory.sums.setdefault((entry.layer, entry.tile), {})
        if entry.kind in sums:
            raise ProgramError(site, "the tile's sum has this part already")
        sums[entry.kind] = values

    def _residual(self, memory: SmMemory, site: Site) -> Task:
        layer, tile = site.entry.layer, site.entry.tile
        sums = memory.sums.pop((layer, tile), {})
        if tile not in memory.residual or len(sums) != 2:
            raise ProgramError(site, "this SM does not hold the tile's residual and both its sums")
        residual = memory.residual[tile] + (sums[EntryKind.OUT] + sums[EntryKind.FFN_DOWN])
        memory.residual[tile] = residual
        if self.trace is not None:
            start = tile * FRAGMENT_EDGE
            self.trace[layer, : self.rows, start : start + FRAGMENT_EDGE] = residual
        self._publish(site, layer + 1, tile, residual)
        yield from ()

    def _head(self, memory: SmMemory, site: Site) -> Task:
        x, rstd = self._staged(memory, site)
        tiling, logits = self.plan.tiling, self.state.logits.numpy()
        best = np.full(self.rows, -np.inf, np.float32)
        ids = np.full(self.rows, NO_TOKEN, np.int64)
        for tile in range(site.entry.tile, tiling.vocab_tiles, len(self.plan.programs)):
            start = tile * FRAGMENT_EDGE
            stop = min(start + FRAGMENT_EDGE, tiling.vocab_size)
            y = products(self.weights.tile("head", -1, tile), x)[:, : stop - start]
            y = np.float32(self.plan.spec.logit_scale) * (rstd * y)
            logits[: self.rows, start:stop] = y
            value = np.where(np.isnan(y), -np.inf, y).max(axis=1)
            tokens = np.where(y == value[:, None], np.arange(start, stop), NO_TOKEN).min(axis=1)
            ids = np.where(value == best, np.minimum(tokens, ids), ids)
            ids = np.where(value > best, tokens, ids)
            best = np.maximum(value, best)
        memory.best = (best, ids)
        yield from ()

    def _sample(self, memory: SmMemory, site: Site) -> Task:
        layer = len(self.plan.spec.layers) + 1
        if memory.best is None:
            raise ProgramError(site, "this SM has not been over its tiles of the head")
        candidates = np.stack(memory.best, axis=1)
        self._write(site, "candidates", (slice(self.rows), site.sm), layer, candidates)
        if site.sm == 0:
            index = (slice(self.rows), slice(None))
            found = yield from self._fetch(site, "candidates", index, layer)
            self._close(found[..., 0], found[..., 1].astype(np.int64))

    def _close(self, values: npt.NDArray[Any], ids: npt.NDArray[np.int64]) -> None:
        """Next token, position and stop test of all live rows, from [rows, sms] candidates.

        A row without a numeric logit ends.
        """
        state = self.state
        stop_tokens = {NOT_A_TOKEN, *state.eos_tokens.tolist()}
        self.emitted = [IDLE_ROW] * self.rows
        for row in self.live.tolist():
            best = int(ids[row][values[row] == values[row].max()].min())
            token = NOT_A_TOKEN if best == NO_TOKEN else best
            self.emitted[row] = token
            state.tokens[row] = max(token, 0)
            state.positions[row] += 1
            if token in stop_tokens or state.positions[row] >= state.limits[row]:
                state.active[row] = 0


_TASKS: dict[EntryKind, Callable[[StepTasks, SmMemory, Site], Task]] = {
    EntryKind.EMBED: StepTasks._embed,
    EntryKind.STAGE: StepTasks._stage,
    EntryKind.ROUTER: StepTasks._router,
    EntryKind.QKV: StepTasks._qkv,
    EntryKind.ATTENTION: StepTasks._attention,
    EntryKind.FFN_UP: StepTasks._ffn_up,
    EntryKind.MERGE: StepTasks._merge,
    EntryKind.OUT: StepTasks._out,
    EntryKind.FFN_DOWN: StepTasks._ffn_down,
    EntryKind.RESIDUAL: StepTasks._residual,
    EntryKind.HEAD: StepTasks._head,
    EntryKind.SAMPLE: StepTasks._sample,
}
