"""YAML descriptions: what is accepted, and that each fault is named where it is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import golden_files
from mkc.compiler.errors import DescriptionError
from mkc.compiler.limits import check_limits
from mkc.compiler.parse import load_model, parse_description
from mkc.compiler.spec import DenseFfn, ExpertFfn, ModelSpec
from mkc.models import shipped_models

BASE = """\
mkc: 1
name: base
vocab_size: 1000
hidden_size: 256
max_positions: 2048
dtype: bfloat16
block: parallel
activation: silu
norm: {kind: rms, epsilon: 1.0e-6}
attention: {query_heads: 16, kv_heads: 4, head_dim: 64}
rope: {kind: interleaved, theta: 50000}
layer_kinds:
  prefix: {window: null, rope: true, ffn: {kind: dense, width: 512}}
  sliding:
    window: 128
    rope: true
    ffn: {kind: experts, width: 96, experts: 16, experts_per_token: 4, scoring: sigmoid}
layers:
  - prefix
  - repeat: 3
    of: [sliding, sliding]
tied_head: true
logit_scale: 0.5
eos_tokens: [7, 9]
"""

LAYERS = BASE[BASE.index("layers:") : BASE.index("tied_head")]


class Fault(NamedTuple):
    """`old` of BASE becomes `new`; the error must have `code` and point at `at`."""

    name: str
    old: str
    new: str
    code: str
    at: str


FAULTS = [
    Fault("syntax", "kind: rms, epsilon", "kind: rms; epsilon", "MKC104", ": 1.0e-6"),
    Fault("unclosed", "[7, 9]", "[7, 9", "MKC104", ""),
    Fault("tab", "  - prefix", "\t- prefix", "MKC104", "\t- prefix"),
    Fault("control_character", "name: base", "name: ba\x01se", "MKC104", "\x01"),
    Fault("anchor", "[sliding, sliding]", "&a [sliding]", "MKC105", "&a"),
    Fault("alias", "vocab_size: 1000", "vocab_size: *size", "MKC105", "*size"),
    Fault("tag", "name: base", "name: !!python/name:os.system x", "MKC105", "!!python"),
    Fault("two_documents", "eos_tokens: [7, 9]", "---\nmkc: 1", "MKC105", "---"),
    Fault("complex_key", "tied_head:", "? [a]\n:", "MKC105", "[a]"),
    Fault("nested", "[7, 9]", "[" * 40 + "]" * 40, "MKC105", "[" * 9 + "]"),
    Fault("duplicate_key", "block: parallel", "name: again", "MKC106", "name: again"),
    Fault("no_version", "mkc: 1\n", "", "MKC111", "name"),
    Fault("version", "mkc: 1\n", "mkc: 2\n", "MKC107", "2\n"),
    Fault("version_true", "mkc: 1\n", "mkc: true\n", "MKC107", "true\nname"),
    Fault("not_a_mapping", BASE, "- mkc\n", "MKC112", "- mkc"),
    Fault("comments_only", BASE, "# nothing here\n", "MKC103", "# nothing"),
    Fault("unknown_key", "tied_head: true", "lr: 3", "MKC110", "lr"),
    Fault("typo", "epsilon:", "epsilom:", "MKC110", "epsilom"),
    Fault("expert_key_in_dense", "width: 512}", "width: 512, experts: 4}", "MKC110", "experts: 4"),
    Fault("missing_epsilon", ", epsilon: 1.0e-6", "", "MKC111", "{kind: rms"),
    Fault("missing_top_key", "logit_scale: 0.5\n", "", "MKC111", "mkc"),
    Fault("missing_ffn_kind", "{kind: dense, width", "{width", "MKC111", "{width: 512"),
    Fault("text_for_int", "vocab_size: 1000", "vocab_size: many", "MKC112", "many"),
    Fault("bool_for_int", "kv_heads: 4", "kv_heads: true", "MKC112", "true, head_dim"),
    Fault("float_for_int", "hidden_size: 256", "hidden_size: 256.0", "MKC112", "256.0"),
    Fault("int_for_bool", "tied_head: true", "tied_head: 1", "MKC112", "1\nlogit"),
    Fault("yes_for_bool", "tied_head: true", "tied_head: yes", "MKC112", "yes"),
    Fault("bool_for_float", "logit_scale: 0.5", "logit_scale: true", "MKC112", "true\neos"),
    Fault("list_for_mapping", "{kind: rms, epsilon: 1.0e-6}", "[rms]", "MKC112", "[rms]"),
    Fault("null_for_text", "name: base", "name:", "MKC112", "name:\n"),
    Fault("text_in_eos", "[7, 9]", "[7, nine]", "MKC112", "nine"),
    Fault("layers_not_list", LAYERS, "layers: prefix\n", "MKC112", "prefix\ntied"),
    Fault("layer_is_list", "- prefix", "- [prefix]", "MKC112", "[prefix]"),
    Fault("dtype", "dtype: bfloat16", "dtype: float16", "MKC113", "float16"),
    Fault("norm_kind", "kind: rms", "kind: layer", "MKC113", "layer, eps"),
    Fault("ffn_kind", "kind: dense", "kind: sparse", "MKC113", "sparse"),
    Fault("scoring", "scoring: sigmoid", "scoring: softmax", "MKC113", "softmax"),
    Fault("zero", "vocab_size: 1000", "vocab_size: 0", "MKC114", "0\nhidden"),
    Fault("negative_epsilon", "1.0e-6", "-1.0e-6", "MKC114", "-1.0e-6"),
    Fault("infinite_theta", "theta: 50000", "theta: .inf", "MKC114", ".inf"),
    Fault("huge_integer", "vocab_size: 1000", "vocab_size: " + "9" * 5000, "MKC114", "999"),
    Fault("zero_logit_scale", "logit_scale: 0.5", "logit_scale: 0", "MKC114", "0\neos"),
    Fault("repeat_zero", "repeat: 3", "repeat: 0", "MKC114", "0\n    of"),
    Fault("unknown_kind", "- prefix", "- prefex", "MKC115", "prefex"),
    Fault("unused_kind", "  - prefix\n", "", "MKC116", "prefix: {window"),
    Fault("no_layers", LAYERS, "layers: []\n", "MKC117", "[]"),
    Fault("layer_bomb", "repeat: 3", "repeat: 1000", "MKC117", "1000\n    of"),
    Fault("empty_block", "of: [sliding, sliding]", "of: []", "MKC117", "[]"),
    Fault("head_count", "query_heads: 16", "query_heads: 18", "MKC120", "18"),
    Fault("group", "kv_heads: 4", "kv_heads: 1", "MKC121", "16, kv"),
    Fault("head_dim", "head_dim: 64", "head_dim: 80", "MKC122", "80}"),
    Fault("head_dim_large", "head_dim: 64", "head_dim: 512", "MKC122", "512}\nrope"),
    Fault("hidden_size", "hidden_size: 256", "hidden_size: 250", "MKC123", "250"),
    Fault("dense_width", "width: 512", "width: 500", "MKC124", "500}"),
    Fault("expert_width", "width: 96", "width: 100", "MKC124", "100, experts"),
    Fault("too_many_chosen", "per_token: 4", "per_token: 9", "MKC125", "9, scoring"),
    Fault("more_than_experts", "experts: 16", "experts: 3", "MKC125", "4, scoring"),
    Fault("experts", "experts: 16", "experts: 129", "MKC126", "129"),
    Fault("window", "window: 128", "window: 2049", "MKC127", "2049"),
    Fault("eos", "[7, 9]", "[7, 1000]", "MKC128", "1000]"),
    Fault("negative_eos", "[7, 9]", "[-1]", "MKC128", "-1]"),
    Fault("name", "name: base", "name: ../base", "MKC129", "../base"),
]


def error_of(text: str, file: str = "model.yaml") -> DescriptionError:
    with pytest.raises(DescriptionError) as caught:
        parse_description(text, file)
    return caught.value


def broken(fault: Fault) -> str:
    assert BASE.count(fault.old) >= 1, fault.name
    return BASE.replace(fault.old, fault.new, 1)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault_is_named_at_its_place(fault: Fault) -> None:
    text = broken(fault)
    error = error_of(text)
    assert error.code == fault.code
    assert error.location is not None
    assert error.location.line is not None
    assert error.location.column is not None
    if fault.at:
        assert text.count(fault.at) >= 1
        before = text[: text.index(fault.at)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        assert (error.location.line, error.location.column) == (line, column)


def test_error_texts() -> None:
    texts = "\n".join(f"[{fault.name}]\n{error_of(broken(fault))}\n" for fault in FAULTS)
    golden_files.compare("description_errors.txt", texts)


def test_base_description() -> None:
    spec = parse_description(BASE)
    assert len(spec.layers) == 7
    assert spec.layers[0].ffn == DenseFfn(kind="dense", width=512)
    assert spec.layers[6].window == 128
    assert isinstance(spec.layers[6].ffn, ExpertFfn)
    assert spec.rope.theta == 50000.0
    assert type(spec.rope.theta) is float
    assert spec.eos_tokens == (7, 9)


def test_exponent_without_point_is_a_number() -> None:
    assert parse_description(BASE.replace("1.0e-6", "1e-6")).norm.epsilon == 1e-6


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_model(path) == parse_description(BASE)


def test_shipped_models() -> None:
    assert {"north_mini_code", "tiny"} <= shipped_models().keys()
    for name, path in shipped_models().items():
        assert load_model(name) == load_model(path)


def test_tiny_is_as_awkward_as_promised() -> None:
    tiny = load_model("tiny")
    assert (tiny.vocab_size, tiny.hidden_size, tiny.max_positions) == (1003, 208, 640)
    assert tiny.attention.group == 6
    windows = [layer.window for layer in tiny.layers]
    assert windows == [None, 100, 100, 100, None, 100]
    assert [layer.rope for layer in tiny.layers] == [True, True, True, True, False, True]


def test_unknown_name_lists_the_models() -> None:
    with pytest.raises(DescriptionError, match="did you mean north_mini_code") as caught:
        load_model("north-mini-code")
    assert caught.value.code == "MKC101"


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "", "no/such/file.yaml"])
def test_impossible_paths(name: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        load_model(name)
    assert caught.value.code == "MKC101"


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"no config\.json") as caught:
        load_model(tmp_path)
    assert caught.value.code == "MKC101"


@pytest.mark.parametrize(
    ("data", "code", "line", "column"),
    [
        (b"", "MKC103", 1, 1),
        (b" \n\t\n", "MKC103", 1, 1),
        ("mkc: 1\nname: é".encode() + b"\xff", "MKC102", 2, 8),
        (b"\x80\x04", "MKC102", 1, 1),
        (b"a" * (5 << 20), "MKC103", None, None),
    ],
)
def test_files_that_hold_no_text(
    tmp_path: Path, data: bytes, code: str, line: int | None, column: int | None
) -> None:
    path = tmp_path / "model.yaml"
    path.write_bytes(data)
    with pytest.raises(DescriptionError) as caught:
        load_model(path)
    assert caught.value.code == code
    assert caught.value.location is not None
    assert (caught.value.location.line, caught.value.location.column) == (line, column)


def test_deep_nesting_of_every_sort() -> None:
    for text in ("[" * 100_000, "{a: " * 100_000, "- " * 100_000, "? " * 100_000):
        assert error_of(text).code in {"MKC104", "MKC105"}


def test_hugging_face_keys_in_yaml_are_recognised() -> None:
    assert "Hugging Face" in str(error_of("model_type: llama\n"))


def test_limits_of_a_spec_built_in_code() -> None:
    spec = load_model("tiny").model_copy(update={"hidden_size": 100})
    with pytest.raises(DescriptionError, match="error MKC123: hidden_size is 100"):
        check_limits(spec)


def outcome(text: str) -> ModelSpec | DescriptionError:
    try:
        return parse_description(text)
    except DescriptionError as error:
        return error


def parses_or_refuses(text: str) -> None:
    result = outcome(text)
    assert isinstance(result, ModelSpec) or (str(result) and result.location is not None)


@settings(max_examples=250, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name in ("random.yaml", "random.json"):
        path = folder / name
        path.write_bytes(data)
        with pytest.raises(DescriptionError):
            load_model(path)


YAML_TOKENS = "{ } [ ] : - ? # % @ ` , ' \" ~ << \\ &a *a !!int ! 1e999 -1 true 0x1F layers"
YAML_PIECES = (
    st.sampled_from(YAML_TOKENS.split())
    | st.sampled_from(
        [": ", "- ", "? ", "\n", "  ", "&a ", "!!int ", "|\n", ">\n", "---\n", "...\n"]
    )
    | st.sampled_from(["\x85", "\u2028", "\t", "\0", "\ufeff", '"\\U00110000"', '"\\ud800"'])
    | st.sampled_from(["%YAML 1.1\n", "%TAG ! x\n"])
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutated_descriptions(data: st.DataObject) -> None:
    text = BASE
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 12))
        piece = data.draw(YAML_PIECES | st.text(max_size=6))
        text = text[:start] + piece + text[start + length :]
    parses_or_refuses(text)


@settings(max_examples=250, deadline=None)
@given(st.lists(YAML_PIECES, max_size=30))
def test_yaml_fragments(pieces: list[str]) -> None:
    parses_or_refuses("".join(pieces))
