"""What tile, place and schedule refuse, and what they must not lose on small targets."""

from __future__ import annotations

import pytest

from mkc.compiler.errors import LoweringError
from mkc.compiler.parse import load_model
from mkc.compiler.plan import Options
from mkc.compiler.program import Entry, EntryKind, encode_programs
from mkc.compiler.spec import ExpertFfn, ModelSpec
from mkc.compiler.target import load_target
from mkc.compiler.verify import verify
from plan_damage import make_plan


def many_experts() -> ModelSpec:
    """The tiny model with as many experts as the kernel can have: eight tiles of the router."""
    tiny = load_model("tiny")
    layers = tuple(
        layer.model_copy(update={"ffn": layer.ffn.model_copy(update={"experts": 128})})
        if isinstance(layer.ffn, ExpertFfn)
        else layer
        for layer in tiny.layers
    )
    return tiny.model_copy(update={"layers": layers})


@pytest.mark.parametrize("sms", [2, 3, 7])
def test_routers_with_more_tiles_than_there_are_sms(sms: int) -> None:
    plan = make_plan(many_experts(), sms, Options(max_batch=2, ring_slots=8))
    verify(plan)
    for layer in range(1, len(plan.tiling.layers)):
        tiles = [
            entry.tile
            for program in plan.programs
            for entry in program
            if (entry.kind, entry.layer) == (EntryKind.ROUTER, layer)
        ]
        assert sorted(tiles) == list(range(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            Options(chunk_fragments=16, window_bytes=65536, ring_slots=7),
            "the window needs 8, and 2[0-9] fit",
        ),
        (Options(chunk_fragments=16, window_bytes=1 << 20), "the window needs 128, and 2[0-9] fit"),
        (
            Options(chunk_fragments=16, window_bytes=8192, ring_slots=1),
            "the window needs 2, and 2[0-9] fit",
        ),
        (Options(chunk_fragments=16, ring_slots=40), "a ring of 40 chunks of 8192 bytes"),
    ],
)
def test_a_ring_that_cannot_work_is_refused_before_the_proof(
    options: Options, message: str
) -> None:
    with pytest.raises(LoweringError, match=message) as error:
        make_plan(load_model("tiny"), 132, options)
    assert (error.value.code, error.value.exit_status) == ("MKC203", 2)


@pytest.mark.parametrize("rows", [0, 9])
def test_a_batch_out_of_range(rows: int) -> None:
    with pytest.raises(LoweringError, match=f"--max-batch {rows}") as error:
        make_plan(load_model("tiny"), 132, Options(max_batch=rows))
    assert error.value.code == "MKC204"


def test_more_kv_heads_than_sms() -> None:
    with pytest.raises(LoweringError, match="2 KV heads do not fit 1 SMs") as error:
        make_plan(load_model("tiny"), 1, Options())
    assert error.value.code == "MKC201"


def test_more_layers_than_an_entry_can_name() -> None:
    tiny = load_model("tiny")
    layer = tiny.layers[0]
    with pytest.raises(LoweringError, match="256 layers: a program can have 255") as error:
        make_plan(tiny.model_copy(update={"layers": (layer,) * 256}), 7, Options())
    assert error.value.code == "MKC201"
    plan = make_plan(tiny.model_copy(update={"layers": (layer,) * 255}), 2, Options(max_batch=1))
    table = encode_programs(plan.programs)
    assert int(table[0][len(plan.programs[0]) - 1]) == EntryKind.SAMPLE | 255 << 7


def test_an_entry_that_does_not_fit_its_word() -> None:
    for entry in (Entry(EntryKind.QKV, 256), Entry(EntryKind.QKV, 0, 1 << 17)):
        with pytest.raises(LoweringError, match="does not fit an entry's 32 bits"):
            encode_programs([[entry]])


@pytest.mark.parametrize("name", ["", "h", "b200"])
def test_an_unknown_or_ambiguous_target(name: str) -> None:
    with pytest.raises(LoweringError, match="known targets: h100-sxm, h200-sxm") as error:
        load_target(name)
    assert error.value.code == "MKC202"
