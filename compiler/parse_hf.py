"""Hugging Face `config.json` -> `ModelSpec`, for the model types listed in `FRONT_ENDS`.

Every key of the file is mapped, checked against the one supported value, or on the list of keys
that do not touch the arithmetic of a decode step; any other is refused by name. A key whose default
would change the result (`expert_selection_fn` defaults to softmax, for one) must be present.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkc.compiler.errors import Location
from mkc.compiler.limits import MAX_LAYERS, Origin, SpecPath, check_limits
from mkc.compiler.source import MAX_INTEGER, Node, nearest, parse_json, quoted
from mkc.compiler.spec import (
    AttentionSpec,
    DenseFfn,
    ExpertFfn,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)


def parse_config(text: str, file: str, name: str) -> ModelSpec:
    """The model that a config.json's text says, called `name`; `file` is how errors name it.

    Raises DescriptionError (MKC103 to MKC129, MKC140 to MKC142).
    """
    root = parse_json(text, file)
    if not isinstance(root.value, dict):
        raise root.error("MKC112", f"a config must be a JSON object, not {root.shown()}")
    if "model_type" not in root.children:
        raise root.error("MKC111", "missing key 'model_type'", _SUPPORTED_HINT)
    model_type = root.children["model_type"]
    front_end = FRONT_ENDS.get(str(model_type.value))
    if front_end is None:
        raise model_type.error(
            "MKC140", f"model_type {model_type.shown()} is not supported", _SUPPORTED_HINT
        )
    return front_end(root, name)


def config_name(path: Path) -> str:
    """A model name for a config file: that of its folder, or of a hub cache's repository."""
    path = path.absolute()
    name = path.parent.name if path.name == "config.json" else path.stem
    if path.parent.parent.name == "snapshots":
        name = path.parent.parent.parent.name.rpartition("--")[2]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:100]
    return name or "model"


_MAPPED = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "logit_scale",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "eos_token_id",
    "tie_word_embeddings",
    "use_embedding_sharing",
    "rope_theta",
    "rope_parameters",
    "sliding_window",
    "sliding_window_pattern",
    "num_experts_per_tok",
    "num_experts",
    "layer_types",
    "mlp_layer_types",
    "first_k_dense_replace",
    "prefix_dense_sliding_window_pattern",
    "prefix_dense_intermediate_size",
    "rms_norm_eps",
}

_CHECKED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_qk_norm": (False,),
    "use_parallel_block": (True,),
    "use_gated_activation": (True,),
    "norm_topk_prob": (False,),
    "expert_selection_fn": ("sigmoid",),
    "num_shared_experts": (0,),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "partial_rotary_factor": (1.0, None),
    "rope_scaling": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "compression_config": (None,),
    "per_layer_config": (None,),
    "pruned_heads": ({}, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "dtype": ("bfloat16", None),
    "torch_dtype": ("bfloat16", None),
}
"""Keys that change the arithmetic, with the values that the compiler's arithmetic agrees with."""

_DEFAULT_DIFFERS = {"norm_topk_prob": "true", "expert_selection_fn": "softmax"}
"""Checked keys whose default, where the file omits them, is not the supported value."""

_HARMLESS = {
    "model_type",
    "architectures",
    "auto_map",
    "transformers_version",
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "_attn_implementation_autoset",
    "attn_implementation",
    "experts_implementation",
    "initializer_range",
    "use_cache",
    "cache_implementation",
    "bos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "pretraining_tp",
    "attention_dropout",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "router_aux_loss_coef",
    "shared_expert_combination_strategy",
    "layer_norm_eps",
    "layer_switch",
    "order_of_interleaved_layers",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "is_decoder",
    "tie_encoder_decoder",
    "tie_last_hidden_states",
    "torchscript",
    "tokenizer_class",
    "prefix",
    "problem_type",
    "finetuning_task",
    "task_specific_params",
    "id2label",
    "label2id",
    "num_labels",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "do_sample",
    "max_length",
    "min_length",
    "max_new_tokens",
    "num_beams",
    "num_beam_groups",
    "num_return_sequences",
    "repetition_penalty",
    "length_penalty",
    "diversity_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "early_stopping",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
    "output_scores",
    "return_dict_in_generate",
    "use_bfloat16",
    "tf_legacy_loss",
}
"""Keys of training, bookkeeping and generation defaults; `layer_norm_eps` is not read where
`rms_norm_eps` is given, and `layer_switch` only names the pattern that `layer_types` spells out."""


