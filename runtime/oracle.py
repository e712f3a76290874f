"""What a sequence's logits should be: by transformers' own model, or by our reference.

An oracle runs whole sequences in float32 or bfloat16, told which experts to follow. transformers is
independent of this project and the better witness, but holds all weights at once, on the CPU; the
reference takes them layer by layer, so any size and device will do. Tests hold the two equal.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mkc.compiler.errors import MkcError
from mkc.compiler.parse_hf import parse_config
from mkc.compiler.spec import DenseFfn, ExpertFfn, ModelSpec
from mkc.runtime.reference import KvCache, Reference, StepState
from mkc.runtime.weights import (
    EMBEDDING_NAME,
    FINAL_NORM_NAME,
    HEAD_NAME,
    ModelWeights,
    attention_shapes,
    fused_expert_name,
    layer_name,
)


class OracleError(MkcError):
    """The oracle that was asked for is not installed or cannot express the model (MKC607)."""

    exit_status = 2


@dataclass(frozen=True, slots=True, eq=False)
class OracleRun:
    """One sequence of n tokens: logits [last, vocab] of its last tokens, router logits
    [layers, n, experts], NaN in dense layers, and the experts used [layers, n, k], ascending, -1 in
    dense layers."""

    logits: Tensor
    router_logits: Tensor
    experts: Tensor


class Oracle(Protocol):
    """Runs sequences of one model; `name` says in output what it is."""

    name: str

    def run(
        self,
        sequences: Sequence[Tensor],
        last: int,
        dtype: torch.dtype,
        experts: Sequence[Tensor] | None = None,
    ) -> list[OracleRun]:
        """Runs `sequences`, int64 [n] each, on their own, in float32 or bfloat16.

        experts: for each sequence [layers, n, k], followed instead of the oracle's own choice.
        Results lie on the oracle's device.
        """
        ...


class ReferenceOracle:
    """`Reference` over all sequences at once, one layer's weights at a time."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, device: torch.device | str = "cpu"
    ) -> None:
        self.name = "mkc's own reference"
        self.spec, self.weights, self.device = spec, weights, torch.device(device)

    @torch.no_grad()
    def run(
        self,
        sequences: Sequence[Tensor],
        last: int,
        dtype: torch.dtype,
        experts: Sequence[Tensor] | None = None,
    ) -> list[OracleRun]:
        reference = Reference(self.spec, self.weights, dtype, self.device)
        caches = [KvCache(self.spec, dtype, self.device) for _ in sequences]
        step = begin(reference, sequences, caches)
        forced = None if experts is None else torch.cat(list(experts), dim=1).to(self.device)
        for index in range(len(self.spec.layers)):
            ffn = self.spec.layers[index].ffn
            ids = None
            if forced is not None and isinstance(ffn, ExpertFfn):
                ids = forced[index, :, : ffn.experts_per_token]
            reference.run_layer(index, self.weights.layer(index), step, ids)
            step.layer_outputs[index] = step.layer_outputs[index][:0]  # as large as all the rest
        step.x = torch.cat([step.x[rows][-last:] for _, rows in step.spans])
        result = reference.finish(self.weights.final_norm(), self.weights.head(), step)
        return [
            OracleRun(
                logits=result.logits[place * last : (place + 1) * last],
                router_logits=result.router_logits[:, rows],
                experts=result.experts[:, rows],
            )
            for place, (_, rows) in enumerate(step.spans)
        ]


def begin(
    reference: Reference, sequences: Sequence[Tensor], caches: Sequence[KvCache]
) -> StepState:
    """The next tokens of several sequences, int64 [n] each, up to the first layer."""
    spans, positions, start = [], [], 0
    for tokens, cache in zip(sequences, caches, strict=True):
        n = tokens.shape[0]
        spans.append((cache, slice(start, start + n)))
        positions.append(torch.arange(cache.length, cache.length + n, device=reference.device))
        start += n
    embedding = reference.weights.embedding()
    x = embedding[torch.cat(list(sequences)).to(embedding.device)]
    return StepState(x.to(reference.device, reference.dtype), torch.cat(positions), spans)


