"""Logical weights: the tensors of a model by their role, before any packing.

`ModelWeights` is what the reference computes with and what the packer reads. A layer is handed out
on demand, so that a model larger than the memory it passes through need never be whole in it.
Matrices are row-major [out, in]; every tensor is bfloat16, norms too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mkc.compiler.errors import MkcError
from mkc.compiler.spec import ExpertFfn, LayerSpec, ModelSpec

EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
FINAL_NORM_NAME = "model.norm.weight"

# Spreads of the random weights' intermediate values. Attention scores this wide make a softmax over
# n random keys weigh about n / exp(2.5 ** 2) of them, so that long contexts still matter.
LOGIT_STD = 2.0
SCORE_STD = 2.5
ROUTER_LOGIT_STD = 1.5
NORM_STD = 0.1


class WeightsError(MkcError):
    """Weights that do not fit the model description (MKC603), or whose files cannot be used
    (MKC608, MKC609)."""

    exit_status = 2


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer's tensors, all bfloat16.

    norm [hidden]; q [query_heads * head_dim, hidden]; k, v [kv_heads * head_dim, hidden];
    o [hidden, query_heads * head_dim]; router [experts, hidden], None for a dense layer;
    gate_up [experts, 2 * width, hidden], gate rows before up rows; down [experts, hidden, width].
    A dense layer is its own single expert: `experts` is 1 in the last two.
    """

    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    router: Tensor | None
    gate_up: Tensor
    down: Tensor


class ModelWeights(Protocol):
    """Access to the tensors of one model; calls may be costly and are not cached by the callee."""

    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        ...

    def head(self) -> Tensor:
        """[vocab, hidden]; the same object as `embedding()` where the two are tied."""
        ...

    def final_norm(self) -> Tensor:
        """[hidden]."""
        ...

    def layer(self, index: int) -> LayerWeights:
        """The tensors of layer `index`; IndexError outside the model's layers."""
        ...


def layer_name(index: int, role: str) -> str:
    """The checkpoint's name of a layer's tensor, as in `layer_name(3, "self_attn.q_proj")`."""
    return f"model.layers.{index}.{role}.weight"


def fused_expert_name(index: int, role: str) -> str:
    """The name of all experts' `gate_up_proj` or `down_proj` as one tensor."""
    return f"model.layers.{index}.mlp.experts.{role}"


def expert_name(index: int, expert: int, role: str) -> str:
    """The name of one expert's `gate_proj`, `up_proj` or `down_proj`."""
    return layer_name(index, f"mlp.experts.{expert}.{role}")


def attention_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """[out, in] of the four attention matrices, by role."""
    query = spec.attention.query_heads * spec.attention.head_dim
    kv = spec.attention.kv_heads * spec.attention.head_dim
    return {
        "self_attn.q_proj": (query, spec.hidden_size),
        "self_attn.k_proj": (kv, spec.hidden_size),
        "self_attn.v_proj": (kv, spec.hidden_size),
        "self_attn.o_proj": (spec.hidden_size, query),
    }


