"""Random weights are functions of seed and name; checkpoints are read in both forms, completely."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mkc.compiler.spec import (
    AttentionSpec,
    DenseFfn,
    ExpertFfn,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from mkc.runtime.reference import KvCache, Reference
from mkc.runtime.weights import LayerWeights, RandomWeights, StateDictWeights, WeightsError

Form = Callable[[ModelSpec, RandomWeights], dict[str, Tensor]]

HIDDEN = 48
WIDTH = 20
EXPERTS = 5
PINNED_NORM = [1.0390625, 0.91796875, 0.9296875, 0.91796875]


def small_spec(tied_head: bool = True, layers: int = 3, hidden: int = HIDDEN) -> ModelSpec:
    """One dense layer, then layers of experts."""
    ffn = ExpertFfn(
        kind="experts", width=WIDTH, experts=EXPERTS, experts_per_token=2, scoring="sigmoid"
    )
    dense = DenseFfn(kind="dense", width=56)
    return ModelSpec(
        name="small",
        vocab_size=90,
        hidden_size=hidden,
        max_positions=4096,
        dtype="bfloat16",
        block="parallel",
        activation="silu",
        norm=NormSpec(kind="rms", epsilon=1e-6),
        attention=AttentionSpec(query_heads=4, kv_heads=2, head_dim=16),
        rope=RopeSpec(kind="interleaved", theta=50000.0),
        layers=(
            LayerSpec(window=None, rope=True, ffn=dense),
            *(LayerSpec(window=8, rope=True, ffn=ffn) for _ in range(layers - 1)),
        ),
        tied_head=tied_head,
        logit_scale=1.0,
        eos_tokens=(1,),
    )


def assert_same_layer(a: LayerWeights, b: LayerWeights) -> None:
    for name in (f.name for f in dataclasses.fields(LayerWeights)):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None and right is None) or torch.equal(left, right), name


def separate_checkpoint(spec: ModelSpec, weights: RandomWeights) -> dict[str, Tensor]:
    """The checkpoint's own form: every matrix of every expert under its own name."""
    tensors = {
        "model.embed_tokens.weight": weights.embedding(),
        "model.norm.weight": weights.final_norm(),
    }
    if not spec.tied_head:
        tensors["lm_head.weight"] = weights.head()
    for i in range(len(spec.layers)):
        layer = weights.layer(i)
        prefix = f"model.layers.{i}"
        tensors[f"{prefix}.input_layernorm.weight"] = layer.norm
        for letter in "qkvo":
            tensors[f"{prefix}.self_attn.{letter}_proj.weight"] = getattr(layer, letter)
        if layer.router is not None:
            tensors[f"{prefix}.mlp.gate.weight"] = layer.router
        for e in range(layer.down.shape[0]):
            mlp = f"{prefix}.mlp" if layer.router is None else f"{prefix}.mlp.experts.{e}"
            width = layer.down.shape[2]
            tensors[f"{mlp}.gate_proj.weight"] = layer.gate_up[e, :width]
            tensors[f"{mlp}.up_proj.weight"] = layer.gate_up[e, width:]
            tensors[f"{mlp}.down_proj.weight"] = layer.down[e]
    return tensors


def fused_checkpoint(spec: ModelSpec, weights: RandomWeights) -> dict[str, Tensor]:
    """The form of transformers' module."""
    tensors = {
        name: tensor
        for name, tensor in separate_checkpoint(spec, weights).items()
        if ".experts." not in name
    }
    for i in range(1, len(spec.layers)):
        tensors[f"model.layers.{i}.mlp.experts.gate_up_proj"] = weights.layer(i).gate_up
        tensors[f"model.layers.{i}.mlp.experts.down_proj"] = weights.layer(i).down
    return tensors


def test_shapes_and_type() -> None:
    weights = RandomWeights(small_spec(), seed=0)
    dense, experts = weights.layer(0), weights.layer(1)
    assert dense.router is None
    assert dense.gate_up.shape == (1, 112, HIDDEN)
    assert dense.down.shape == (1, HIDDEN, 56)
    assert experts.router is not None
    assert experts.router.shape == (EXPERTS, HIDDEN)
    assert experts.gate_up.shape == (EXPERTS, 2 * WIDTH, HIDDEN)
    assert experts.down.shape == (EXPERTS, HIDDEN, WIDTH)
    assert experts.q.shape == experts.o.T.shape == (64, HIDDEN)
    assert experts.k.shape == experts.v.shape == (32, HIDDEN)
    tensors = [weights.embedding(), weights.final_norm()]
    tensors += [getattr(experts, f.name) for f in dataclasses.fields(LayerWeights)]
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    with pytest.raises(IndexError, match="layer 3 of a model with 3 layers"):
        weights.layer(3)