def is_transformers_installed() -> bool:
    """Whether transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


class TransformersOracle:
    """`Cohere2MoeForCausalLM` of transformers in eager mode, on the CPU.

    Raises OracleError (MKC607) if transformers lacks the model or cannot express the description.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        config = hf_config(spec) | {
            "attn_implementation": "eager",
            "experts_implementation": "eager",
        }
        try:
            import transformers
            from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM
        except ImportError as error:
            raise OracleError(
                "MKC607",
                f"transformers with Cohere2MoeForCausalLM cannot be imported: {error}",
                "pip install 'transformers>=5.17', or choose --oracle reference",
            ) from error
        self.spec = spec
        self.name = f"transformers {transformers.__version__}"
        tensors = checkpoint(spec, weights)
        self._models: dict[torch.dtype, Any] = {}
        self._forced: Tensor | None = None
        self._routed: dict[int, tuple[Tensor, Tensor]] = {}
        for dtype in (torch.float32, torch.bfloat16):
            settings = Cohere2MoeConfig(**config)
            # Made in `dtype`: a later `.to(bfloat16)` would also round the rotary frequencies.
            module: Any = Cohere2MoeForCausalLM
            model = module._from_config(settings, dtype=dtype).eval()
            model.load_state_dict(tensors)
            for index, layer in enumerate(model.model.layers):
                if isinstance(spec.layers[index].ffn, ExpertFfn):
                    layer.mlp.gate.register_forward_hook(self._route(index))
            self._models[dtype] = model

    @torch.no_grad()
    def run(
        self,
        sequences: Sequence[Tensor],
        last: int,
        dtype: torch.dtype,
        experts: Sequence[Tensor] | None = None,
    ) -> list[OracleRun]:
        runs = []
        for place, tokens in enumerate(sequences):
            self._forced = None if experts is None else experts[place].cpu()
            logits = self._models[dtype](tokens.cpu()[None], use_cache=False).logits[0]
            runs.append(OracleRun(logits[-last:].float(), *self._routing(len(tokens))))
        return runs

    def _route(self, index: int) -> Any:
        """A hook on a layer's router: notes its logits, and replaces its choice where forced."""

        def choose(module: Any, arguments: Any, output: Any) -> Any:
            logits, scores, ids = output
            if self._forced is not None:
                ids = self._forced[index, :, : ids.shape[-1]].to(ids.dtype)
                scores = torch.sigmoid(logits.gather(-1, ids))
            self._routed[index] = (logits.float(), ids.sort(dim=-1).values)
            return logits, scores, ids

        return choose

    def _routing(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Router logits and experts of all layers; those of the dense ones are NaN and -1."""
        layers = range(len(self.spec.layers))
        if not self._routed:
            return torch.zeros(len(layers), tokens, 0), torch.zeros(len(layers), tokens, 0).long()
        logits, ids = next(iter(self._routed.values()))
        dense = (torch.full_like(logits, torch.nan), torch.full_like(ids, -1))
        pairs = [self._routed.get(index, dense) for index in layers]
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` that says what `spec` says; raises OracleError (MKC607) if none can."""
    sparse = next((x.ffn for x in spec.layers if isinstance(x.ffn, ExpertFfn)), None)
    dense = [x for x in spec.layers if isinstance(x.ffn, DenseFfn)]
    config: dict[str, Any] = {
        "model_type": "cohere2_moe",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.attention.query_heads,
        "num_key_value_heads": spec.attention.kv_heads,
        "head_dim": spec.attention.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm.epsilon,
        "rope_theta": spec.rope.theta,
        "logit_scale": spec.logit_scale,
        "tie_word_embeddings": spec.tied_head,
        "sliding_window": next((x.window for x in spec.layers if x.window is not None), 4096),
        "layer_types": [
            "full_attention" if x.window is None else "sliding_attention" for x in spec.layers
        ],
        "mlp_layer_types": [
            "dense" if isinstance(x.ffn, DenseFfn) else "sparse" for x in spec.layers
        ],
        "first_k_dense_replace": len(dense),
        "prefix_dense_intermediate_size": dense[0].ffn.width if dense else None,
        "prefix_dense_sliding_window_pattern": 1 if dense and dense[0].rope else 2,
        "intermediate_size": sparse.width if sparse else 16,
        "num_experts": sparse.experts if sparse else 1,
        "num_experts_per_tok": sparse.experts_per_token if sparse else 1,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "eos_token_id": list(spec.eos_tokens),
    }
    try:
        is_same = parse_config(json.dumps(config), "config.json", spec.name) == spec
    except MkcError as error:
        raise OracleError(
            "MKC607", f"transformers cannot express {spec.name}: {error.message}", HINT
        ) from error
    if not is_same:
        raise OracleError("MKC607", f"transformers cannot express the layers of {spec.name}", HINT)
    return config


HINT = "choose --oracle reference"


def checkpoint(spec: ModelSpec, weights: ModelWeights) -> dict[str, Tensor]:
    """All tensors under the names of transformers' module, experts fused, on the CPU."""
    tensors = {
        EMBEDDING_NAME: weights.embedding(),
        HEAD_NAME: weights.head(),
        FINAL_NORM_NAME: weights.final_norm(),
    }
    for index in range(len(spec.layers)):
        layer = weights.layer(index)
        tensors[layer_name(index, "input_layernorm")] = layer.norm
        matrices = (layer.q, layer.k, layer.v, layer.o)
        for role, matrix in zip(attention_shapes(spec), matrices, strict=True):
            tensors[layer_name(index, role)] = matrix
        if layer.router is None:
            gate, up = layer.gate_up[0].chunk(2)
            tensors[layer_name(index, "mlp.gate_proj")] = gate
            tensors[layer_name(index, "mlp.up_proj")] = up
            tensors[layer_name(index, "mlp.down_proj")] = layer.down[0]
        else:
            tensors[layer_name(index, "mlp.gate")] = layer.router
            tensors[fused_expert_name(index, "gate_up_proj")] = layer.gate_up
            tensors[fused_expert_name(index, "down_proj")] = layer.down
    return {name: tensor.cpu() for name, tensor in tensors.items()}
