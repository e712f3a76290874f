"""The definition of a model's numbers in plain torch.

In float32 the weights are upcast exactly from bfloat16 and nothing else is rounded: what every
other executor is compared with. In bfloat16 each operation rounds where the eager modules of
transformers round: how far two honest bfloat16 implementations may differ from float32.

A step takes new tokens of several sequences at once. Attention runs sequence by sequence over its
`KvCache`, everything else over all tokens. A step is `begin`, `run_layer` for each layer in order
and `finish`, so that a caller can run several references over one pass of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mkc.compiler.spec import DenseFfn, ExpertFfn, LayerSpec, ModelSpec
from mkc.runtime.weights import LayerWeights, ModelWeights

MAX_SCORES = 1 << 24  # queries times keys of a head that attention holds at once


class TokenCache(Protocol):
    """Where a step's attention stores and finds the K and V of one sequence, see `KvCache`."""

    @property
    def length(self) -> int: ...

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None: ...

    def last(
        self, layer: int, tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, Tensor]: ...


class KvCache:
    """K and V of one sequence: per layer [tokens, kv_heads, head_dim], oldest first.

    Tensors given to `from_tensors` are never copied or changed, so several caches can share them;
    appended tokens lie in tensors of their own, whose type may differ. A layer may hold only the
    last of the sequence's tokens, as many as its window needs.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        shape = (0, spec.attention.kv_heads, spec.attention.head_dim)
        empty = torch.empty(shape, dtype=dtype, device=device)
        self._given = [(empty, empty) for _ in spec.layers]
        self._appended: list[list[tuple[Tensor, Tensor]]] = [[] for _ in spec.layers]
        self._lengths = [0 for _ in spec.layers]

    @classmethod
    def from_tensors(
        cls,
        spec: ModelSpec,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        length: int | None = None,
    ) -> KvCache:
        """The cache of a sequence of `length` tokens, `keys[i]` and `values[i]` [tokens, kv_heads,
        head_dim] its last tokens in layer i. Without `length` every layer must hold all tokens.

        Raises ValueError where a shape is wrong or a layer lacks tokens that its window needs.
        """
        length = keys[0].shape[0] if length is None else length
        for index, (layer, k, v) in enumerate(zip(spec.layers, keys, values, strict=True)):
            needed = length if layer.window is None else min(length, layer.window - 1)
            heads = (spec.attention.kv_heads, spec.attention.head_dim)
            if k.shape != v.shape or k.shape[1:] != heads or not needed <= k.shape[0] <= length:
                raise ValueError(
                    f"layer {index}: K {list(k.shape)} and V {list(v.shape)} must be [{needed} to "
                    f"{length}, {heads[0]}, {heads[1]}] for a sequence of {length} tokens"
                )
        cache = cls(spec, keys[0].dtype, keys[0].device)
        cache._given = list(zip(keys, values, strict=True))
        cache._lengths = [length for _ in spec.layers]
        return cache

    @property
    def length(self) -> int:
        """Tokens of the sequence so far, those no longer held included."""
        return self._lengths[-1]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Adds the K and V [tokens, kv_heads, head_dim] of the sequence's next tokens."""
        self._appended[layer].append((keys, values))
        self._lengths[layer] += keys.shape[0]

    def last(
        self, layer: int, tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        """K and V of the last `tokens` tokens (fewer if fewer are held) as `dtype` on `device`."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for k, v in reversed([self._given[layer], *self._appended[layer]]):
            start = max(0, k.shape[0] - tokens)
            keys.insert(0, k[start:].to(device, dtype))
            values.insert(0, v[start:].to(device, dtype))
            tokens -= k.shape[0] - start
        return torch.cat(keys), torch.cat(values)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one step computed, for each of its tokens ("rows": one token each when decoding).

    logits [rows, vocab]; layer_outputs [layers, rows, hidden], the residual stream after each
    layer; router_logits [layers, rows, experts], NaN in dense layers; all float32.
    experts [layers, rows, experts_per_token]: the ids used, ascending; -1 in dense layers.
    """

    logits: Tensor
    layer_outputs: Tensor
    router_logits: Tensor
    experts: Tensor


@dataclass(slots=True, eq=False)
class StepState:
    """A step between two layers: x [rows, hidden], positions [rows], and the results so far."""

    x: Tensor
    positions: Tensor
    spans: Sequence[tuple[TokenCache, slice]]
    layer_outputs: list[Tensor] = field(default_factory=list)
    router_logits: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)


