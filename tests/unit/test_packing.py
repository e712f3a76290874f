"""The packed format: round trips, and every byte against the formulas of the format."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mkc.compiler.parse import load_model
from mkc.compiler.place import Layout, place
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import load_target
from mkc.compiler.tile import PAGE_TOKENS, tile
from mkc.runtime.packing import (
    fill_region,
    pack_gate_up_tiles,
    pack_k_pages,
    pack_pair_tiles,
    pack_v_pages,
    pack_weights,
    read_fragment_row,
    read_tile,
    store_token,
    unpack_gate_up_tiles,
    unpack_k_pages,
    unpack_pair_tiles,
    unpack_region,
    unpack_v_pages,
)
from mkc.runtime.weights import RandomWeights

tiles = st.integers(1, 4)


def numbered(*shape: int) -> Tensor:
    """bf16 of `shape` whose bit patterns count up, so that every value is another one."""
    count = torch.Size(shape).numel()
    assert count <= 1 << 16
    return torch.arange(count, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(shape)


def bits(values: Tensor) -> list[int]:
    """The 16-bit patterns of bf16 values or of bytes, in order."""
    return (values.contiguous().view(-1).view(torch.int16).to(torch.int32) & 0xFFFF).tolist()


def lane_registers() -> list[tuple[int, int, int, int, int]]:
    """(r8, j, kk, h, c) of a fragment's 256 values in byte order: lane, register h + 2 * kk, c."""
    return [
        (lane // 4, lane % 4, register // 2, register % 2, c)
        for lane, register, c in itertools.product(range(32), range(4), range(2))
    ]


def test_pair_tiles_follow_the_formula() -> None:
    matrices, rows, columns = 2, 24, 48
    weights = numbered(matrices, rows, columns)
    padded = torch.cat([weights, weights.new_zeros(matrices, 8, columns)], dim=1)
    expected = [
        padded[m, 16 * t + 2 * r8 + h, 16 * b + 4 * j + 2 * kk + c]
        for m, t, b in itertools.product(range(matrices), range(2), range(columns // 16))
        for r8, j, kk, h, c in lane_registers()
    ]
    assert bits(pack_pair_tiles(weights)) == bits(torch.stack(expected))


def test_gate_up_tiles_follow_the_formula() -> None:
    matrices, width, columns = 2, 32, 48
    weights = numbered(matrices, 2 * width, columns)
    expected = [
        weights[m, h * width + 16 * t + 2 * r8 + a, 16 * b + 4 * j + 2 * kk + c]
        for m, t, b, a in itertools.product(range(matrices), range(2), range(3), range(2))
        for r8, j, kk, h, c in lane_registers()
    ]
    assert bits(pack_gate_up_tiles(weights)) == bits(torch.stack(expected))


def test_k_and_v_pages_follow_the_formulas() -> None:
    head_dim = 96
    page = numbered(PAGE_TOKENS, head_dim)
    blocks = list(itertools.product(range(4), range(head_dim // 16)))
    keys = [
        page[16 * tile + r8 + 8 * h, 16 * block + 4 * j + 2 * kk + c]
        for tile, block in blocks
        for r8, j, kk, h, c in lane_registers()
    ]
    values = [
        page[16 * block + 8 * kk + 2 * j + c, 16 * tile + 2 * r8 + h]
        for block, tile in blocks
        for r8, j, kk, h, c in lane_registers()
    ]
    assert bits(pack_k_pages(page)) == bits(torch.stack(keys))
    assert bits(pack_v_pages(page)) == bits(torch.stack(values))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 70), tiles)
def test_pair_tiles_come_back(matrices: int, rows: int, blocks: int) -> None:
    weights = numbered(matrices, rows, 16 * blocks)
    packed = pack_pair_tiles(weights)
    assert packed.numel() == matrices * -(-rows // 16) * 16 * blocks * 16 * 2
    assert bits(unpack_pair_tiles(packed, (matrices, rows, 16 * blocks))) == bits(weights)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), tiles, tiles)
def test_gate_up_tiles_come_back(matrices: int, width_tiles: int, blocks: int) -> None:
    weights = numbered(matrices, 32 * width_tiles, 16 * blocks)
    packed = pack_gate_up_tiles(weights)
    assert bits(unpack_gate_up_tiles(packed, (matrices, 32 * width_tiles, 16 * blocks))) == bits(
        weights
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), tiles)
def test_pages_come_back(pages: int, heads: int, dim_tiles: int) -> None:
    tokens = numbered(pages, heads, PAGE_TOKENS, 16 * dim_tiles)
    assert bits(unpack_k_pages(pack_k_pages(tokens), 16 * dim_tiles)) == bits(tokens)
    assert bits(unpack_v_pages(pack_v_pages(tokens), 16 * dim_tiles)) == bits(tokens)


@pytest.mark.parametrize("slot", [0, 1, 7, 8, 15, 16, 41, 63])
def test_store_token_changes_that_token_alone(slot: int) -> None:
    head_dim = 64
    tokens = torch.zeros(2, PAGE_TOKENS, head_dim, dtype=torch.bfloat16)
    k_page, v_page = pack_k_pages(tokens[0]), pack_v_pages(tokens[1])
    new = torch.randn(2, head_dim).bfloat16()
    store_token(k_page, v_page, slot, new[0], new[1])
    tokens[:, slot] = new
    assert torch.equal(unpack_k_pages(k_page, head_dim), tokens[0])
    assert torch.equal(unpack_v_pages(v_page, head_dim), tokens[1])


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def packed(request: pytest.FixtureRequest) -> tuple[ModelSpec, Layout, RandomWeights, Tensor]:
    """tiny, its layout, weights and arena; the head tied or not."""
    spec = load_model("tiny").model_copy(update={"tied_head": request.param})
    target = load_target("h200")
    layout = place(spec, tile(spec, target, 8, 16), target)
    weights = RandomWeights(spec, 3)
    return spec, layout, weights, pack_weights(layout, spec, weights, "cpu")


def test_all_weights_come_back(
    packed: tuple[ModelSpec, Layout, RandomWeights, Tensor],
) -> None:
    spec, layout, weights, arena = packed
    expected: dict[tuple[str, int], Tensor] = {("head", -1): weights.head()[None]}
    norms = []
    for index in range(len(spec.layers)):
        layer = weights.layer(index)
        norms.append(layer.norm)
        expected["qkv", index] = torch.cat([layer.q, layer.k, layer.v])[None]
        expected["gate_up", index] = layer.gate_up
        expected["out", index] = layer.o[None]
        expected["down", index] = layer.down
        if layer.router is not None:
            expected["router", index] = layer.router[None]
    expected["norms", -1] = torch.stack([*norms, weights.final_norm()])[None]
    if not spec.tied_head:
        expected["embedding", -1] = weights.embedding()[None]
        assert not torch.equal(weights.embedding(), weights.head())
    assert {(region.name, region.layer) for region in layout.regions} == expected.keys()
    for (name, layer_index), tensor in expected.items():
        assert torch.equal(unpack_region(layout, arena, name, layer_index), tensor), name


def test_tiles_and_fragment_rows_are_those_of_the_matrices(
    packed: tuple[ModelSpec, Layout, RandomWeights, Tensor],
) -> None:
    _, layout, weights, arena = packed
    layer, head = weights.layer(1), weights.head()
    gate, up = layer.gate_up[4].chunk(2)
    both = torch.cat([gate[16:32], up[16:32]])
    assert torch.equal(read_tile(arena, layout.region("gate_up", 1), 1, 4), both)
    assert torch.equal(read_tile(arena, layout.region("down", 1), 2, 5), layer.down[5, 32:48])
    last = read_tile(arena, layout.region("head"), 62)
    assert torch.equal(last[:11], head[992:])
    assert not last[11:].any()
    assert torch.equal(read_fragment_row(arena, layout.region("head"), 1002, 12), head[1002, 192:])


def test_what_lies_outside_is_refused(
    packed: tuple[ModelSpec, Layout, RandomWeights, Tensor],
) -> None:
    _, layout, weights, arena = packed
    for name, layer, tile_index, matrix in [
        ("head", -1, 63, 0),
        ("down", 1, 0, 6),
        ("qkv", 0, -1, 0),
    ]:
        with pytest.raises(IndexError, match=name):
            read_tile(arena, layout.region(name, layer), tile_index, matrix)
    with pytest.raises(IndexError, match="head"):
        read_fragment_row(arena, layout.region("head"), 1003, 0)
    with pytest.raises(ValueError, match="qkv of layer 0"):
        fill_region(arena, layout.region("qkv", 0), [weights.layer(0).q])
