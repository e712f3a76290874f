"""The reference against transformers' `Cohere2MoeForCausalLM` with the same weights."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeTopKRouter

from mkc.compiler.spec import (
    AttentionSpec,
    DenseFfn,
    ExpertFfn,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from mkc.runtime.oracle import checkpoint
from mkc.runtime.reference import KvCache, Reference, StepResult, choose_experts
from mkc.runtime.weights import (
    LayerWeights,
    ModelWeights,
    RandomWeights,
    StateDictWeights,
)

CASES = range(12)
DECODE_STEPS = 4

# Relative L2. In float32 both sides differ by the order of sums alone; a window off by one, a
# missing rotation or a swapped pair gives 1e-2 and more.
FLOAT32_BOUND = 5e-6
# In bfloat16 the two must err alike, and lie much closer to each other than to float32: that they
# round in the same places. They are usually the same bits; one rounding left out or added brings
# the second ratio near one.
BFLOAT16_ERROR_RATIO = 1.05
BFLOAT16_DISTANCE_RATIO = 0.2


def random_spec(case: int) -> ModelSpec:
    """A small model of the family: with no, one or two dense layers first, or nothing but those."""
    rng = random.Random(case)
    dense = [1, 0, 2, 1][case % 4]
    layers = dense + (rng.randint(2, 4) if case != 6 else 0)
    window = rng.randint(2, 9)
    experts = rng.choice([4, 6, 9])
    expert_ffn = ExpertFfn(
        kind="experts",
        width=rng.choice([12, 24]),
        experts=experts,
        experts_per_token=rng.randint(1, 4),
        scoring="sigmoid",
    )
    dense_ffn = DenseFfn(kind="dense", width=rng.choice([40, 64]))
    dense_rope = rng.random() < 0.7
    kv_heads = rng.choice([1, 2, 3])
    return ModelSpec(
        name=f"case-{case}",
        vocab_size=rng.choice([61, 128]),
        hidden_size=rng.choice([32, 48, 64]),
        max_positions=64,
        dtype="bfloat16",
        block="parallel",
        activation="silu",
        norm=NormSpec(kind="rms", epsilon=rng.choice([1e-6, 1e-3])),
        attention=AttentionSpec(
            query_heads=kv_heads * rng.choice([1, 2, 4]),
            kv_heads=kv_heads,
            head_dim=rng.choice([8, 16]),
        ),
        rope=RopeSpec(kind="interleaved", theta=rng.choice([50000.0, 100.0])),
        layers=tuple(
            LayerSpec(window=None, rope=dense_rope, ffn=dense_ffn)
            if i < dense
            else LayerSpec(window=window, rope=True, ffn=expert_ffn)
            if (i - dense) % 3 != 1
            else LayerSpec(window=None, rope=False, ffn=expert_ffn)
            for i in range(layers)
        ),
        tied_head=rng.random() < 0.5,
        logit_scale=rng.choice([1.0, 0.25]),
        eos_tokens=(1,),
    )


def window_of(spec: ModelSpec) -> int:
    return next((layer.window for layer in spec.layers if layer.window is not None), 4)


def to_transformers(
    spec: ModelSpec, weights: ModelWeights, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """The configuration and the eager model of transformers with the same weights."""
    expert_ffns = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, ExpertFfn)]
    dense = [layer for layer in spec.layers if isinstance(layer.ffn, DenseFfn)]
    experts = expert_ffns[0] if expert_ffns else None
    settings: dict[str, Any] = {
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
        "sliding_window": window_of(spec),
        "layer_types": [
            "full_attention" if x.window is None else "sliding_attention" for x in spec.layers
        ],
        "mlp_layer_types": [
            "dense" if isinstance(x.ffn, DenseFfn) else "sparse" for x in spec.layers
        ],
        "prefix_dense_intermediate_size": dense[0].ffn.width if dense else None,
        "prefix_dense_sliding_window_pattern": 1 if dense and dense[0].rope else 2,
        "intermediate_size": experts.width if experts else 8,
        "num_experts": experts.experts if experts else 1,
        "num_experts_per_tok": experts.experts_per_token if experts else 1,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "eos_token_id": list(spec.eos_tokens),
    }
    config = Cohere2MoeConfig(**settings)
    # Made in `dtype`: a later `.to(bfloat16)` would also round the rotary frequencies.
    module: Any = Cohere2MoeForCausalLM
    model = module._from_config(config, dtype=dtype).eval()
    model.load_state_dict(checkpoint(spec, weights))
    return config, model


def lower_id_wins(module: Any, args: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Hook on the oracle's router: its top-k breaks the many ties of bfloat16 logits anyhow."""
    logits = output[0]
    ids = choose_experts(logits, module.top_k)
    return logits, torch.sigmoid(logits.gather(-1, ids)), ids


