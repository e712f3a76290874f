"""Hugging Face configs: the checkpoint's own, those that transformers writes, and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import golden_files
from mkc.compiler.errors import DescriptionError
from mkc.compiler.parse import load_model
from mkc.compiler.parse_hf import config_name, parse_config
from mkc.compiler.spec import DenseFfn, ExpertFfn, ModelSpec

CHECKPOINT: dict[str, Any] = {
    "architectures": ["Cohere2MoeForCausalLM"],
    "model_type": "cohere2_moe",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 768,
    "prefix_dense_intermediate_size": 3072,
    "first_k_dense_replace": 1,
    "prefix_dense_sliding_window_pattern": 1,
    "layer_norm_eps": 1e-05,
    "rms_norm_eps": 1e-06,
    "logit_scale": 1.0,
    "max_position_embeddings": 500000,
    "num_attention_heads": 32,
    "num_hidden_layers": 49,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 0,
    "expert_selection_fn": "sigmoid",
    "norm_topk_prob": False,
    "rope_theta": 50000,
    "sliding_window": 4096,
    "layer_types": [
        "full_attention" if index % 4 == 0 else "sliding_attention" for index in range(49)
    ],
    "tie_word_embeddings": None,
    "use_parallel_block": True,
    "use_qk_norm": False,
    "vocab_size": 262144,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "torch_dtype": "bfloat16",
}

SMALL: dict[str, Any] = {
    "vocab_size": 503,
    "hidden_size": 96,
    "intermediate_size": 48,
    "prefix_dense_intermediate_size": 80,
    "max_position_embeddings": 256,
    "sliding_window": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "expert_selection_fn": "sigmoid",
    "norm_topk_prob": False,
    "eos_token_id": [7, 9],
    "logit_scale": 0.25,
}

ABSENT = object()

FAULTS: list[tuple[str, dict[str, Any], str, str | None]] = [
    # name, what changes in CHECKPOINT, code, the key that is pointed at (None: the whole file)
    ("other_model", {"model_type": "llama"}, "MKC140", "model_type"),
    ("no_model_type", {"model_type": ABSENT}, "MKC111", None),
    ("no_rms_norm", {"rms_norm_eps": ABSENT}, "MKC111", None),
    ("null_rms_norm", {"rms_norm_eps": None}, "MKC111", "rms_norm_eps"),
    ("attention_bias", {"attention_bias": True}, "MKC141", "attention_bias"),
    ("qk_norm", {"use_qk_norm": True}, "MKC141", "use_qk_norm"),
    ("sequential_block", {"use_parallel_block": False}, "MKC141", "use_parallel_block"),
    ("activation", {"hidden_act": "gelu"}, "MKC141", "hidden_act"),
    ("renormalised", {"norm_topk_prob": True}, "MKC141", "norm_topk_prob"),
    ("renormalised_by_default", {"norm_topk_prob": ABSENT}, "MKC111", None),
    ("softmax", {"expert_selection_fn": "softmax"}, "MKC141", "expert_selection_fn"),
    ("softmax_by_default", {"expert_selection_fn": ABSENT}, "MKC111", None),
    ("shared_experts", {"num_shared_experts": 1}, "MKC141", "num_shared_experts"),
    ("false_for_zero", {"num_shared_experts": False}, "MKC141", "num_shared_experts"),
    ("rope_scaling", {"rope_scaling": {"factor": 8.0}}, "MKC141", "rope_scaling"),
    ("quantised", {"quantization_config": {"bits": 4}}, "MKC141", "quantization_config"),
    ("dtype", {"torch_dtype": "float16"}, "MKC141", "torch_dtype"),
    ("per_layer", {"per_layer_config": {"0": {"head_dim": 64}}}, "MKC141", "per_layer_config"),
    ("layer_type", {"layer_types": ["chunked_attention"]}, "MKC141", None),
    ("layer_count", {"num_hidden_layers": 48}, "MKC142", "layer_types"),
    ("unknown", {"attn_temperature": 0.1}, "MKC110", "attn_temperature"),
    ("typo", {"rope_thet": 1e4}, "MKC110", "rope_thet"),
    ("no_theta", {"rope_theta": ABSENT}, "MKC111", None),
    ("two_thetas", {"rope_parameters": {"rope_theta": 1e4}}, "MKC142", "rope_theta"),
    ("bool_size", {"hidden_size": True}, "MKC112", "hidden_size"),
    ("text_size", {"hidden_size": "2048"}, "MKC112", "hidden_size"),
    ("zero_heads", {"num_attention_heads": 0}, "MKC114", "num_attention_heads"),
    ("nan", {"rope_theta": float("nan")}, "MKC114", "rope_theta"),
    ("heads", {"num_attention_heads": 30}, "MKC120", "num_attention_heads"),
    ("dense_width", {"prefix_dense_intermediate_size": 3000}, "MKC124", None),
    ("expert_width", {"intermediate_size": 700}, "MKC124", "intermediate_size"),
    ("many_experts", {"num_experts": 256}, "MKC126", "num_experts"),
    ("window", {"max_position_embeddings": 4000}, "MKC127", "sliding_window"),
    ("eos", {"eos_token_id": [1, 262144]}, "MKC128", "eos_token_id"),
    ("no_eos", {"eos_token_id": ABSENT}, "MKC111", None),
    ("layer_bomb", {"num_hidden_layers": 10**8}, "MKC117", "num_hidden_layers"),
    ("tied_twice", {"tie_word_embeddings": True, "use_embedding_sharing": False}, "MKC142", None),
    ("mlp_types", {"mlp_layer_types": ["sparse"] * 49}, "MKC142", "mlp_layer_types"),
]


def text_of(changes: dict[str, Any]) -> str:
    config = {**CHECKPOINT, **changes}
    return json.dumps({k: v for k, v in config.items() if v is not ABSENT}, indent=2)


def spec_of(changes: dict[str, Any]) -> ModelSpec:
    return parse_config(text_of(changes), "config.json", "model")


def error_of(text: str) -> DescriptionError:
    with pytest.raises(DescriptionError) as caught:
        parse_config(text, "config.json", "model")
    return caught.value


def test_checkpoint_equals_the_shipped_description() -> None:
    shipped = load_model("north_mini_code")
    assert parse_config(text_of({}), "config.json", shipped.name) == shipped


@pytest.mark.parametrize(
    ("changes", "code", "key"), [fault[1:] for fault in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_fault_is_named_at_its_place(changes: dict[str, Any], code: str, key: str | None) -> None:
    text = text_of(changes)
    error = error_of(text)
    assert error.code == code
    assert error.location is not None
    assert error.location.line is not None
    if key is not None:
        line = next(n for n, one in enumerate(text.split("\n"), 1) if one.startswith(f'  "{key}":'))
        assert error.location.line == line
        value_column = 3 + len(f'"{key}": ')
        assert error.location.column in (3, value_column)


def test_error_texts() -> None:
    texts = "\n".join(f"[{name}]\n{error_of(text_of(changes))}\n" for name, changes, *_ in FAULTS)
    golden_files.compare("config_errors.txt", texts)


@pytest.mark.parametrize(
    ("text", "code", "line", "column"),
    [
        ('{"a": 1,\n  "b" 2}', "MKC104", 2, 7),
        ('{"a": 1,\n "a": 2}', "MKC106", 2, 2),
        ("[]", "MKC112", 1, 1),
        ('{"model_type": ' + "[" * 50 + "]" * 50 + "}", "MKC105", 1, 47),
        ('{"model_type": ' + "9" * 6000 + "}", "MKC114", 1, 16),
        ("[" * 200_000, "MKC105", None, None),
    ],
)
def test_malformed_json(text: str, code: str, line: int | None, column: int | None) -> None:
    error = error_of(text)
    assert error.code == code
    assert error.location is not None
    assert (error.location.line, error.location.column) == (line, column)


def test_tabs_and_escapes_are_json() -> None:
    text = json.dumps(CHECKPOINT | {"_name_or_path": 'a"\\\u00e9\U0001f600{'}, indent="\t")
    assert parse_config(text, "config.json", "m") == spec_of({}).model_copy(update={"name": "m"})


def test_null_kv_heads_means_one_per_query_head() -> None:
    spec = spec_of({"num_key_value_heads": None})
    assert spec.attention.kv_heads == 32


def test_eos_of_every_form() -> None:
    assert spec_of({"eos_token_id": 3}).eos_tokens == (3,)
    assert spec_of({"eos_token_id": [3, 4]}).eos_tokens == (3, 4)
    assert spec_of({"eos_token_id": None}).eos_tokens == ()


def test_folder_and_file(tmp_path: Path) -> None:
    folder = tmp_path / "My Model"
    folder.mkdir()
    (folder / "config.json").write_text(text_of({}), "utf-8")
    spec = load_model(folder)
    assert spec.name == "My-Model"
    assert load_model(str(folder / "config.json")) == spec
    (folder / "config.json").write_text(text_of({"hidden_act": "relu"}), "utf-8")
    with pytest.raises(DescriptionError) as caught:
        load_model(folder)
    assert str(folder / "config.json") in str(caught.value)


def test_name_in_a_hub_cache() -> None:
    path = Path("/c/models--CohereLabs--North-Mini-Code-1.0/snapshots/0a1b/config.json")
    assert config_name(path) == "North-Mini-Code-1.0"


VARIANTS: list[dict[str, Any]] = [
    {},
    {"first_k_dense_replace": 1},
    {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2},
    {"first_k_dense_replace": 2, "sliding_window_pattern": 3},
    {"prefix_dense_intermediate_size": None, "first_k_dense_replace": 1},
    {"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse", "sparse", "dense"]},
    {"layer_types": ["full_attention"] * 7, "mlp_layer_types": ["dense"] * 7},
    {"num_key_value_heads": None, "num_attention_heads": 3, "tie_word_embeddings": False},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=[",".join(v) or "plain" for v in VARIANTS])
def test_agrees_with_transformers(variant: dict[str, Any], tmp_path: Path) -> None:
    """Each layer is what transformers builds from the same config, saved and unsaved."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    raw = {"model_type": "cohere2_moe", **SMALL, **variant}
    config = transformers.Cohere2MoeConfig(**{**SMALL, **variant}, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    spec = load_model(tmp_path)
    from_raw = parse_config(json.dumps(raw), "config.json", spec.name)
    config.to_json_file(tmp_path / "full.json", use_diff=False)
    from_full = load_model(tmp_path / "full.json")
    assert from_raw == spec
    assert from_full == spec.model_copy(update={"name": "full"})

    with torch.device("meta"):
        model = transformers.Cohere2MoeForCausalLM(config)
    assert spec.eos_tokens == (7, 9)
    assert spec.logit_scale == model.logit_scale
    assert spec.tied_head == model.tie_word_embeddings
    assert spec.norm.epsilon == model.model.norm.variance_epsilon
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert len(spec.layers) == len(model.model.layers)
    for layer, built in zip(spec.layers, model.model.layers, strict=True):
        attention = built.self_attn
        assert layer.window == attention.sliding_window
        assert layer.rope == (attention.sliding_window is not None or attention.force_rope)
        kv_size = spec.attention.kv_heads * spec.attention.head_dim
        assert attention.k_proj.weight.shape == (kv_size, spec.hidden_size)
        if isinstance(layer.ffn, DenseFfn):
            assert built.mlp.gate_proj.weight.shape == (layer.ffn.width, spec.hidden_size)
        else:
            assert isinstance(layer.ffn, ExpertFfn)
            shape = (layer.ffn.experts, spec.hidden_size, layer.ffn.width)
            assert built.mlp.experts.down_proj.shape == shape
            assert built.mlp.gate.top_k == layer.ffn.experts_per_token


JSON_PIECES = st.sampled_from(
    ["{", "}", "[", "]", ":", ",", '"', "null", "1e999", "NaN", "-0", "\\"],
)


def outcome(text: str) -> ModelSpec | DescriptionError:
    try:
        return parse_config(text, "config.json", "model")
    except DescriptionError as error:
        return error


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_configs(data: st.DataObject) -> None:
    text = text_of({})
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        piece = data.draw(JSON_PIECES | st.text(max_size=4))
        text = text[:start] + piece + text[start + data.draw(st.integers(0, 8)) :]
    result = outcome(text)
    assert isinstance(result, ModelSpec) or result.location is not None


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted({*CHECKPOINT, "rope_parameters", "mlp_layer_types"})),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
)
def test_any_value_for_any_key(key: str, value: Any) -> None:
    result = outcome(text_of({key: value}))
    assert isinstance(result, ModelSpec) or result.location is not None