def _cohere2_moe(root: Node, name: str) -> ModelSpec:
    """`Cohere2MoeForCausalLM`, as transformers 5 reads its config."""
    _check_known_keys(root)
    _check_supported_values(root)
    epsilon = root.children.get("rms_norm_eps", _NULL)
    if epsilon.value is None:
        raise (root if epsilon is _NULL else epsilon).error(
            "MKC111",
            "rms_norm_eps is missing: without it the norms are mean-centred LayerNorms, which "
            "are not supported",
            "if the checkpoint uses RMSNorm, its own config.json says with which epsilon",
        )
    heads = _integer(root, "num_attention_heads")
    kv_heads = _optional_integer(root, "num_key_value_heads")
    layers, mlp_types = _layers(root)
    spec = ModelSpec(
        name=name,
        vocab_size=_integer(root, "vocab_size"),
        hidden_size=_integer(root, "hidden_size"),
        max_positions=_integer(root, "max_position_embeddings"),
        dtype="bfloat16",
        block="parallel",
        activation="silu",
        norm=NormSpec(kind="rms", epsilon=_positive(root, "rms_norm_eps")),
        attention=AttentionSpec(
            query_heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=_integer(root, "head_dim"),
        ),
        rope=RopeSpec(kind="interleaved", theta=_rope_theta(root)),
        layers=layers,
        tied_head=_tied_head(root),
        logit_scale=_positive(root, "logit_scale"),
        eos_tokens=_eos_tokens(root),
    )
    check_limits(spec, _config_origin(root, mlp_types))
    return spec


FRONT_ENDS: dict[str, Callable[[Node, str], ModelSpec]] = {"cohere2_moe": _cohere2_moe}
"""Hugging Face model_type -> the function that reads its config."""

_SUPPORTED_HINT = f"supported model types: {', '.join(FRONT_ENDS)}"


def _check_known_keys(root: Node) -> None:
    for key in root.children:
        if key in _MAPPED or key in _CHECKED or key in _HARMLESS:
            continue
        close = nearest(key, (*_MAPPED, *_CHECKED))
        raise root.key_error(
            key,
            "MKC110",
            f"unknown key {quoted(key)}: it may change the arithmetic, so it is not ignored",
            f"did you mean '{close}'?" if close else None,
        )


def _check_supported_values(root: Node) -> None:
    for key, default in _DEFAULT_DIFFERS.items():
        if key not in root.children:
            raise root.error(
                "MKC111", f"missing key '{key}': its default, {default}, is not supported"
            )
    for key, node in root.children.items():
        if key in _CHECKED:
            _check_value(node, key, _CHECKED[key])


def _check_value(node: Node, name: str, supported: tuple[object, ...]) -> None:
    value = node.plain()
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in supported):
        return
    words = " or ".join(Node(one, node.location).shown() for one in supported)  # type: ignore[arg-type]
    raise node.error("MKC141", f"{name} {node.shown()} is not supported; it must be {words}")


