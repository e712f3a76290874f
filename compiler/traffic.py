"""The bytes that a step streams from HBM: exact, and with them the floor of its time."""

from __future__ import annotations

from collections.abc import Sequence

from mkc.compiler.ops import BF16_BYTES, expected_active
from mkc.compiler.plan import Plan
from mkc.compiler.rules import page_span
from mkc.compiler.tile import FRAGMENT_BYTES, FRAGMENT_EDGE, LayerTiling


def step_bytes(
    plan: Plan,
    batch: int,
    lengths: Sequence[int],
    active_per_layer: Sequence[float] | None = None,
) -> int:
    """Bytes that one step streams from HBM: weights, norms, and whole pages of K and V.

    lengths: tokens that each of the `batch` rows sees, its new one included; active_per_layer:
    distinct experts of each layer's measured routing (dense layers are ignored), by default the
    expectation of uniform routing. Raises ValueError where the counts do not match.
    """
    tiling = plan.tiling
    if len(lengths) != batch or min(lengths, default=0) < 1:
        raise ValueError(f"{batch} rows need {batch} lengths of at least 1, not {list(lengths)}")
    if active_per_layer is None:
        active_per_layer = [active_matrices(layer, batch) for layer in tiling.layers]
    total = float((len(tiling.layers) + 1) * plan.spec.hidden_size * BF16_BYTES)
    for layer, spec, routed in zip(tiling.layers, plan.spec.layers, active_per_layer, strict=True):
        active = routed if layer.routed else layer.matrices
        fragments = tiling.hidden_tiles * (
            tiling.qkv_tiles + tiling.attention_tiles + active * 3 * layer.width_tiles
        )
        if layer.routed:
            fragments += -(-layer.matrices // FRAGMENT_EDGE) * tiling.hidden_tiles
        pages = sum(page_span(length - 1, spec.window)[1] for length in lengths)
        total += fragments * FRAGMENT_BYTES + pages * tiling.kv_heads * 2 * tiling.page_bytes
    total += tiling.vocab_tiles * tiling.hidden_tiles * FRAGMENT_BYTES
    return round(total)


def active_matrices(layer: LayerTiling, batch: int) -> float:
    """Matrices of an FFN that `batch` rows touch on average when routing is uniform."""
    return expected_active(layer.matrices, layer.slots, batch) if layer.routed else layer.matrices


def floor_seconds(plan: Plan, size: float) -> float:
    """Seconds that `size` bytes take at the datasheet's bandwidth: no step is faster."""
    return size / plan.target.hbm_bytes_per_second
