"""Arithmetic of the interpreter's tasks: weights as float32 tiles, products, routing, angles.

Every product runs row by row in one fixed shape, so that a row's bits don't depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mkc.compiler.plan import Plan
from mkc.compiler.rules import active_experts, top_experts
from mkc.compiler.spec import ModelSpec
from mkc.runtime.packets import Floats
from mkc.runtime.packing import (
    NORM_REGION,
    read_fragment_row,
    read_tile,
    region_bytes,
    unpack_rows,
)


@dataclass(frozen=True, slots=True)
class Routing:
    """Who uses which expert of a layer; a dense layer is one expert that all live rows use.

    active: experts that any row chose, ascending. users: of each of them its rows, its slot in each
    (its rank among the row's own experts) and its weight in each [n, 1].
    """

    active: list[int]
    users: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]]


class PackedWeights:
    """The arena as float32 tiles, unpacked one at a time."""

    def __init__(self, plan: Plan, arena: Tensor) -> None:
        self.arena = arena
        self.regions = {(region.name, region.layer): region for region in plan.layout.regions}
        norms = self.regions[NORM_REGION, -1]
        self.norms: Floats = (
            unpack_rows(region_bytes(arena, norms), norms.shape[1:]).float().numpy()
        )
        self.embedding = "head" if plan.spec.tied_head else "embedding"

    def tile(self, name: str, layer: int, tile: int, matrix: int = 0) -> Floats:
        """[16 or 32, columns] of a region's tile, see `read_tile`."""
        values: Floats = (
            read_tile(self.arena, self.regions[name, layer], tile, matrix).float().numpy()
        )
        return values

    def embed(self, token: int, tile: int) -> Floats:
        """[16]: one tile of a token's embedding."""
        region = self.regions[self.embedding, -1]
        values: Floats = read_fragment_row(self.arena, region, token, tile).float().numpy()
        return values


def choose_experts(rows: int, live: npt.NDArray[np.int64], logits: Floats, count: int) -> Routing:
    """`count` experts of each live row by its `logits` [live rows, experts].

    An expert's weight is the sigmoid of its logit, 1 for a logit of +inf.
    """
    chosen: list[list[int]] = [[] for _ in range(rows)]
    for row, row_logits in zip(live.tolist(), logits.tolist(), strict=True):
        chosen[row] = top_experts(row_logits, count)
    scores = np.zeros((rows, logits.shape[1]), np.float32)
    scores[live] = 1 / (1 + np.exp(-logits))
    active = active_experts(chosen)
    users = {}
    for expert in active:
        using = [row for row, ids in enumerate(chosen) if expert in ids]
        slots = [chosen[row].index(expert) for row in using]
        users[expert] = (np.array(using), np.array(slots), scores[using, expert, None])
    return Routing(active, users)


def rope_angles(spec: ModelSpec, positions: Sequence[int]) -> tuple[Floats, Floats]:
    """cos and sin [rows, head_dim / 2] of each row's angles, float32 as in transformers."""
    head_dim = spec.attention.head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse_frequencies = 1.0 / (spec.rope.theta**exponents)
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * inverse_frequencies
    return angles.cos().numpy(), angles.sin().numpy()


def products(tile: Floats, x: Floats) -> Floats:
    """[rows, tile rows]: tile [tile rows, columns] times each row of x [rows, columns]."""
    result: Floats = np.matmul(tile, x[:, :, None])[:, :, 0]
    return result


def round_bf16(values: Floats) -> Floats:
    """Float32 values rounded to bf16, ties to even."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    rounded: Floats = tensor.bfloat16().float().numpy()
    return rounded
