"""The one format of all streamed bytes: weights, K pages and V pages as fragments of 16 x 16 bf16.

A fragment is 512 bytes, 16 for each lane of a warp. Lane l = 4 * r8 + j holds four registers of two
bf16, register `h + 2 * kk` with its halves `c`, the low one first. What a register holds depends on
the format; each is defined here by one function that returns a view of the packed bytes in logical
order, so that packing is a copy into that view and unpacking a copy out of it.

    pair tiles     W[16 * tile + 2 * r8 + h, 16 * block + 4 * j + 2 * kk + c]
    gate-up tiles  (gate, up)[h][16 * tile + 2 * r8 + a, 16 * block + 4 * j + 2 * kk + c]
    K page         K[token 16 * tile + r8 + 8 * h, dim 16 * block + 4 * j + 2 * kk + c]
    V page         V[token 16 * block + 8 * kk + 2 * j + c, dim 16 * tile + 2 * r8 + h]

The two halves of a register are neighbours in all of them but the last, so those move whole
registers, as int32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mkc.compiler.place import Layout, Region
from mkc.compiler.spec import ModelSpec
from mkc.compiler.tile import FRAGMENT_BYTES, FRAGMENT_EDGE, PAGE_TOKENS
from mkc.runtime.weights import ModelWeights

PAGE_TILES = PAGE_TOKENS // FRAGMENT_EDGE
NORM_REGION = "norms"


def pair_tiles_view(packed: Tensor, matrices: int, columns: int) -> Tensor:
    """Packed bytes -> int32 view [matrices, tile, r8, h, block, j, kk]; order of W's registers.

    Byte order: matrix, tile, block, lane, register, half.
    """
    words = packed.view(torch.int32)
    words = words.view(matrices, -1, columns // FRAGMENT_EDGE, 8, 4, 2, 2)
    return words.permute(0, 1, 3, 6, 2, 4, 5)


def gate_up_tiles_view(packed: Tensor, matrices: int, columns: int) -> Tensor:
    """Packed bytes -> int32 view [matrices, h, tile, r8, a, block, j, kk].

    Byte order: matrix, tile, block, half tile a, lane, register, half. h is 0 for gate, 1 for up.
    """
    words = packed.view(torch.int32)
    words = words.view(matrices, -1, columns // FRAGMENT_EDGE, 2, 8, 4, 2, 2)
    return words.permute(0, 7, 1, 4, 3, 2, 5, 6)


def k_pages_view(packed: Tensor, head_dim: int) -> Tensor:
    """Pages [..., page_bytes] -> int32 view [..., tile, h, r8, block, j, kk]; tokens come first.

    Byte order: token tile, block of dims, lane, register, half.
    """
    words = packed.view(torch.int32)
    words = words.view(*packed.shape[:-1], PAGE_TILES, head_dim // FRAGMENT_EDGE, 8, 4, 2, 2)
    return words.movedim((-6, -1, -4, -5, -3, -2), (-6, -5, -4, -3, -2, -1))


def v_pages_view(packed: Tensor, head_dim: int) -> Tensor:
    """Pages [..., page_bytes] -> bf16 view [..., block, kk, j, c, tile, r8, h]; tokens come first.

    Byte order: block of tokens, tile of dims, lane, register, half.
    """
    values = packed.view(torch.bfloat16)
    values = values.view(*packed.shape[:-1], PAGE_TILES, head_dim // FRAGMENT_EDGE, 8, 4, 2, 2, 2)
    return values.movedim((-7, -3, -4, -1, -6, -5, -2), (-7, -6, -5, -4, -3, -2, -1))


def pack_pair_tiles(weights: Tensor) -> Tensor:
    """bf16 [rows, columns] or [matrices, rows, columns] -> bytes [n]; rows padded with zeros."""
    weights = weights if weights.dim() == 3 else weights[None]
    matrices, rows, columns = weights.shape
    size = matrices * padded(rows) * columns * 2
    packed = torch.empty(size, dtype=torch.uint8, device=weights.device)
    _fill_pair_tiles(packed, weights)
    return packed


def unpack_pair_tiles(packed: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Bytes [n] -> bf16 of `shape` [matrices, rows, columns], without the padding."""
    matrices, rows, columns = shape
    words = pair_tiles_view(packed, matrices, columns)
    return words.reshape(matrices, -1, columns // 2)[:, :rows].contiguous().view(torch.bfloat16)


def pack_gate_up_tiles(weights: Tensor) -> Tensor:
    """bf16 [matrices, 2 * width, columns], gate rows first -> bytes [n]."""
    packed = torch.empty(weights.numel() * 2, dtype=torch.uint8, device=weights.device)
    _fill_gate_up_tiles(packed, weights)
    return packed


def unpack_gate_up_tiles(packed: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Bytes [n] -> bf16 of `shape` [matrices, 2 * width, columns], gate rows first."""
    matrices, rows, columns = shape
    words = gate_up_tiles_view(packed, matrices, columns)
    return words.reshape(matrices, rows, columns // 2).view(torch.bfloat16)


def pack_rows(weights: Tensor) -> Tensor:
    """bf16 of any shape -> its bytes [n], row-major."""
    return weights.contiguous().view(-1).view(torch.uint8)


def unpack_rows(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Bytes [n] -> bf16 of `shape`; a view."""
    return packed.view(torch.bfloat16).view(shape)


def pack_k_pages(keys: Tensor) -> Tensor:
    """bf16 K [..., PAGE_TOKENS, head_dim] -> bytes [..., page_bytes]."""
    packed, head_dim = _empty_pages(keys), keys.shape[-1]
    view = k_pages_view(packed, head_dim)
    view.copy_(keys.contiguous().view(torch.int32).view(view.shape))
    return packed


def unpack_k_pages(packed: Tensor, head_dim: int) -> Tensor:
    """Bytes [..., page_bytes] -> bf16 K [..., PAGE_TOKENS, head_dim]."""
    shape = (*packed.shape[:-1], PAGE_TOKENS, head_dim // 2)
    return k_pages_view(packed, head_dim).reshape(shape).view(torch.bfloat16)


def pack_v_pages(values: Tensor) -> Tensor:
    """bf16 V [..., PAGE_TOKENS, head_dim] -> bytes [..., page_bytes]."""
    packed, head_dim = _empty_pages(values), values.shape[-1]
    view = v_pages_view(packed, head_dim)
    view.copy_(values.contiguous().view(view.shape))
    return packed


def unpack_v_pages(packed: Tensor, head_dim: int) -> Tensor:
    """Bytes [..., page_bytes] -> bf16 V [..., PAGE_TOKENS, head_dim]."""
    shape = (*packed.shape[:-1], PAGE_TOKENS, head_dim)
    return v_pages_view(packed, head_dim).reshape(shape)


def store_token(k_page: Tensor, v_page: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
    """Writes `key` and `value`, bf16 [head_dim], as token `slot` of two pages [page_bytes]."""
    head_dim = key.shape[0]
    tile, place = divmod(slot, FRAGMENT_EDGE)
    k_token = k_pages_view(k_page, head_dim)[tile, place // 8, place % 8]
    k_token.copy_(key.contiguous().view(torch.int32).view(k_token.shape))
    v_token = v_pages_view(v_page, head_dim)[tile, place // 8, place % 8 // 2, place % 2]
    v_token.copy_(value.reshape(v_token.shape))


def pack_weights(
    layout: Layout,
    spec: ModelSpec,
    weights: ModelWeights,
    device: torch.device | str,
    progress: Callable[[str], None] | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """All weights of a model as the arena, uint8 [layout.arena_bytes] on `device`.

    One layer at a time is held beside the arena. Gaps between regions are zero. `progress` hears
    what is packed next. `into` is an arena on `device` to fill, all zeros, instead of a new one.
    Raises ValueError where a tensor's shape is not its region's.
    """
    arena = into
    if arena is None:
        arena = torch.zeros(layout.arena_bytes, dtype=torch.uint8, device=device)
    report = progress or (lambda what: None)
    norms = []
    for index in range(len(spec.layers)):
        report(f"layer {index}")
        layer = weights.layer(index)
        norms.append(layer.norm.to(device))
        if layer.router is not None:
            fill_region(arena, layout.region("router", index), [layer.router])
        fill_region(arena, layout.region("qkv", index), [layer.q, layer.k, layer.v])
        fill_region(arena, layout.region("gate_up", index), [layer.gate_up])
        fill_region(arena, layout.region("out", index), [layer.o])
        fill_region(arena, layout.region("down", index), [layer.down])
        del layer
    report("head")
    norms.append(weights.final_norm().to(device))
    fill_region(arena, layout.region(NORM_REGION), [torch.stack(norms)])
    fill_region(arena, layout.region("head"), [weights.head()])
    if not spec.tied_head:
        report("embedding")
        fill_region(arena, layout.region("embedding"), [weights.embedding()])
    return arena


def fill_region(arena: Tensor, region: Region, parts: list[Tensor]) -> None:
    """Packs the bf16 rows of `parts`, in order, into a region.

    Raises ValueError if together they don't have the region's shape.
    """
    moved = [part.to(arena.device) for part in parts]
    tensor = moved[0] if len(moved) == 1 else torch.cat(moved)
    tensor = tensor if tensor.dim() == 3 else tensor[None]
    if tuple(tensor.shape) != region.shape or tensor.dtype != torch.bfloat16:
        raise ValueError(
            f"{region.name} of layer {region.layer} is {tensor.dtype} {list(tensor.shape)}, "
            f"its region holds torch.bfloat16 {list(region.shape)}"
        )
    packed = region_bytes(arena, region)
    if region.layout == "pair_tiles":
        _fill_pair_tiles(packed, tensor)
    elif region.layout == "gate_up_tiles":
        _fill_gate_up_tiles(packed, tensor)
    else:
        packed.copy_(pack_rows(tensor))


def region_bytes(arena: Tensor, region: Region) -> Tensor:
    """The part of the arena that is `region`, uint8 [region.bytes]; a view."""
    return arena[region.offset : region.offset + region.bytes]


def unpack_region(layout: Layout, arena: Tensor, name: str, layer: int = -1) -> Tensor:
    """bf16 [matrices, rows, columns] of a region, as it was before packing. Raises KeyError."""
    region = layout.region(name, layer)
    packed = region_bytes(arena, region)
    if region.layout == "pair_tiles":
        return unpack_pair_tiles(packed, region.shape)
    if region.layout == "gate_up_tiles":
        return unpack_gate_up_tiles(packed, region.shape)
    return unpack_rows(packed, region.shape)


def read_tile(arena: Tensor, region: Region, tile: int, matrix: int = 0) -> Tensor:
    """bf16 rows of one tile: [16, columns], or [32, columns] with 16 gate rows before 16 up rows.

    Raises IndexError outside of the region.
    """
    packed = _tile_bytes(arena, region, tile, matrix)
    columns = region.shape[2]
    if region.layout == "gate_up_tiles":
        return unpack_gate_up_tiles(packed, (1, 2 * FRAGMENT_EDGE, columns))[0]
    return unpack_pair_tiles(packed, (1, FRAGMENT_EDGE, columns))[0]


def read_fragment_row(arena: Tensor, region: Region, row: int, block: int) -> Tensor:
    """bf16 [16]: columns 16 * block on, of one row of the first matrix of a pair-tile region.

    Raises IndexError outside of the region.
    """
    if not (0 <= row < region.shape[1] and 0 <= block < region.shape[2] // FRAGMENT_EDGE):
        raise IndexError(f"row {row}, block {block} are outside of {region.name} {region.shape}")
    tile, place = divmod(row, FRAGMENT_EDGE)
    packed = _tile_bytes(arena, region, tile, 0)
    fragment = packed[block * FRAGMENT_BYTES : (block + 1) * FRAGMENT_BYTES]
    return unpack_pair_tiles(fragment, (1, FRAGMENT_EDGE, FRAGMENT_EDGE))[0, place]


def padded(rows: int) -> int:
    """`rows` rounded up to whole tiles."""
    return -(-rows // FRAGMENT_EDGE) * FRAGMENT_EDGE


def _tile_bytes(arena: Tensor, region: Region, tile: int, matrix: int) -> Tensor:
    matrices, rows, columns = region.shape
    tile_rows = FRAGMENT_EDGE * (2 if region.layout == "gate_up_tiles" else 1)
    tiles = -(-rows // tile_rows)
    if not (0 <= tile < tiles and 0 <= matrix < matrices):
        raise IndexError(
            f"tile {tile} of matrix {matrix} is outside of {region.name}: "
            f"{matrices} matrices of {tiles} tiles"
        )
    size = tile_rows * columns * 2
    start = region.offset + (matrix * tiles + tile) * size
    return arena[start : start + size]


def _fill_pair_tiles(packed: Tensor, weights: Tensor) -> None:
    """`weights`: bf16 [matrices, rows, columns]."""
    matrices, rows, columns = weights.shape
    view = pair_tiles_view(packed, matrices, columns)
    words = weights.contiguous().view(torch.int32)
    whole = rows // FRAGMENT_EDGE
    view[:, :whole].copy_(_pair_rows(words[:, : whole * FRAGMENT_EDGE]))
    if rows % FRAGMENT_EDGE:
        rest = words[:, whole * FRAGMENT_EDGE :]
        zeros = rest.new_zeros(matrices, padded(rows) - rows, columns // 2)
        view[:, whole:].copy_(_pair_rows(torch.cat([rest, zeros], dim=1)))


def _pair_rows(words: Tensor) -> Tensor:
    """Registers [matrices, rows, columns / 2] with the axes of `pair_tiles_view`."""
    matrices, rows, columns = words.shape
    return words.view(matrices, rows // FRAGMENT_EDGE, 8, 2, columns // 8, 4, 2)


def _fill_gate_up_tiles(packed: Tensor, weights: Tensor) -> None:
    """`weights`: bf16 [matrices, 2 * width, columns]."""
    view = gate_up_tiles_view(packed, weights.shape[0], weights.shape[2])
    view.copy_(weights.contiguous().view(torch.int32).view(view.shape))


def _empty_pages(tokens: Tensor) -> Tensor:
    """Bytes [..., page_bytes] for `tokens` [..., PAGE_TOKENS, head_dim]."""
    size = tokens.shape[-2] * tokens.shape[-1] * 2
    return torch.empty((*tokens.shape[:-2], size), dtype=torch.uint8, device=tokens.device)