def test_tensors_depend_on_seed_and_name_alone() -> None:
    spec = small_spec()
    forwards, backwards = RandomWeights(spec, seed=7), RandomWeights(spec, seed=7)
    layers = [forwards.layer(i) for i in range(3)]
    for i in reversed(range(3)):
        assert_same_layer(backwards.layer(i), layers[i])
    other_seed = RandomWeights(spec, seed=8).layer(1)
    for name in (f.name for f in dataclasses.fields(LayerWeights)):
        assert not torch.equal(getattr(other_seed, name), getattr(layers[1], name))
        assert not torch.equal(getattr(layers[2], name), getattr(layers[1], name))


def test_values_are_the_same_in_every_process() -> None:
    """Pinned, so that results recorded with a seed stay comparable."""
    norm = RandomWeights(small_spec(), seed=0, device="cpu").layer(1).norm
    assert norm[:4].tolist() == PINNED_NORM


def test_activations_stay_of_order_one() -> None:
    """As deep as the first model; the router's spread is what makes its top-k margins realistic."""
    spec = small_spec(layers=49, hidden=256)
    reference = Reference(spec, RandomWeights(spec, seed=0))
    cache = KvCache(spec, torch.float32, "cpu")
    step = reference.extend(torch.arange(32), cache)
    rms = step.layer_outputs.pow(2).mean((1, 2)).sqrt()
    assert float(rms[0]) > 0.1
    assert 0.4 < float(rms[-1]) < 2
    assert 1.2 < float(step.router_logits[1:].std()) < 1.8
    assert 1.5 < float(step.logits.std()) < 2.5


@pytest.mark.parametrize("tied_head", [True, False])
def test_head_is_the_embedding_where_tied(tied_head: bool) -> None:
    spec = small_spec(tied_head)
    weights = RandomWeights(spec, seed=0)
    assert (weights.head() is weights.embedding()) == tied_head
    assert torch.equal(weights.head(), weights.embedding()) == tied_head
    loaded = StateDictWeights(spec, separate_checkpoint(spec, weights))
    assert (loaded.head() is loaded.embedding()) == tied_head
    assert torch.equal(loaded.head(), weights.head())


@pytest.mark.parametrize("form", [separate_checkpoint, fused_checkpoint])
def test_both_forms_of_experts(form: Form) -> None:
    spec = small_spec()
    weights = RandomWeights(spec, seed=0)
    loaded = StateDictWeights(spec, form(spec, weights))
    for i in range(3):
        assert_same_layer(loaded.layer(i), weights.layer(i))
    assert torch.equal(loaded.embedding(), weights.embedding())
    assert torch.equal(loaded.final_norm(), weights.final_norm())


def test_what_does_not_fit_the_description_is_refused() -> None:
    spec = small_spec()
    good = separate_checkpoint(spec, RandomWeights(spec, seed=0))
    down = "model.layers.2.mlp.experts.4.down_proj.weight"

    missing = {name: tensor for name, tensor in good.items() if name != down}
    with pytest.raises(WeightsError, match=f"MKC603: {down} is missing$"):
        StateDictWeights(spec, missing)

    biased = good | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    with pytest.raises(WeightsError, match=r"MKC603: model\.layers\.0.*bias has no place"):
        StateDictWeights(spec, biased)

    for wrong in (good[down].T, good[down].float()):
        with pytest.raises(WeightsError, match=f"MKC603: {down} is torch"):
            StateDictWeights(spec, good | {down: wrong}).layer(2)

    StateDictWeights(spec, good | {"lm_head.weight": good["model.embed_tokens.weight"].clone()})
    with pytest.raises(WeightsError, match=r"lm_head\.weight is tied but differs"):
        StateDictWeights(
            spec, good | {"lm_head.weight": torch.zeros_like(good["model.embed_tokens.weight"])}
        )
