"""Pass `predict`: bytes of a step, its floor on the target, and an estimate of its time.

The floor is exact: bytes over the datasheet's bandwidth. The time is an estimate from two figures
of the target, what a stream reaches and what a hand-off costs. Every SM streams its program at an
equal share of the bandwidth and stops for three things in a layer:

- the layer's input, complete one hand-off after the last SM ends the layer before;
- the routing, one hand-off after that, without which no expert can be streamed;
- the experts' hidden states, complete one hand-off after the last SM ends `ffn_up`.

While it waits it goes on streaming until its ring is full, so a wait shows only beyond a ring's
worth, and SMs with unequal shares level out over layers as far as the ring reaches. Queues in the
memory system, polls and the arithmetic are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mkc.compiler.ops import BF16_BYTES, expected_active
from mkc.compiler.plan import Plan
from mkc.compiler.program import EntryKind
from mkc.compiler.rules import attention_units, page_span
from mkc.compiler.tile import FRAGMENT_BYTES, LayerTiling

BATCHES = (1, 2, 4, 8)
CONTEXTS = (1024, 8192, 32768)

PerSm = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PredictedPoint:
    """A step of `batch` rows that each see `context` tokens, their new one included.

    bytes: streamed from HBM, with as many experts as uniform routing touches on average;
    share_of_floor: floor over predicted time, 1 at best.
    """

    batch: int
    context: int
    bytes: int
    floor_seconds: float
    predicted_seconds: float
    share_of_floor: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Estimates of a plan at some batch sizes and contexts, batches first."""

    points: tuple[PredictedPoint, ...]

    def point(self, batch: int, context: int) -> PredictedPoint:
        """The point of that batch and context. Raises KeyError."""
        for point in self.points:
            if (point.batch, point.context) == (batch, context):
                return point
        raise KeyError(f"no prediction for batch {batch} at context {context}")


def predict(plan: Plan) -> Prediction:
    """Plan -> estimates for batch 1, 2, 4, 8 and contexts 1024, 8192, 32768, as far as allowed.

    A model of fewer positions than 1024 is shown at its longest sequence instead.
    """
    longest = plan.spec.max_positions
    contexts = [context for context in CONTEXTS if context <= longest] or [longest]
    batches = [batch for batch in BATCHES if batch <= plan.tiling.max_rows]
    return Prediction(
        tuple(_predict_point(plan, batch, context) for batch in batches for context in contexts)
    )


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
        active_per_layer = [_active(layer, batch) for layer in tiling.layers]
    total = float((len(tiling.layers) + 1) * plan.spec.hidden_size * BF16_BYTES)
    for layer, spec, routed in zip(tiling.layers, plan.spec.layers, active_per_layer, strict=True):
        active = routed if layer.routed else layer.matrices
        fragments = tiling.hidden_tiles * (
            tiling.qkv_tiles + tiling.attention_tiles + active * 3 * layer.width_tiles
        )
        if layer.routed:
            fragments += _router_tiles(layer) * tiling.hidden_tiles
        pages = sum(page_span(length - 1, spec.window)[1] for length in lengths)
        total += fragments * FRAGMENT_BYTES + pages * tiling.kv_heads * 2 * tiling.page_bytes
    total += tiling.vocab_tiles * tiling.hidden_tiles * FRAGMENT_BYTES
    return round(total)


def _active(layer: LayerTiling, batch: int) -> float:
    return expected_active(layer.matrices, layer.slots, batch) if layer.routed else layer.matrices