def oracle_run(model: Any, tokens: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """Logits [n, vocab] and layer inputs [layers, n, hidden] of a prefill of `prompt` tokens
    followed by decode steps over the model's cache."""
    layer_inputs: list[list[Tensor]] = [[] for _ in model.model.layers]

    def record(index: int) -> Any:
        return lambda module, args, kwargs: layer_inputs[index].append(
            (args[0] if args else kwargs["hidden_states"])[0].float()
        )

    hooks = [
        layer.register_forward_pre_hook(record(i), with_kwargs=True)
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        out = model(tokens[None, :prompt], use_cache=True)
        logits = [out.logits[0]]
        for token in tokens[prompt:]:
            out = model(token[None, None], cache=out.cache, use_cache=True)
            logits.append(out.logits[0])
    for hook in hooks:
        hook.remove()
    return torch.cat(logits).float(), torch.stack([torch.cat(parts) for parts in layer_inputs])


def reference_run(reference: Reference, tokens: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """The same of the reference; layer outputs [layers, n, hidden]."""
    cache = KvCache(reference.spec, reference.kv_dtype, reference.device)
    steps = [reference.extend(tokens[:prompt], cache)]
    steps += [reference.decode(token[None], [cache]) for token in tokens[prompt:]]
    logits = torch.cat([step.logits for step in steps])
    return logits, torch.cat([step.layer_outputs for step in steps], dim=1)


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 of a against b."""
    return float((a - b).norm() / b.norm())


def random_tokens(spec: ModelSpec, n: int, seed: int) -> Tensor:
    return torch.randint(spec.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_float32_prefill_and_decode_equal_transformers(case: int) -> None:
    spec = random_spec(case)
    weights = RandomWeights(spec, seed=case)
    prompt = 3 * window_of(spec) + 1
    tokens = random_tokens(spec, prompt + DECODE_STEPS, case)
    want, layer_inputs = oracle_run(to_transformers(spec, weights)[1], tokens, prompt)
    got, layer_outputs = reference_run(Reference(spec, weights), tokens, prompt)
    for row in range(prompt + DECODE_STEPS):
        assert distance(got[row], want[row]) < FLOAT32_BOUND
    assert distance(layer_outputs[:-1], layer_inputs[1:]) < FLOAT32_BOUND


@pytest.mark.parametrize("case", [0, 2])
@pytest.mark.parametrize("past_window", [-2, -1, 0, 1])
def test_window_edges(case: int, past_window: int) -> None:
    """Prompts that end just before, on and after the window, then steps over the edge."""
    spec = random_spec(case)
    weights = RandomWeights(spec, seed=50 + case)
    prompt = window_of(spec) + past_window
    tokens = random_tokens(spec, prompt + DECODE_STEPS, case)
    want, _ = oracle_run(to_transformers(spec, weights)[1], tokens, prompt)
    got, _ = reference_run(Reference(spec, weights), tokens, prompt)
    assert distance(got, want) < FLOAT32_BOUND


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_rounds_where_transformers_rounds(case: int) -> None:
    spec = random_spec(case)
    weights = RandomWeights(spec, seed=case)
    prompt = 3 * window_of(spec) + 1
    tokens = random_tokens(spec, prompt + DECODE_STEPS, case)
    model = to_transformers(spec, weights, torch.bfloat16)[1]
    for module in model.modules():
        if isinstance(module, Cohere2MoeTopKRouter):
            module.register_forward_hook(lower_id_wins)
    exact, _ = reference_run(Reference(spec, weights), tokens, prompt)
    theirs, _ = oracle_run(model, tokens, prompt)
    ours, _ = reference_run(Reference(spec, weights, torch.bfloat16), tokens, prompt)
    assert distance(ours, exact) < BFLOAT16_ERROR_RATIO * distance(theirs, exact)
    assert distance(ours, theirs) < BFLOAT16_DISTANCE_RATIO * distance(theirs, exact)


def test_router_logits_and_choice_equal_transformers() -> None:
    spec = random_spec(1)
    weights = RandomWeights(spec, seed=1)
    tokens = random_tokens(spec, 9, 1)
    routings: list[Any] = []
    model = to_transformers(spec, weights)[1]
    for module in model.modules():
        if isinstance(module, Cohere2MoeTopKRouter):
            module.register_forward_hook(lambda module, args, output: routings.append(output))
    oracle_run(model, tokens, 9)
    step = Reference(spec, weights).extend(tokens, empty_cache(spec))
    assert len(routings) == len(spec.layers)
    for i, (logits, _, ids) in enumerate(routings):
        assert distance(step.router_logits[i], logits) < FLOAT32_BOUND
        assert torch.equal(step.experts[i], ids.sort(dim=-1).values)


def test_dense_layers_have_no_routing() -> None:
    step = Reference(random_spec(0), RandomWeights(random_spec(0), 0)).extend(
        torch.tensor([3, 4]), empty_cache(random_spec(0))
    )
    assert step.router_logits[0].isnan().all()
    assert (step.experts[0] == -1).all()
    assert not step.router_logits[1:].isnan().any()
    assert (step.experts[1:].diff(dim=-1) > 0).all()


def empty_cache(spec: ModelSpec) -> KvCache:
    return KvCache(spec, torch.float32, "cpu")


def full_cache(spec: ModelSpec, length: int, seed: int, dtype: torch.dtype) -> KvCache:
    """A cache of `length` random tokens; sliding layers hold what their window needs, no more."""
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.attention.kv_heads, spec.attention.head_dim)
    keys, values = (
        [
            torch.randn(
                length if layer.window is None else min(length, layer.window - 1),
                *heads,
                generator=generator,
            ).to(dtype)
            for layer in spec.layers
        ]
        for _ in range(2)
    )
    return KvCache.from_tensors(spec, keys, values, length)


@pytest.mark.parametrize("case", [0, 5, 7])
def test_ragged_rows_equal_single_rows(case: int) -> None:
    spec = random_spec(case)
    reference = Reference(spec, RandomWeights(spec, seed=case))
    window = window_of(spec)
    lengths = [0, 1, window - 1, window, window + 1, 5 * window]
    tokens = random_tokens(spec, len(lengths), case)

    def caches() -> list[KvCache]:
        return [full_cache(spec, n, row, torch.bfloat16) for row, n in enumerate(lengths)]

    together = reference.decode(tokens, caches())
    for row, cache in enumerate(caches()):
        alone = reference.decode(tokens[row, None], [cache])
        assert cache.length == lengths[row] + 1
        assert distance(together.logits[row], alone.logits[0]) < FLOAT32_BOUND
        assert distance(together.layer_outputs[:, row], alone.layer_outputs[:, 0]) < FLOAT32_BOUND
        assert torch.equal(together.experts[:, row], alone.experts[:, 0])


@pytest.mark.parametrize("case", [0, 3])
def test_given_tensors_continue_as_the_sequence_they_came_from(case: int) -> None:
    """Only the window's tokens in sliding layers, and a cache shared by two continuations."""
    spec = random_spec(case)
    reference = Reference(spec, RandomWeights(spec, seed=case))
    prompt = 3 * window_of(spec)
    tokens = random_tokens(spec, prompt + 2, case)
    _, whole = reference.prefill(tokens[:prompt])
    held = [
        whole.last(i, prompt if s.window is None else s.window - 1, torch.float32, "cpu")
        for i, s in enumerate(spec.layers)
    ]
    keys, values = [k for k, _ in held], [v for _, v in held]
    copies = [KvCache.from_tensors(spec, keys, values, prompt) for _ in range(2)]
    for token in tokens[prompt:]:
        want = reference.decode(token[None], [whole]).logits[0]
        got = reference.decode(token.expand(2), copies).logits
        assert distance(got[0], want) < FLOAT32_BOUND
        assert distance(got[1], want) < FLOAT32_BOUND
    assert keys[0].shape[0] == prompt


def test_given_tensors_that_lack_the_window_are_refused() -> None:
    spec = random_spec(1)
    keys = [torch.zeros(20, spec.attention.kv_heads, spec.attention.head_dim) for _ in spec.layers]
    KvCache.from_tensors(spec, keys, keys)
    keys[0] = keys[0][: window_of(spec) - 2]
    with pytest.raises(ValueError, match=r"layer 0: K .* for a sequence of 20 tokens"):
        KvCache.from_tensors(spec, keys, keys, 20)


def test_round_kv_stores_bfloat16_and_keeps_the_rest_float32() -> None:
    spec = random_spec(0)
    weights = RandomWeights(spec, seed=0)
    tokens = random_tokens(spec, 12, 0)
    exact, exact_cache = Reference(spec, weights).prefill(tokens)
    rounded, cache = Reference(spec, weights, round_kv=True).prefill(tokens)
    for kv, exact_kv in zip(
        cache.last(0, 12, torch.float32, "cpu"),
        exact_cache.last(0, 12, torch.float32, "cpu"),
        strict=True,
    ):
        assert torch.equal(kv, exact_kv.to(torch.bfloat16).float())
    bfloat16, _ = Reference(spec, weights, torch.bfloat16).prefill(tokens)
    assert FLOAT32_BOUND < distance(rounded, exact) < distance(bfloat16, exact)


def test_equal_router_logits_choose_the_lower_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert choose_experts(logits, 3).tolist() == [[0, 1, 3], [0, 1, 2]]
    assert choose_experts(torch.zeros(1, 512), 8).tolist() == [list(range(8))]


class TwinExperts(RandomWeights):
    """Six experts; the logits of e and e + 3 are the same input value exactly, hence equal.

    `swapped` gives each the matrices of its twin.
    """

    swapped = False

    def layer(self, index: int) -> LayerWeights:
        layer = super().layer(index)
        router = torch.eye(3, layer.q.shape[1], dtype=torch.bfloat16).repeat(2, 1)
        shift = 3 if self.swapped else 0
        return dataclasses.replace(
            layer,
            router=router,
            gate_up=layer.gate_up.roll(shift, 0),
            down=layer.down.roll(shift, 0),
        )


def twin_spec() -> ModelSpec:
    """An odd number of experts per token, so that every token splits one pair of twins."""
    ffn = ExpertFfn(kind="experts", width=12, experts=6, experts_per_token=3, scoring="sigmoid")
    spec = random_spec(1)
    layers = tuple(layer.model_copy(update={"ffn": ffn}) for layer in spec.layers)
    return spec.model_copy(update={"layers": layers})


def test_of_twin_experts_the_lower_is_chosen() -> None:
    spec = twin_spec()
    reference = Reference(spec, TwinExperts(spec, 1))
    step = reference.extend(random_tokens(spec, 16, 1), empty_cache(spec))
    for ids in step.experts.flatten(0, 1).tolist():
        assert all(e - 3 in ids for e in ids if e >= 3)


def test_given_experts_are_followed() -> None:
    """Told to take the twins of its choice, a model does what it does with twins swapped."""
    spec = twin_spec()
    swapped = TwinExperts(spec, 1)
    swapped.swapped = True
    tokens = random_tokens(spec, 4, 1)

    def caches() -> list[KvCache]:
        return [full_cache(spec, n, n, torch.float32) for n in range(4)]

    want = Reference(spec, swapped).decode(tokens, caches())
    reference = Reference(spec, TwinExperts(spec, 1))
    state = reference.begin(tokens, caches())
    twins = (want.experts + 3) % 6
    for i in range(len(spec.layers)):
        reference.run_layer(i, reference.weights.layer(i), state, twins[i])
    got = reference.finish(reference.weights.final_norm(), reference.weights.head(), state)
    assert distance(got.logits, want.logits) < FLOAT32_BOUND
    assert torch.equal(got.experts, twins.sort(dim=-1).values)
    assert distance(reference.decode(tokens, caches()).logits, want.logits) > 0.01


def test_layer_hooks_run_two_references_over_one_pass() -> None:
    spec = random_spec(3)
    weights = RandomWeights(spec, seed=3)
    references = [Reference(spec, weights, d) for d in (torch.float32, torch.bfloat16)]
    token = torch.tensor([5])

    def caches() -> list[list[KvCache]]:
        return [[full_cache(spec, 11, 0, torch.bfloat16)] for _ in references]

    states = [r.begin(token, c) for r, c in zip(references, caches(), strict=True)]
    for i in range(len(spec.layers)):
        layer = weights.layer(i)
        for reference, state in zip(references, states, strict=True):
            reference.run_layer(i, layer, state)
    for reference, state, cache in zip(references, states, caches(), strict=True):
        got = reference.finish(weights.final_norm(), weights.head(), state)
        want = reference.decode(token, cache)
        for name in (f.name for f in dataclasses.fields(StepResult)):
            torch.testing.assert_close(
                getattr(got, name), getattr(want, name), rtol=0, atol=0, equal_nan=True
            )
    with pytest.raises(ValueError, match="layer 1 after 0 layers"):
        references[0].run_layer(1, weights.layer(1), references[0].begin(token, caches()[0]))


def test_full_sequences_are_refused() -> None:
    spec = random_spec(0)
    reference = Reference(spec, RandomWeights(spec, 0))
    with pytest.raises(ValueError, match="a sequence of 65 tokens, the model has 64 positions"):
        reference.decode(torch.tensor([1]), [full_cache(spec, 64, 0, torch.float32)])


@pytest.mark.parametrize("case", [0, 1, 2])
def test_state_dict_of_transformers_gives_the_same_logits(case: int) -> None:
    spec = random_spec(case)
    weights = RandomWeights(spec, seed=case)
    state_dict = to_transformers(spec, weights, torch.bfloat16)[1].state_dict()
    tokens = random_tokens(spec, 8, case)
    got, _ = Reference(spec, StateDictWeights(spec, state_dict)).prefill(tokens)
    want, _ = Reference(spec, weights).prefill(tokens)
    assert torch.equal(got, want)
