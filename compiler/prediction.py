"""Pass `simulate`: a step's time at several batch sizes and contexts, from simulated steps.

One step is simulated whole: the smallest batch at the reference context, which report and trace
show. The other batch sizes are simulated up to the layer by which every kind of layer has come up
often enough; each layer left out costs its bytes at the rate that a stream reaches, and what layers
of its kind cost beyond that. In the same way a context costs what its K and V pages add.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.simulate import SimulatedStep, simulate_step
from mkc.compiler.spec import LayerSpec
from mkc.compiler.traffic import floor_seconds, step_bytes

BATCHES = (1, 2, 4, 8)
CONTEXTS = (1024, 8192, 32768)
REFERENCE_CONTEXT = 8192
OCCURRENCES = 2
"""Layers of a kind that are simulated before others of that kind are left out."""
PIECE_BYTES = 32768


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
    """Predicted times, batches first, and the step that was simulated whole."""

    points: tuple[PredictedPoint, ...]
    step: SimulatedStep

    def point(self, batch: int, context: int) -> PredictedPoint:
        """The point of that batch and context. Raises KeyError."""
        for point in self.points:
            if (point.batch, point.context) == (batch, context):
                return point
        raise KeyError(f"no prediction for batch {batch} at context {context}")


def predict(plan: Plan) -> Prediction:
    """Plan -> times for batch 1, 2, 4, 8 and contexts 1024, 8192, 32768, as far as allowed.

    A model of fewer positions than a context is shown at its longest sequence instead.
    """
    longest = plan.spec.max_positions
    contexts = [context for context in CONTEXTS if context <= longest] or [longest]
    reference = min(REFERENCE_CONTEXT, longest)
    step = simulate_step(plan, [reference], piece_bytes=PIECE_BYTES)
    points = []
    for batch in BATCHES:
        if batch > plan.tiling.max_rows:
            continue
        seconds, size = (
            (step.seconds, step.bytes) if batch == 1 else _extrapolated(plan, batch, reference)
        )
        for context in contexts:
            needed = step_bytes(plan, batch, [context] * batch)
            predicted = seconds + (needed - size) / stream_rate(plan)
            floor = floor_seconds(plan, needed)
            points.append(
                PredictedPoint(batch, context, needed, floor, predicted, floor / predicted)
            )
    return Prediction(tuple(points), step)


def stream_rate(plan: Plan) -> float:
    """Bytes a second that all SMs together stream."""
    return plan.target.hbm_bytes_per_second * plan.target.measured.stream_share


def _extrapolated(plan: Plan, batch: int, context: int) -> tuple[float, int]:
    """(seconds, bytes) of a step of which the first layers are simulated."""
    layers = representative_layers(plan)
    step = simulate_step(shortened(plan, layers), [context] * batch, piece_bytes=PIECE_BYTES)
    extra: dict[LayerSpec, list[float]] = {}
    sizes = step.layer_bytes()
    for layer, seconds in enumerate(step.layer_seconds()):
        beyond = seconds - sizes[layer] / stream_rate(plan)
        extra.setdefault(plan.spec.layers[layer], []).append(beyond)
    left_out = plan.spec.layers[layers:]
    needed = step_bytes(plan, batch, [context] * batch)
    seconds = step.seconds + (needed - step.bytes) / stream_rate(plan)
    for spec in left_out:
        seconds += sum(extra[spec][1:] or extra[spec]) / max(1, len(extra[spec]) - 1)
    return seconds, needed


def representative_layers(plan: Plan) -> int:
    """Layers from the first on, in which each kind comes up OCCURRENCES times if it ever does."""
    wanted: dict[LayerSpec, int] = {}
    for spec in plan.spec.layers:
        wanted[spec] = min(OCCURRENCES, wanted.get(spec, 0) + 1)
    for layer, spec in enumerate(plan.spec.layers):
        wanted[spec] -= 1
        if all(count <= 0 for count in wanted.values()):
            return layer + 1
    return len(plan.spec.layers)


def shortened(plan: Plan, layers: int) -> Plan:
    """The plan of a model that ends after `layers` layers, its programs otherwise the same."""
    last = len(plan.spec.layers)

    def kept(program: tuple[Entry, ...]) -> Iterator[Entry]:
        for entry in program:
            if entry.layer < layers or entry.kind == EntryKind.EMBED:
                yield entry
            elif entry.layer == last:
                yield replace(entry, layer=layers)

    return replace(
        plan,
        spec=plan.spec.model_copy(update={"layers": plan.spec.layers[:layers]}),
        tiling=replace(plan.tiling, layers=plan.tiling.layers[:layers]),
        programs=tuple(tuple(kept(program)) for program in plan.programs),
    )
