"""`ModelSpec` -> YAML: the inverse of `parse_description`, for `mkc import` and for people."""

from __future__ import annotations

import json
import re

from mkc.compiler.spec import DenseFfn, LayerSpec, ModelSpec


def describe(spec: ModelSpec) -> str:
    """A description of `spec` in YAML, such that `parse_description(describe(spec)) == spec`.

    Equal layers become one kind under `layer_kinds`; runs of layers are folded into repeat blocks.
    """
    names = _name_kinds(spec)
    lines = [
        "mkc: 1  # version of this format",
        f"name: {_text(spec.name)}",
        f"vocab_size: {spec.vocab_size}",
        f"hidden_size: {spec.hidden_size}",
        f"max_positions: {spec.max_positions}",
        f"dtype: {spec.dtype}",
        f"block: {spec.block}  # attention and ffn read the same norm: x + attention(h) + ffn(h)",
        f"activation: {spec.activation}",
        "norm:",
        f"  kind: {spec.norm.kind}",
        f"  epsilon: {_number(spec.norm.epsilon)}",
        "attention:",
        f"  query_heads: {spec.attention.query_heads}",
        f"  kv_heads: {spec.attention.kv_heads}",
        f"  head_dim: {spec.attention.head_dim}",
        "rope:",
        f"  kind: {spec.rope.kind}  # rotates pairs (2i, 2i+1), not the two halves of a head",
        f"  theta: {_number(spec.rope.theta)}",
        "layer_kinds:",
    ]
    for layer, name in names.items():
        lines += _kind_lines(layer, name)
    lines.append(f"layers:  # {len(spec.layers)}")
    lines += _layer_lines([names[layer] for layer in spec.layers])
    head = "the head is the embedding" if spec.tied_head else "the head has its own weights"
    lines += [
        f"tied_head: {_boolean(spec.tied_head)}  # {head}",
        f"logit_scale: {_number(spec.logit_scale)}",
        f"eos_tokens: [{', '.join(map(str, spec.eos_tokens))}]",
    ]
    return "\n".join(lines) + "\n"


def fold(items: list[str]) -> list[tuple[int, list[str]]]:
    """Runs of a list as (count, block) pairs: at each point the block that covers most items when
    repeated, the shortest of those."""
    folded: list[tuple[int, list[str]]] = []
    start = 0
    while start < len(items):
        best_count, best_period = 1, 1
        for period in range(1, (len(items) - start) // 2 + 1):
            block = items[start : start + period]
            count = 1
            while items[start + count * period : start + (count + 1) * period] == block:
                count += 1
            if count > 1 and count * period > best_count * best_period:
                best_count, best_period = count, period
        folded.append((best_count, items[start : start + best_period]))
        start += best_count * best_period
    return folded


def _layer_lines(names: list[str]) -> list[str]:
    lines = []
    for count, block in fold(names):
        if count * len(block) <= 2:
            lines += [f"  - {name}" for name in block * count]
        else:
            lines += [f"  - repeat: {count}", f"    of: [{', '.join(block)}]"]
    return lines


def _name_kinds(spec: ModelSpec) -> dict[LayerSpec, str]:
    """A name for each distinct layer, in order of appearance."""
    first_expert = next(
        (i for i, layer in enumerate(spec.layers) if not isinstance(layer.ffn, DenseFfn)), None
    )
    names: dict[LayerSpec, str] = {}
    for layer in dict.fromkeys(spec.layers):
        is_dense = isinstance(layer.ffn, DenseFfn)
        base = "full" if layer.window is None else "sliding"
        if is_dense and first_expert is not None:
            after = layer in spec.layers[first_expert:]
            base = f"dense_{base}" if after else "prefix"
        same = sum(1 for name in names.values() if name.rstrip("0123456789").rstrip("_") == base)
        names[layer] = base if not same else f"{base}_{same + 1}"
    return names


def _kind_lines(layer: LayerSpec, name: str) -> list[str]:
    sees = "sees all tokens" if layer.window is None else "tokens seen, the query's own included"
    window = "null" if layer.window is None else str(layer.window)
    rope = "" if layer.rope else "  # no position encoding"
    lines = [
        f"  {name}:",
        f"    window: {window}  # {sees}",
        f"    rope: {_boolean(layer.rope)}{rope}",
        "    ffn:",
        f"      kind: {layer.ffn.kind}",
        f"      width: {layer.ffn.width}",
    ]
    if not isinstance(layer.ffn, DenseFfn):
        lines[-1] += "  # of one expert"
        lines += [
            f"      experts: {layer.ffn.experts}",
            f"      experts_per_token: {layer.ffn.experts_per_token}",
            f"      scoring: {layer.ffn.scoring}  # of each chosen logit, not renormalised",
        ]
    return lines


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _number(value: float) -> str:
    """The shortest text that reads back as the same float, with a point in every YAML's eyes."""
    mantissa, letter, exponent = repr(value).partition("e")
    return mantissa + ("" if "." in mantissa else ".0") + letter + exponent


def _text(value: str) -> str:
    """Text as YAML, quoted where some reader would take it for something else."""
    is_plain = _PLAIN.fullmatch(value) is not None and value.lower() not in _YAML_WORDS
    return value if is_plain else json.dumps(value)


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_YAML_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "infinity"}
