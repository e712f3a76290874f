"""Prefill: stores the K and V of prompts, piece by piece, from the packed weights.

A pass takes a piece of each of several prompts, unpacks one layer at a time into scratch memory and
runs the reference's arithmetic on it (`reference.py`), so the model is written down once. K and V
go to the pages in the kernel's format. A piece sees what earlier ones stored, read back from the
pages, and its own K and V as they are rounded for the pages: where a prompt is cut makes no
difference beyond the order of sums. Router logits are float32.

The last token of a prompt is not prefilled: a decode step feeds it and gives the first token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mkc.compiler.plan import Plan
from mkc.compiler.rules import first_token
from mkc.compiler.tile import FRAGMENT_EDGE
from mkc.runtime.device import Piece
from mkc.runtime.packing import NORM_REGION, pair_tiles_view, region_bytes, unpack_region
from mkc.runtime.reference import Reference, StepState
from mkc.runtime.state import StepState as BatchState
from mkc.runtime.weights import LayerWeights


class PackedModelWeights:
    """`ModelWeights` of an arena; every call unpacks into new memory."""

    def __init__(self, plan: Plan, arena: Tensor) -> None:
        self.plan, self.arena = plan, arena
        self._embedding = "head" if plan.spec.tied_head else "embedding"
        self._norms = unpack_region(plan.layout, arena, NORM_REGION)[0]

    def embedding(self) -> Tensor:
        return self._unpack(self._embedding)[0]

    def head(self) -> Tensor:
        return self._unpack("head")[0]

    def final_norm(self) -> Tensor:
        return self._norms[-1]

    def layer(self, index: int) -> LayerWeights:
        attention = self.plan.spec.attention
        sizes = [attention.query_heads, attention.kv_heads, attention.kv_heads]
        qkv = self._unpack("qkv", index)[0]
        q, k, v = qkv.split([heads * attention.head_dim for heads in sizes])
        is_routed = self.plan.tiling.layers[index].routed
        return LayerWeights(
            norm=self._norms[index],
            q=q,
            k=k,
            v=v,
            o=self._unpack("out", index)[0],
            router=self._unpack("router", index)[0] if is_routed else None,
            gate_up=self._unpack("gate_up", index),
            down=self._unpack("down", index),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """bf16 [n, hidden]: embeddings of `tokens`, int64 [n], without unpacking the others."""
        region = self.plan.layout.region(self._embedding, -1)
        packed = region_bytes(self.arena, region)
        words = pair_tiles_view(packed, region.shape[0], region.shape[2])[0]
        tile, place = tokens // FRAGMENT_EDGE, tokens % FRAGMENT_EDGE
        rows = words[tile, place // 2, place % 2]
        return rows.reshape(len(tokens), -1).view(torch.bfloat16)

    def _unpack(self, name: str, layer: int = -1) -> Tensor:
        return unpack_region(self.plan.layout, self.arena, name, layer)


class _PagedKv:
    """The `TokenCache` of a piece: older tokens come from the pages, new ones go to them."""

    def __init__(self, state: BatchState, piece: Piece) -> None:
        self.length = piece.start
        self._state = state
        self._tables = [
            torch.tensor(table, dtype=torch.int64, device=state.device) for table in piece.tables
        ]
        self._new: tuple[Tensor, Tensor] | None = None

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores the piece's K and V of a layer in its pages, and keeps them for `last`."""
        group, _ = self._state.plan.layout.kv_group_of(layer)
        self._state.store_kv(layer, self._tables[group], self.length, keys, values)
        self._new = (keys, values)

    def last(
        self, layer: int, tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        """K and V of the last `tokens` tokens up to the piece's end, as `KvCache.last`."""
        assert self._new is not None
        window = self._state.plan.spec.layers[layer].window
        group, _ = self._state.plan.layout.kv_group_of(layer)
        old = min(self.length, tokens - self._new[0].shape[0])
        first = max(self.length - old, first_token(self.length, window))
        found = self._state.read_pages(layer, self._tables[group], first, self.length)
        keys, values = (
            torch.cat([then.to(device, dtype), now.to(device, dtype)])
            for then, now in zip(found, self._new, strict=True)
        )
        return keys, values


class Prefill:
    """Runs pieces of prompts over one arena and one state's pages, both on one device."""

    def __init__(
        self, plan: Plan, arena: Tensor, state: BatchState, dtype: torch.dtype | None = None
    ) -> None:
        """dtype: float32, the default on the CPU, or bfloat16, the default on a GPU. Raises
        ValueError as `Reference` does."""
        if dtype is None:
            dtype = torch.float32 if arena.device.type == "cpu" else torch.bfloat16
        self.plan, self.state = plan, state
        self.weights = PackedModelWeights(plan, arena)
        self._reference = Reference(
            plan.spec, self.weights, dtype, arena.device, round_kv=True, wide_router=True
        )

    @torch.no_grad()
    def run(self, pieces: Sequence[Piece]) -> None:
        """Stores K and V of all tokens of all pieces. Raises ValueError where pages are missing."""
        reference, spans, positions, start = self._reference, [], [], 0
        for piece in pieces:
            end = piece.start + len(piece.tokens)
            spans.append((_PagedKv(self.state, piece), slice(start, start + len(piece.tokens))))
            positions.append(torch.arange(piece.start, end, device=reference.device))
            start += len(piece.tokens)
        tokens = torch.tensor([token for piece in pieces for token in piece.tokens])
        x = self.weights.embed(tokens.to(reference.device)).to(reference.dtype)
        step = StepState(x, torch.cat(positions), spans)
        for index in range(len(self.plan.spec.layers)):
            reference.run_layer(index, self.weights.layer(index), step)
            step.layer_outputs[index] = step.layer_outputs[index][:0]  # as large as all the rest