def _layers(root: Node) -> tuple[tuple[LayerSpec, ...], list[str]]:
    """All layers, and whether each is "dense" or "sparse"."""
    count = _integer(root, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise root.children["num_hidden_layers"].error(
            "MKC117", f"num_hidden_layers is {count}; there must be 1 to {MAX_LAYERS}"
        )
    dense_count = _optional_integer(root, "first_k_dense_replace", minimum=0) or 0
    if dense_count > count:
        raise root.children["first_k_dense_replace"].error(
            "MKC142", f"first_k_dense_replace is {dense_count}, more than the {count} layers"
        )
    dense_pattern = _optional_integer(root, "prefix_dense_sliding_window_pattern") or 1
    types = _layer_types(root, count, dense_count, dense_pattern)
    mlp_types = _mlp_types(root, count, dense_count)
    window = _integer(root, "sliding_window") if "sliding_attention" in types else None
    feed_forward = _feed_forward(root, mlp_types)
    layers = tuple(
        LayerSpec(
            window=window if attention == "sliding_attention" else None,
            # A dense layer keeps its position encoding even without a window, if every layer of
            # the dense prefix is a full one.
            rope=attention == "sliding_attention" or (mlp == "dense" and dense_pattern == 1),
            ffn=feed_forward[mlp],
        )
        for attention, mlp in zip(types, mlp_types, strict=True)
    )
    return layers, mlp_types


def _layer_types(root: Node, count: int, dense_count: int, dense_pattern: int) -> list[str]:
    given = _string_list(root, "layer_types", count, ("full_attention", "sliding_attention"))
    if given is not None:
        return given
    for key in ("layer_switch", "order_of_interleaved_layers"):
        if key in root.children:
            raise root.key_error(key, "MKC141", f"{key} is supported only beside layer_types")
    pattern = _optional_integer(root, "sliding_window_pattern") or 4

    def one(index: int, period: int) -> str:
        return "sliding_attention" if (index + 1) % period else "full_attention"

    prefix = [one(index, dense_pattern) for index in range(dense_count)]
    return prefix + [one(index, pattern) for index in range(count - dense_count)]


def _mlp_types(root: Node, count: int, dense_count: int) -> list[str]:
    derived = ["dense" if index < dense_count else "sparse" for index in range(count)]
    given = _string_list(root, "mlp_layer_types", count, ("dense", "sparse"))
    if given is None:
        return derived
    if "first_k_dense_replace" in root.children and given != derived:
        raise root.key_error(
            "mlp_layer_types",
            "MKC142",
            f"mlp_layer_types and first_k_dense_replace ({dense_count}) contradict each other",
        )
    return given


def _feed_forward(root: Node, mlp_types: list[str]) -> dict[str, DenseFfn | ExpertFfn]:
    feed_forward: dict[str, DenseFfn | ExpertFfn] = {}
    width = _integer(root, "intermediate_size")
    dense_width = _optional_integer(root, "prefix_dense_intermediate_size")
    if "dense" in mlp_types:
        feed_forward["dense"] = DenseFfn(kind="dense", width=dense_width or width)
    if "sparse" in mlp_types:
        feed_forward["sparse"] = ExpertFfn(
            kind="experts",
            width=width,
            experts=_integer(root, "num_experts"),
            experts_per_token=_integer(root, "num_experts_per_tok"),
            scoring="sigmoid",
        )
    return feed_forward


def _rope_theta(root: Node) -> float:
    """The base of the rotary frequencies, from rope_parameters (transformers 5) or rope_theta."""
    parameters = root.children.get("rope_parameters", _NULL)
    if parameters.value is None:
        return _positive(root, "rope_theta")
    if not isinstance(parameters.value, dict):
        raise parameters.error(
            "MKC112", f"rope_parameters must be an object or null, not {parameters.shown()}"
        )
    for key, node in parameters.children.items():
        if key in ("rope_type", "type"):
            _check_value(node, f"rope_parameters.{key}", ("default",))
        elif key == "partial_rotary_factor":
            _check_value(node, f"rope_parameters.{key}", (1.0, None))
        elif key != "rope_theta":
            raise parameters.key_error(
                key, "MKC141", f"rope_parameters has {quoted(key)}, which is not supported"
            )
    if "rope_theta" not in parameters.children:
        return _positive(root, "rope_theta")
    theta = _positive(parameters, "rope_theta", "rope_parameters.rope_theta")
    if "rope_theta" in root.children and _positive(root, "rope_theta") != theta:
        raise root.key_error(
            "rope_theta",
            "MKC142",
            f"rope_theta and rope_parameters.rope_theta ({theta}) contradict each other",
        )
    return theta


def _tied_head(root: Node) -> bool:
    """Whether the head is the embedding; null or absent means it is, as in transformers."""
    answers: list[bool] = []
    for key in ("tie_word_embeddings", "use_embedding_sharing"):
        node = root.children.get(key, _NULL)
        if node.value is None:
            continue
        if not isinstance(node.value, bool):
            raise node.error("MKC112", f"{key} must be true, false or null, not {node.shown()}")
        answers.append(node.value)
    if len(set(answers)) > 1:
        raise root.key_error(
            "use_embedding_sharing",
            "MKC142",
            "use_embedding_sharing and tie_word_embeddings contradict each other",
        )
    return answers[0] if answers else True


def _eos_tokens(root: Node) -> tuple[int, ...]:
    node = _present(root, "eos_token_id")
    if node.value is None:
        return ()
    if not isinstance(node.value, list):
        return (_checked_integer(node, "eos_token_id", 0),)
    return tuple(_checked_integer(one, "eos_token_id", 0) for one in node.value)


def _config_origin(root: Node, mlp_types: list[str]) -> Origin:
    names: dict[SpecPath, str] = {
        ("max_positions",): "max_position_embeddings",
        ("layers",): "num_hidden_layers",
        ("attention", "query_heads"): "num_attention_heads",
        ("attention", "kv_heads"): "num_key_value_heads",
        ("attention", "head_dim"): "head_dim",
    }
    layer_names = {
        "window": "sliding_window",
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "width": "intermediate_size",
    }
    dense_width = "prefix_dense_intermediate_size"

    def key(path: SpecPath) -> str:
        if path[0] == "eos_tokens":
            return "eos_token_id"
        if path[0] == "layers" and len(path) > 2 and isinstance(path[1], int):
            has_own_width = root.children.get(dense_width, _NULL).value is not None
            if path[-1] == "width" and mlp_types[path[1]] == "dense" and has_own_width:
                return dense_width
            return layer_names[str(path[-1])]
        return names.get(path, str(path[-1]))

    return Origin(key, lambda path: root.children.get(key(path), root).location)


_NULL = Node(None, Location("<absent>"))


def _present(node: Node, key: str, name: str | None = None) -> Node:
    if key not in node.children:
        raise node.error("MKC111", f"missing key '{name or key}'", "it is never guessed")
    return node.children[key]


def _integer(node: Node, key: str) -> int:
    return _checked_integer(_present(node, key), key, 1)


def _optional_integer(node: Node, key: str, minimum: int = 1) -> int | None:
    """None where the key is absent or null."""
    if node.children.get(key, _NULL).value is None:
        return None
    return _checked_integer(node.children[key], key, minimum)


def _checked_integer(node: Node, name: str, minimum: int) -> int:
    value = node.value
    if type(value) is not int:
        raise node.error("MKC112", f"{name} must be a whole number, not {node.shown()}")
    if not minimum <= value <= MAX_INTEGER:
        raise node.error("MKC114", f"{name} must be at least {minimum}, not {value}")
    return value


def _positive(node: Node, key: str, name: str | None = None) -> float:
    found = _present(node, key, name)
    value: Any = found.value
    if type(value) not in (int, float):
        raise found.error("MKC112", f"{name or key} must be a number, not {found.shown()}")
    if not value > 0:
        raise found.error("MKC114", f"{name or key} must be above 0, not {found.shown()}")
    return float(value)


def _string_list(root: Node, key: str, count: int, allowed: tuple[str, ...]) -> list[str] | None:
    """A list of one allowed word per layer; None where the key is absent or null."""
    node = root.children.get(key, _NULL)
    if node.value is None:
        return None
    if not isinstance(node.value, list):
        raise node.error("MKC112", f"{key} must be a list, not {node.shown()}")
    for index, item in enumerate(node.value):
        if item.value not in allowed:
            raise item.error(
                "MKC141",
                f"{key}[{index}] {item.shown()} is not supported",
                f"supported are {', '.join(allowed)}",
            )
    if len(node.value) != count:
        raise node.error(
            "MKC142", f"{key} has {len(node.value)} entries, num_hidden_layers is {count}"
        )
    return [str(item.value) for item in node.value]
