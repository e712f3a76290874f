"""What the report says, from a plan, a simulated step, a proof and the assembler's log."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mkc.compiler.ops import OpKind, build_ops, ops_of
from mkc.compiler.plan import Plan
from mkc.compiler.program import EntryKind
from mkc.compiler.simulate import SimulatedStep, ring_slots, window_chunks
from mkc.compiler.simulate_causes import Hop, HopKind
from mkc.compiler.spec import ExpertFfn, LayerSpec
from mkc.compiler.trace import MeasuredEvent

if TYPE_CHECKING:
    from mkc.compiler.artifact import Artifact
    from mkc.compiler.pipeline import Compiled


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """All that the report is made of. points, kernels and proof are as in the manifest."""

    plan: Plan
    step: SimulatedStep
    points: list[dict[str, Any]]
    kernels: list[dict[str, Any]]
    proof: dict[str, Any]
    measured: tuple[MeasuredEvent, ...] = ()

    @staticmethod
    def of_compiled(compiled: Compiled) -> ReportInputs:
        """Of a compilation that is being written."""
        return ReportInputs(
            plan=compiled.plan,
            step=compiled.prediction.step,
            points=[asdict(point) for point in compiled.prediction.points],
            kernels=[asdict(kernel) for kernel in compiled.assembly.kernels],
            proof=asdict(compiled.proof),
        )

    @staticmethod
    def of_artifact(
        artifact: Artifact, step: SimulatedStep, measured: Sequence[MeasuredEvent] = ()
    ) -> ReportInputs:
        """Of an artifact, with a step simulated anew."""
        manifest = artifact.manifest
        return ReportInputs(
            plan=artifact.plan,
            step=step,
            points=manifest["prediction"],
            kernels=manifest["kernels"],
            proof=manifest["proof"],
            measured=tuple(measured),
        )


@dataclass(frozen=True, slots=True)
class OpShare:
    """What one kind of op streams in the step, over all layers."""

    name: str
    title: str
    bytes: int
    share: float
    floor_seconds: float
    note: str


OP_TITLES = {
    "embed": ("embedding", "looks up the row's token"),
    "stage": ("layer input", "brings the layer's input to every SM"),
    "router": ("router", "scores the experts"),
    "qkv": ("Q, K, V", "makes queries, keys and values"),
    "attention": ("attention", "reads the keys and values of earlier tokens"),
    "ffn_up": ("expert up", "gate and up matrices of the chosen experts"),
    "merge": ("merge", "joins the parts of attention that different SMs did"),
    "out": ("attention out", "projects attention's output back"),
    "ffn_down": ("expert down", "down matrices of the chosen experts"),
    "residual": ("residual", "adds both to the row's state, the next layer's input"),
    "head": ("head", "scores every word of the vocabulary"),
    "sample": ("sample", "chooses the next token"),
}


def op_shares(step: SimulatedStep) -> list[OpShare]:
    """Bytes of each kind of op, most first."""
    sizes: dict[str, int] = {}
    for program, times, stream in zip(step.tasks.programs, step.times, step.streams, strict=True):
        for place, task in enumerate(program):
            first, behind = times.first_piece[place : place + 2]
            name = task.entry.kind.name.lower()
            sizes[name] = sizes.get(name, 0) + sum(stream.bytes[first:behind])
    rate = step.plan.target.hbm_bytes_per_second
    return [
        OpShare(name, OP_TITLES[name][0], size, size / step.bytes, size / rate, OP_TITLES[name][1])
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])
        if size
    ]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are alike: how many, which one stands for them, and what a step makes of it."""

    title: str
    attention: str
    ffn: str
    count: int
    layer: int
    bytes: int
    seconds: float