def tensor_shapes(spec: ModelSpec, present: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a checkpoint with the names `present` should have.

    Where `present` has one of a layer's fused expert tensors, it should have both; where it has
    none, each matrix of each expert. A head that is tied to the embedding may be absent.
    """
    vocabulary = (spec.vocab_size, spec.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING_NAME: vocabulary}
    for index in range(len(spec.layers)):
        shapes |= _layer_shapes(spec, index, present)
    shapes[FINAL_NORM_NAME] = (spec.hidden_size,)
    if not spec.tied_head or HEAD_NAME in present:
        shapes[HEAD_NAME] = vocabulary
    return shapes


def _layer_shapes(
    spec: ModelSpec, index: int, present: Collection[str]
) -> dict[str, tuple[int, ...]]:
    hidden, ffn = spec.hidden_size, spec.layers[index].ffn
    shapes: dict[str, tuple[int, ...]] = {layer_name(index, "input_layernorm"): (hidden,)}
    shapes |= {layer_name(index, role): size for role, size in attention_shapes(spec).items()}
    gated = {
        "gate_proj": (ffn.width, hidden),
        "up_proj": (ffn.width, hidden),
        "down_proj": (hidden, ffn.width),
    }
    if not isinstance(ffn, ExpertFfn):
        return shapes | {layer_name(index, f"mlp.{role}"): size for role, size in gated.items()}
    shapes[layer_name(index, "mlp.gate")] = (ffn.experts, hidden)
    fused = {
        fused_expert_name(index, "gate_up_proj"): (ffn.experts, 2 * ffn.width, hidden),
        fused_expert_name(index, "down_proj"): (ffn.experts, hidden, ffn.width),
    }
    if any(name in present for name in fused):
        return shapes | fused
    return shapes | {
        expert_name(index, expert, role): size
        for expert in range(ffn.experts)
        for role, size in gated.items()
    }


def _layer_spec(spec: ModelSpec, index: int) -> LayerSpec:
    if not 0 <= index < len(spec.layers):
        raise IndexError(f"layer {index} of a model with {len(spec.layers)} layers")
    return spec.layers[index]


class RandomWeights:
    """Weights drawn at random, each a function of (seed, tensor name) and the kind of device.

    Scales keep activations at order one through the depth of the model: branches that end in the
    residual stream are divided by sqrt(2 * layers), sums over experts by the root of their number;
    norms lie around one; scores, router logits and logits have the spreads named above. CPU and
    CUDA generators differ, so the same seed gives other values on the other. Only the embedding
    (and an untied head) is kept between calls.

    logit_std: spread of the logits, and of what a token's embedding is multiplied by. The smaller
    it is, the less a tied head answers a token with itself.
    """

    def __init__(
        self,
        spec: ModelSpec,
        seed: int,
        device: torch.device | str = "cpu",
        logit_std: float = LOGIT_STD,
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.logit_std = logit_std
        self.device = torch.device(device)
        self._kept: dict[str, Tensor] = {}

    def embedding(self) -> Tensor:
        return self._vocabulary(EMBEDDING_NAME)

    def head(self) -> Tensor:
        return self._vocabulary(EMBEDDING_NAME if self.spec.tied_head else HEAD_NAME)

    def final_norm(self) -> Tensor:
        return self._norm(FINAL_NORM_NAME)

    def layer(self, index: int) -> LayerWeights:
        ffn = _layer_spec(self.spec, index).ffn
        hidden = self.spec.hidden_size
        branch = 1 / math.sqrt(2 * len(self.spec.layers))
        gains = {"self_attn.q_proj": SCORE_STD, "self_attn.o_proj": branch}
        q, k, v, o = (
            self._matrix(layer_name(index, role), shape, gains.get(role, 1.0))
            for role, shape in attention_shapes(self.spec).items()
        )
        router, experts, summed = None, 1, 1
        if isinstance(ffn, ExpertFfn):
            experts, summed = ffn.experts, ffn.experts_per_token
            router_shape = (experts, hidden)
            router = self._matrix(layer_name(index, "mlp.gate"), router_shape, ROUTER_LOGIT_STD)
        gate_up_shape = (experts, 2 * ffn.width, hidden)
        down_shape = (experts, hidden, ffn.width)
        down_gain = branch / math.sqrt(summed)
        return LayerWeights(
            norm=self._norm(layer_name(index, "input_layernorm")),
            q=q,
            k=k,
            v=v,
            o=o,
            router=router,
            gate_up=self._matrix(fused_expert_name(index, "gate_up_proj"), gate_up_shape, 1.0),
            down=self._matrix(fused_expert_name(index, "down_proj"), down_shape, down_gain),
        )

    def _vocabulary(self, name: str) -> Tensor:
        if name not in self._kept:
            shape = (self.spec.vocab_size, self.spec.hidden_size)
            self._kept[name] = self._matrix(name, shape, self.logit_std)
        return self._kept[name]

    def _norm(self, name: str) -> Tensor:
        return self._normal(name, (self.spec.hidden_size,), 1.0, NORM_STD)

    def _matrix(self, name: str, shape: tuple[int, ...], gain: float) -> Tensor:
        """Normal values that give inputs of spread one outputs of spread `gain`."""
        return self._normal(name, shape, 0.0, gain / math.sqrt(shape[-1]))

    def _normal(self, name: str, shape: tuple[int, ...], mean: float, std: float) -> Tensor:
        # Drawn in float32: on the CPU torch draws bfloat16 normals from 8-bit uniforms.
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.empty(shape, dtype=torch.float32, device=self.device)
        return values.normal_(mean, std, generator=generator).to(torch.bfloat16)


class StateDictWeights:
    """Weights under the checkpoint's names, experts fused or one by one.

    `state_dict` may be any mapping, one that loads a tensor when asked for it too. All names are
    checked here, shapes and types when a tensor is read. Tensors stay on the device they lie on.

    Raises WeightsError, which names every tensor that is missing or left over (a bias, a shared
    expert: nothing is ignored), or the first one whose shape or type is wrong; also if a tied head
    differs from the embedding.
    """

    def __init__(self, spec: ModelSpec, state_dict: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self._tensors = state_dict
        self._shapes = tensor_shapes(spec, state_dict.keys())
        problems = [f"{name} is missing" for name in self._shapes if name not in state_dict]
        problems += [f"{name} {NO_PLACE}" for name in state_dict if name not in self._shapes]
        raise_for_tensors(problems)
        is_given = spec.tied_head and HEAD_NAME in state_dict
        if is_given and not torch.equal(self._read(HEAD_NAME), self._read(EMBEDDING_NAME)):
            raise WeightsError("MKC603", f"{HEAD_NAME} is tied but differs from {EMBEDDING_NAME}")

    def embedding(self) -> Tensor:
        return self._read(EMBEDDING_NAME)

    def head(self) -> Tensor:
        return self._read(EMBEDDING_NAME if self.spec.tied_head else HEAD_NAME)

    def final_norm(self) -> Tensor:
        return self._read(FINAL_NORM_NAME)

    def layer(self, index: int) -> LayerWeights:
        ffn = _layer_spec(self.spec, index).ffn
        q, k, v, o = (self._read(layer_name(index, x)) for x in attention_shapes(self.spec))
        router = None
        if isinstance(ffn, ExpertFfn):
            router = self._read(layer_name(index, "mlp.gate"))
            gate_up, down = self._experts(index, ffn)
        else:
            gate_up, down = (t[None] for t in self._gated(layer_name(index, "mlp.{}")))
        return LayerWeights(
            norm=self._read(layer_name(index, "input_layernorm")),
            q=q,
            k=k,
            v=v,
            o=o,
            router=router,
            gate_up=gate_up,
            down=down,
        )

    def _experts(self, index: int, ffn: ExpertFfn) -> tuple[Tensor, Tensor]:
        """gate_up [experts, 2 * width, hidden] and down [experts, hidden, width].

        Separate experts are copied to their places one by one, so that they are never held twice.
        """
        gate_up_name = fused_expert_name(index, "gate_up_proj")
        if gate_up_name in self._shapes:
            return self._read(gate_up_name), self._read(fused_expert_name(index, "down_proj"))
        first = self._gated(expert_name(index, 0, "{}"))
        gate_up, down = (part.new_empty(ffn.experts, *part.shape) for part in first)
        for expert in range(ffn.experts):
            gate_up[expert], down[expert] = self._gated(expert_name(index, expert, "{}"))
        return gate_up, down

    def _gated(self, pattern: str) -> tuple[Tensor, Tensor]:
        """gate_up [2 * width, hidden] and down [hidden, width] from three separate tensors."""
        gate, up, down = (
            self._read(pattern.format(role)) for role in ("gate_proj", "up_proj", "down_proj")
        )
        return torch.cat([gate, up]), down

    def _read(self, name: str) -> Tensor:
        tensor, shape = self._tensors[name], self._shapes[name]
        if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16:
            raise WeightsError(
                "MKC603",
                f"{name} is {tensor.dtype} {list(tensor.shape)}, "
                f"the model description needs torch.bfloat16 {list(shape)}",
            )
        return tensor


NO_PLACE = "has no place in the model description"


def raise_for_tensors(problems: Sequence[str]) -> None:
    """One WeightsError MKC603 with a line for each of `problems`, if there are any."""
    if not problems:
        return
    if len(problems) == 1:
        raise WeightsError("MKC603", problems[0])
    lines = "".join(f"\n  {problem}" for problem in problems)
    raise WeightsError("MKC603", f"{len(problems)} tensors do not fit the description:{lines}")
