"""Pass `build_ops`: the model's graph, one node per op, before any tile or SM is chosen.

The graph of one decode step:

    embed -> [ router -> ffn_up -> ffn_down ] -> residual -> ... -> head -> sample
             [ qkv -> attention -> merge -> out ]

Edges name the packets that carry values from one op to the next. Between `out`, `ffn_down` and
`residual` no packets travel: one task owner keeps that sum in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import networkx as nx

from mkc.compiler.spec import DenseFfn, ExpertFfn, ModelSpec

BF16_BYTES = 2


class OpKind(StrEnum):
    """The kinds of op the kernel knows; their order is the order of a layer's program."""

    EMBED = "embed"
    ROUTER = "router"
    QKV = "qkv"
    ATTENTION = "attention"
    FFN_UP = "ffn_up"
    MERGE = "merge"
    OUT = "out"
    FFN_DOWN = "ffn_down"
    RESIDUAL = "residual"
    HEAD = "head"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True)
class Op:
    """A node of the graph.

    rows, columns: shape [out, in] of one weight matrix, 0 if the op has none.
    matrices: how many such matrices exist; active: how many one row of the batch uses.
    window: tokens an attention op sees, None for all.
    """

    kind: OpKind
    layer: int
    rows: int = 0
    columns: int = 0
    matrices: int = 0
    active: int = 0
    window: int | None = None

    @property
    def name(self) -> str:
        """Unique in the graph, such as `layer3.qkv`."""
        return self.kind.value if self.layer < 0 else f"layer{self.layer}.{self.kind.value}"

    def weight_bytes(self, active: float | None = None) -> float:
        """Bytes of weights streamed in a step that uses `active` matrices (default: one row's)."""
        used = self.active if active is None else min(active, self.matrices)
        return used * self.rows * self.columns * BF16_BYTES

    def flops(self, batch: int) -> float:
        """Multiply-adds, counted as two, of a step with `batch` rows (weights only)."""
        return 2.0 * batch * self.active * self.rows * self.columns


def build_ops(spec: ModelSpec) -> nx.DiGraph:
    """ModelSpec -> op graph: nodes are op names with attribute `op`, edges have `packets`."""
    graph = nx.DiGraph()

    def add(op: Op) -> str:
        graph.add_node(op.name, op=op)
        return op.name

    def connect(source: str, destination: str, packets: str) -> None:
        graph.add_edge(source, destination, packets=packets)

    hidden, attention = spec.hidden_size, spec.attention
    queries = attention.query_heads * attention.head_dim
    qkv_rows = queries + 2 * attention.kv_heads * attention.head_dim
    previous = add(Op(OpKind.EMBED, -1))
    for index, layer in enumerate(spec.layers):
        ffn = layer.ffn
        experts, active = ffn_matrices(ffn)
        qkv = add(Op(OpKind.QKV, index, qkv_rows, hidden, 1, 1))
        attend = add(Op(OpKind.ATTENTION, index, window=layer.window))
        merge = add(Op(OpKind.MERGE, index))
        out = add(Op(OpKind.OUT, index, hidden, queries, 1, 1))
        up = add(Op(OpKind.FFN_UP, index, 2 * ffn.width, hidden, experts, active))
        down = add(Op(OpKind.FFN_DOWN, index, hidden, ffn.width, experts, active))
        residual = add(Op(OpKind.RESIDUAL, index))
        connect(previous, qkv, "layer_input")
        connect(previous, up, "layer_input")
        if isinstance(ffn, ExpertFfn):
            router = add(Op(OpKind.ROUTER, index, ffn.experts, hidden, 1, 1))
            connect(previous, router, "layer_input")
            connect(router, up, "router_logits")
            connect(router, down, "router_logits")
        connect(qkv, attend, "qkv")
        connect(attend, merge, "partials")
        connect(merge, out, "merged")
        connect(up, down, "hidden")
        connect(out, residual, "registers")
        connect(down, residual, "registers")
        connect(previous, residual, "registers")
        previous = residual
    head = add(Op(OpKind.HEAD, -1, spec.vocab_size, hidden, 1, 1))
    connect(previous, head, "layer_input")
    connect(head, add(Op(OpKind.SAMPLE, -1)), "candidates")
    return graph


def ffn_matrices(ffn: DenseFfn | ExpertFfn) -> tuple[int, int]:
    """(matrices that exist, matrices one row uses); a dense FFN is one that every row uses."""
    return (ffn.experts, ffn.experts_per_token) if isinstance(ffn, ExpertFfn) else (1, 1)


def expected_active(experts: int, per_token: int, batch: int) -> float:
    """Distinct experts that `batch` rows touch on average when routing is uniform."""
    return experts * (1.0 - (1.0 - per_token / experts) ** batch)


def ops_of(graph: nx.DiGraph) -> list[Op]:
    """All ops in topological order, ties in order of insertion."""
    return [graph.nodes[name]["op"] for name in nx.topological_sort(graph)]