def layer_kinds(step: SimulatedStep) -> list[LayerKind]:
    """The kinds of layer, the most frequent first; one from the middle stands for each."""
    spec = step.plan.spec
    found: dict[LayerSpec, list[int]] = {}
    for number, layer in enumerate(spec.layers):
        found.setdefault(layer, []).append(number)
    sizes, seconds = step.layer_bytes(), step.layer_seconds()
    kinds = []
    for layer, numbers in found.items():
        middle = numbers[len(numbers) // 2]
        window = "all tokens" if layer.window is None else f"the last {layer.window} tokens"
        ffn = layer.ffn
        feeds = f"one FFN of width {ffn.width}"
        if isinstance(ffn, ExpertFfn):
            feeds = f"{ffn.experts_per_token} of {ffn.experts} experts of width {ffn.width}"
        sees = "full attention" if layer.window is None else "sliding attention"
        title = sees + (", experts" if isinstance(ffn, ExpertFfn) else ", dense")
        rope = "" if layer.rope else ", no position encoding"
        kinds.append(
            LayerKind(
                title, window + rope, feeds, len(numbers), middle, sizes[middle], seconds[middle]
            )
        )
    return sorted(kinds, key=lambda kind: (-kind.count, kind.layer))


def chain_seconds(hops: Sequence[Hop]) -> dict[str, float]:
    """Seconds of the critical path by what they go by with."""
    seconds = {kind.value: 0.0 for kind in HopKind}
    for hop in hops:
        seconds[hop.kind.value] += hop.seconds
    return seconds


def hops_of_layer(step: SimulatedStep, hops: Sequence[Hop], layer: int) -> list[Hop]:
    """The part of the critical path between a layer's input and the next one's."""
    begin, end = step.layer_begin(layer), step.layer_begin(layer + 1)
    return [hop for hop in hops if begin - 1e-9 <= hop.begin < end - 1e-9]


def bytes_text(size: float) -> str:
    """Bytes in powers of ten, as bandwidth is given; no line breaks before the unit."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= scale:
            return f"{size / scale:.3g}\u00a0{unit}"
    return f"{size:.0f}\u00a0B"


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A box of the op graph, with its bytes in one layer's step."""

    name: str
    title: str
    text: str
    x: int
    y: int


def graph_nodes(step: SimulatedStep, layer: int) -> tuple[list[GraphNode], list[str]]:
    """Boxes of one layer with embedding and head, and the arrows between them as SVG paths.

    Attention's chain runs down the left side, the FFN's down the right.
    """
    graph = build_ops(step.plan.spec)
    ops = {op.kind: op for op in ops_of(graph) if op.layer in (-1, layer)}
    nodes = []
    for kind, (column, row) in _PLACES.items():
        if kind not in ops:
            continue
        op = ops[kind]
        size = op.weight_bytes()
        text = bytes_text(size) if size else ""
        if kind == OpKind.ATTENTION:
            text = f"{bytes_text(_attention_bytes(step, layer))} of K and V"
        if op.matrices > 1:
            text = f"{op.active} of {op.matrices}: {text}"
        x, y = column * 105 + 95, row * 64 + 30
        nodes.append(GraphNode(kind.value, OP_TITLES[kind.value][0], text, x, y))
    places = {node.name: (node.x, node.y) for node in nodes}
    arrows = []
    for source, target in _ARROWS:
        if source in places and target in places:
            arrows.append(_arrow(places[source], places[target]))
    if "router" not in places:
        arrows.append(_arrow(places["embed"], places["ffn_up"]))
    return nodes, arrows


def _attention_bytes(step: SimulatedStep, layer: int) -> int:
    total = 0
    for program, times, stream in zip(step.tasks.programs, step.times, step.streams, strict=True):
        for place, task in enumerate(program):
            if (task.entry.kind, task.entry.layer) == (EntryKind.ATTENTION, layer):
                first, behind = times.first_piece[place : place + 2]
                total += sum(stream.bytes[first:behind])
    return total


_PLACES = {
    OpKind.EMBED: (1, 0),
    OpKind.QKV: (0, 1),
    OpKind.ROUTER: (2, 1),
    OpKind.ATTENTION: (0, 2),
    OpKind.FFN_UP: (2, 2),
    OpKind.MERGE: (0, 3),
    OpKind.FFN_DOWN: (2, 4),
    OpKind.OUT: (0, 4),
    OpKind.RESIDUAL: (1, 5),
    OpKind.HEAD: (1, 6),
    OpKind.SAMPLE: (1, 7),
}
_ARROWS = (
    ("embed", "qkv"),
    ("embed", "router"),
    ("qkv", "attention"),
    ("router", "ffn_up"),
    ("attention", "merge"),
    ("merge", "out"),
    ("ffn_up", "ffn_down"),
    ("out", "residual"),
    ("ffn_down", "residual"),
    ("residual", "head"),
    ("head", "sample"),
)


def _arrow(source: tuple[int, int], target: tuple[int, int]) -> str:
    """From the lower edge of one box to the upper edge of another."""
    x, y, to_x, to_y = source[0], source[1] + 21, target[0], target[1] - 23
    middle = (y + to_y) // 2
    return f"M{x} {y}C{x} {middle} {to_x} {middle} {to_x} {to_y}"


def facts(inputs: ReportInputs) -> dict[str, Any]:
    """Figures of plan and target that the text names."""
    plan, step = inputs.plan, inputs.step
    rows = len(step.tasks.lengths)
    return {
        "version": importlib.metadata.version("mkc"),
        "entries": sum(len(program) for program in plan.programs),
        "tasks": sum(len(program) for program in step.tasks.programs),
        "lengths": list(step.tasks.lengths),
        "parameters": sum(a * b * c for a, b, c in (r.shape for r in plan.layout.regions)),
        "ring_slots": ring_slots(plan, rows),
        "chunk_bytes": plan.tiling.chunk_bytes,
        "window_bytes": window_chunks(plan) * plan.tiling.chunk_bytes,
        "has_experts": any(layer.routed for layer in plan.tiling.layers),
        "is_measured": bool(inputs.measured),
        "launch_seconds": plan.target.measured.launch_seconds,
    }