def _router_tiles(layer: LayerTiling) -> int:
    return -(-layer.matrices // 16)


def _predict_point(plan: Plan, batch: int, context: int) -> PredictedPoint:
    size = step_bytes(plan, batch, [context] * batch)
    floor = size / plan.target.hbm_bytes_per_second
    seconds = _step_seconds(plan, batch, context)
    return PredictedPoint(batch, context, size, floor, seconds, floor / seconds)


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """Bytes of each SM in one layer: before the experts, their gate and up, what follows."""

    before: PerSm
    up: PerSm
    out: PerSm
    down: PerSm


def _step_seconds(plan: Plan, batch: int, context: int) -> float:
    """The recurrence of the module's docstring; all times are arrays over SMs."""
    target, tiling = plan.target, plan.tiling
    rate = target.hbm_bytes_per_second * target.measured.stream_share / target.sms
    hand_off = target.measured.hand_off_seconds
    slots = next(shared.ring_slots for shared in plan.layout.shared if shared.rows >= batch)
    ring = slots * tiling.chunk_bytes

    def beyond_ring(size: PerSm) -> PerSm:
        return np.maximum(size - ring, 0.0) / rate

    streamed = np.zeros(target.sms)
    complete = 0.0  # when the last SM had ended the layer before
    for layer, size in zip(tiling.layers, _layer_bytes(plan, batch, context), strict=True):
        begin = complete + hand_off
        experts = begin + hand_off if layer.routed else 0.0
        up = np.maximum(streamed + size.before / rate, experts) + size.up / rate
        up = np.maximum(up, begin + beyond_ring(size.before + size.up))
        hidden = float(up.max()) + hand_off
        streamed = np.maximum(up + (size.out + size.down) / rate, hidden + beyond_ring(size.down))
        complete = float(streamed.max())
    head = _head_bytes(plan)
    streamed = np.maximum(streamed + head / rate, complete + hand_off + beyond_ring(head))
    return float(streamed.max()) + hand_off + target.measured.launch_seconds


def _layer_bytes(plan: Plan, batch: int, context: int) -> list[_LayerBytes]:
    tiling, sms = plan.tiling, plan.target.sms
    pages = {
        window: _pages_of_ranks(plan, batch, context, window)
        for window in {layer.window for layer in plan.spec.layers}
    }
    active = [_active(layer, batch) for layer in tiling.layers]
    tasks = [a * layer.width_tiles for a, layer in zip(active, tiling.layers, strict=True)]
    row_bytes = tiling.hidden_tiles * FRAGMENT_BYTES
    sizes = np.zeros((len(tiling.layers), 4, sms))
    for sm, program in enumerate(plan.programs):
        for entry in program:
            layer = entry.layer
            match entry.kind:
                case EntryKind.ROUTER | EntryKind.QKV:
                    sizes[layer, 0, sm] += row_bytes
                case EntryKind.ATTENTION:
                    window = plan.spec.layers[layer].window
                    sizes[layer, 0, sm] += pages[window][entry.tile] * 2 * tiling.page_bytes
                case EntryKind.FFN_UP:
                    share = max(0, -(-(round(tasks[layer]) - entry.tile) // sms))
                    sizes[layer, 1, sm] += share * 2 * row_bytes
                case EntryKind.OUT:
                    sizes[layer, 2, sm] += tiling.attention_tiles * FRAGMENT_BYTES
                case EntryKind.FFN_DOWN:
                    sizes[layer, 3, sm] += tasks[layer] * FRAGMENT_BYTES
    return [_LayerBytes(*layer) for layer in sizes]


def _pages_of_ranks(plan: Plan, batch: int, context: int, window: int | None) -> list[int]:
    tiling, sms = plan.tiling, plan.target.sms
    positions = [context - 1] * batch
    return [
        sum(
            unit.end_page - unit.first_page
            for unit in attention_units(
                rank, sms, positions, window, tiling.kv_heads, tiling.max_splits
            )
        )
        for rank in range(sms)
    ]


def _head_bytes(plan: Plan) -> PerSm:
    tiling, sms = plan.tiling, plan.target.sms
    head = np.zeros(sms)
    for sm, program in enumerate(plan.programs):
        for entry in program[-2:]:
            if entry.kind == EntryKind.HEAD:
                tiles = len(range(entry.tile, tiling.vocab_tiles, sms))
                head[sm] = tiles * tiling.hidden_tiles * FRAGMENT_BYTES
    return head