class Reference:
    """Runs a model in float32 or bfloat16, token by token or a whole prompt at once.

    With `round_kv` a float32 reference rounds new K and V to bfloat16 when it stores them, as a
    bfloat16 cache does; the token itself then also attends to its rounded K and V. A bfloat16
    reference stores bfloat16 in any case. With `wide_router` a bfloat16 reference computes router
    logits in float32, as the kernel does.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        round_kv: bool = False,
        wide_router: bool = False,
    ) -> None:
        """Raises ValueError for another dtype, and for float32 on a GPU while torch may use TF32:
        the caller has to `torch.set_float32_matmul_precision("highest")`."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the reference runs in float32 or bfloat16, not in {dtype}")
        self.device = torch.device(device)
        if (
            dtype == torch.float32
            and self.device.type == "cuda"
            and torch.get_float32_matmul_precision() != "highest"
        ):
            raise ValueError("a float32 reference needs float32_matmul_precision 'highest'")
        self.spec = spec
        self.weights = weights
        self.dtype = dtype
        self.kv_dtype = torch.bfloat16 if round_kv else dtype
        self.router_dtype = torch.float32 if wide_router else dtype
        head_dim = spec.attention.head_dim
        # On the CPU whatever the device: CUDA's pow has other last bits.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.inverse_frequencies = (1.0 / (spec.rope.theta**exponents)).to(self.device)

    def prefill(self, tokens: Tensor) -> tuple[Tensor, KvCache]:
        """Logits [n, vocab] (float32) and the cache of a fresh sequence of `tokens` [n] (int64)."""
        cache = KvCache(self.spec, self.kv_dtype, self.device)
        return self.extend(tokens, cache).logits, cache

    def extend(self, tokens: Tensor, cache: KvCache) -> StepResult:
        """Runs the next `tokens` [n] of one sequence and appends them to its cache."""
        return self._run(self._begin(tokens, [(cache, slice(0, tokens.shape[0]))]))

    def decode(self, tokens: Tensor, caches: Sequence[KvCache]) -> StepResult:
        """Runs one token of each sequence: `tokens` [rows] (int64), their caches of any length.

        Appends the tokens' K and V to the caches. Raises ValueError for a sequence that is full.
        """
        return self._run(self.begin(tokens, caches))

    @torch.no_grad()
    def begin(self, tokens: Tensor, caches: Sequence[KvCache]) -> StepState:
        """`decode` up to the first layer."""
        if len(caches) != tokens.shape[0]:
            raise ValueError(f"{tokens.shape[0]} tokens for {len(caches)} caches")
        return self._begin(tokens, [(c, slice(row, row + 1)) for row, c in enumerate(caches)])

    @torch.no_grad()
    def run_layer(
        self,
        index: int,
        layer: LayerWeights,
        state: StepState,
        experts: Tensor | None = None,
    ) -> None:
        """Replaces `state.x` by the output of layer `index`; layers must come in order.

        `experts` [rows, experts_per_token] (int64, any order) are followed instead of the layer's
        own choice: near a tie another executor may choose otherwise, and with that all later values
        differ. Following its choice compares the numbers; the recorded `router_logits` judge it.
        """
        if index != len(state.layer_outputs):
            raise ValueError(f"layer {index} after {len(state.layer_outputs)} layers")
        layer_spec = self.spec.layers[index]
        h = self._rms_norm(state.x, layer.norm)
        attention = self._attention(index, layer, h, state)
        ffn = self._ffn(layer_spec, layer, h, state, experts)
        state.x = state.x + attention + ffn
        state.layer_outputs.append(state.x.float())

    @torch.no_grad()
    def finish(self, final_norm: Tensor, head: Tensor, state: StepState) -> StepResult:
        """Final norm and head over the last layer's output."""
        if len(state.layer_outputs) != len(self.spec.layers):
            raise ValueError(f"{len(state.layer_outputs)} of {len(self.spec.layers)} layers ran")
        h = self._rms_norm(state.x, final_norm)
        logits = F.linear(h, self._use(head)) * self.spec.logit_scale
        return StepResult(
            logits=logits.float(),
            layer_outputs=torch.stack(state.layer_outputs),
            router_logits=torch.stack(state.router_logits),
            experts=torch.stack(state.experts),
        )

    @torch.no_grad()
    def _begin(self, tokens: Tensor, spans: list[tuple[KvCache, slice]]) -> StepState:
        positions = []
        for cache, rows in spans:
            end = cache.length + rows.stop - rows.start
            if end > self.spec.max_positions:
                raise ValueError(
                    f"a sequence of {end} tokens, the model has {self.spec.max_positions} positions"
                )
            positions.append(torch.arange(cache.length, end, device=self.device))
        embedding = self.weights.embedding()
        x = self._use(F.embedding(tokens.to(embedding.device), embedding))
        return StepState(x, torch.cat(positions), spans)

    def _run(self, state: StepState) -> StepResult:
        for index in range(len(self.spec.layers)):
            self.run_layer(index, self.weights.layer(index), state)
        return self.finish(self.weights.final_norm(), self.weights.head(), state)

    def _use(self, weight: Tensor) -> Tensor:
        """A weight as it enters an operation."""
        return weight.to(self.device, self.dtype)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Statistics in float32; the normalised value is rounded before it meets the weight."""
        wide = x.float()
        mean_square = wide.pow(2).mean(-1, keepdim=True)
        normal = wide * torch.rsqrt(mean_square + self.spec.norm.epsilon)
        return self._use(weight) * normal.to(self.dtype)

    def _attention(self, index: int, layer: LayerWeights, h: Tensor, state: StepState) -> Tensor:
        """[rows, hidden] of attention and its output projection; stores the new K and V."""
        spec, layer_spec = self.spec.attention, self.spec.layers[index]
        q = F.linear(h, self._use(layer.q)).view(-1, spec.query_heads, spec.head_dim)
        k = F.linear(h, self._use(layer.k)).view(-1, spec.kv_heads, spec.head_dim)
        v = F.linear(h, self._use(layer.v)).view(-1, spec.kv_heads, spec.head_dim)
        if layer_spec.rope:
            q, k = self._rope(q, state.positions), self._rope(k, state.positions)
        mixed = torch.empty_like(q)
        for cache, rows in state.spans:
            cache.append(index, k[rows].to(self.kv_dtype), v[rows].to(self.kv_dtype))
            past = self.spec.max_positions if layer_spec.window is None else layer_spec.window - 1
            seen = past + rows.stop - rows.start
            keys, values = cache.last(index, seen, self.dtype, self.device)
            mixed[rows] = self._attend(q[rows], keys, values, layer_spec.window)
        return F.linear(mixed.flatten(1), self._use(layer.o))

    def _rope(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotates the pairs (2i, 2i + 1) of `heads` [rows, heads, head_dim] by their position's
        angles. The angles are float32, their cosines and sines of the reference's own type."""
        angles = positions.float()[:, None] * self.inverse_frequencies
        cos = angles.cos().to(self.dtype).float()[:, None]
        sin = angles.sin().to(self.dtype).float()[:, None]
        even, odd = heads[..., 0::2].float(), heads[..., 1::2].float()
        rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
        return rotated.flatten(-2).to(self.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """[n, query_heads, head_dim]: the sequence's last n queries over the last m tokens' K and V
        [m, kv_heads, head_dim]. A query sees itself and what precedes it in the window."""
        n, m, spec = q.shape[0], k.shape[0], self.spec.attention
        if n > 1 and n * m > MAX_SCORES:
            half = n // 2
            first, last = slice(0, m - n + half), slice(0, m)
            if window is not None:
                first = slice(max(0, m - n - window + 1), first.stop)
                last = slice(max(0, m - n + half - window + 1), m)
            parts = [self._attend(q[:half], k[first], v[first], window)]
            parts.append(self._attend(q[half:], k[last], v[last], window))
            return torch.cat(parts)
        q = q.reshape(n, spec.kv_heads, spec.group, -1).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.matmul(q, k.permute(1, 2, 0)) * spec.head_dim**-0.5
        scores = scores.view(spec.kv_heads, spec.group, n, m)
        places = torch.arange(m, device=self.device)
        age = places[m - n :, None] - places
        hidden = (age < 0) if window is None else (age < 0) | (age >= window)
        scores = scores.masked_fill(hidden, -math.inf)
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(self.dtype)
        mixed = torch.matmul(shares.flatten(1, 2), v.transpose(0, 1))
        return mixed.view(spec.query_heads, n, spec.head_dim).transpose(0, 1)

    def _ffn(
        self,
        spec: LayerSpec,
        layer: LayerWeights,
        h: Tensor,
        state: StepState,
        forced: Tensor | None,
    ) -> Tensor:
        """[rows, hidden] of the dense network or of the chosen experts; records the routing."""
        rows, (experts, chosen) = h.shape[0], self._routing_width
        router_logits = torch.full((rows, experts), math.nan, device=self.device)
        ids = torch.full((rows, chosen), -1, device=self.device)
        if isinstance(spec.ffn, DenseFfn):
            out = self._gated(h, layer.gate_up[0], layer.down[0])
        else:
            assert layer.router is not None
            logits = F.linear(h.to(self.router_dtype), layer.router.to(h.device, self.router_dtype))
            router_logits[:, : spec.ffn.experts] = logits.float()
            if forced is None:
                layer_ids = choose_experts(logits, spec.ffn.experts_per_token)
            else:
                layer_ids = forced.to(self.device).sort(dim=-1).values
            ids[:, : spec.ffn.experts_per_token] = layer_ids
            out = self._experts(layer, h, layer_ids, torch.sigmoid(logits.gather(-1, layer_ids)))
        state.router_logits.append(router_logits)
        state.experts.append(ids)
        return out

    @property
    def _routing_width(self) -> tuple[int, int]:
        """The largest numbers of experts and of experts per token in any layer."""
        ffns = [s.ffn for s in self.spec.layers if isinstance(s.ffn, ExpertFfn)]
        return (
            max((f.experts for f in ffns), default=0),
            max((f.experts_per_token for f in ffns), default=0),
        )

    def _experts(self, layer: LayerWeights, h: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        """Sum over the chosen `ids` [rows, k], in ascending order, of score * expert(h)."""
        out = torch.zeros_like(h)
        for expert in torch.unique(ids).tolist():
            rows, slots = torch.where(ids == expert)
            y = self._gated(h[rows], layer.gate_up[expert], layer.down[expert])
            out[rows] += y * scores[rows, slots, None]
        return out

    def _gated(self, h: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """down(silu(gate(h)) * up(h))."""
        gate, up = F.linear(h, self._use(gate_up)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self._use(down))


def choose_experts(router_logits: Tensor, experts_per_token: int) -> Tensor:
    """Ids [rows, experts_per_token] of the largest of `router_logits` [rows, experts], ascending.

    Of equal logits the lower id wins, which `torch.topk` does not promise.
    """
    order = torch.sort(router_logits, dim=-1, descending=True, stable=True).indices
    return order[:, :experts_per_token].sort(dim=-1).values
