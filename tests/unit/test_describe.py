"""`describe` and `parse_description` are inverses."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mkc.compiler.describe import describe, fold
from mkc.compiler.parse import load_model, parse_description
from mkc.compiler.spec import (
    AttentionSpec,
    DenseFfn,
    ExpertFfn,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from mkc.models import shipped_models

positive_floats = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
widths = st.integers(1, 500).map(lambda tiles: 16 * tiles)


@st.composite
def expert_ffns(draw: st.DrawFn) -> ExpertFfn:
    experts = draw(st.integers(1, 128))
    chosen = draw(st.integers(1, min(8, experts)))
    return ExpertFfn(
        kind="experts",
        width=draw(widths),
        experts=experts,
        experts_per_token=chosen,
        scoring="sigmoid",
    )


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    max_positions = draw(st.integers(1, 2**31 - 1))
    vocab_size = draw(st.integers(1, 2**31 - 1))
    kv_heads = draw(st.integers(1, 64))
    ffns = expert_ffns() | widths.map(lambda width: DenseFfn(kind="dense", width=width))
    windows = st.none() | st.integers(1, max_positions)
    layer = st.builds(LayerSpec, window=windows, rope=st.booleans(), ffn=ffns)
    kinds = draw(st.lists(layer, min_size=1, max_size=4))
    return ModelSpec(
        name=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True)),
        vocab_size=vocab_size,
        hidden_size=16 * draw(st.integers(1, 1000)),
        max_positions=max_positions,
        dtype="bfloat16",
        block="parallel",
        activation="silu",
        norm=NormSpec(kind="rms", epsilon=draw(positive_floats)),
        attention=AttentionSpec(
            query_heads=kv_heads * draw(st.integers(1, 8)),
            kv_heads=kv_heads,
            head_dim=32 * draw(st.integers(1, 8)),
        ),
        rope=RopeSpec(kind="interleaved", theta=draw(positive_floats)),
        layers=tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=40))),
        tied_head=draw(st.booleans()),
        logit_scale=draw(positive_floats),
        eos_tokens=tuple(draw(st.lists(st.integers(0, vocab_size - 1), max_size=3))),
    )


@settings(max_examples=200, deadline=None)
@given(specs())
def test_round_trip(spec: ModelSpec) -> None:
    assert parse_description(describe(spec)) == spec


def test_names_that_yaml_would_misread() -> None:
    tiny = load_model("tiny")
    for name in ("1", "1.0", "1e5", "true", "null", "NaN", "Infinity", "no", "0x1F", "99999999999"):
        spec = tiny.model_copy(update={"name": name})
        assert parse_description(describe(spec)).name == name


def test_shipped_models_round_trip() -> None:
    for name in shipped_models():
        spec = load_model(name)
        assert parse_description(describe(spec)) == spec


def test_layer_pattern_is_folded() -> None:
    text = describe(load_model("north_mini_code"))
    assert text.endswith(
        "layers:  # 49\n"
        "  - prefix\n"
        "  - repeat: 12\n"
        "    of: [sliding, sliding, sliding, full]\n"
        "tied_head: true  # the head is the embedding\n"
        "logit_scale: 1.0\n"
        "eos_tokens: [255001]\n"
    )


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_fold_unrolls_to_its_input(items: list[str]) -> None:
    assert [item for count, block in fold(items) for item in block * count] == items


def test_fold_prefers_the_shortest_block() -> None:
    assert fold(["a"] * 8) == [(8, ["a"])]
    assert fold(["p", *["s", "s", "f"] * 4]) == [(1, ["p"]), (4, ["s", "s", "f"])]
