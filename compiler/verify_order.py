"""Proof that nothing waits for ever, on one graph of program order and packet dependencies.

Nodes are all program entries, and one node for each op that hands packets on, which stands for
"all of this op's packets are there". Edges are

- from each entry to the next of its program;
- from every entry of an op to the op's node, and from there to every entry that reads its packets,
  as the op graph of `build_ops` says. A dynamic entry thus waits for all entries it could wait for,
  and an acyclic graph covers every choice of lengths and routing. Layer inputs are read by STAGE.

The ring is filled in program order and frees a chunk once the entry that it belongs to has used it.
In an acyclic graph some unfinished entry has all its packets and no unfinished entry before it on
its SM: the chunks before its own are free, so its own arrive, and it ends. The producer waits by
itself only for the routing of a layer, at that layer's first expert chunk, where the same holds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import networkx as nx

from mkc.compiler.ops import OpKind, build_ops
from mkc.compiler.place import PARTIAL_BUFFERS
from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.proof import Property, VerifyError, entry_name

OpKey = tuple[EntryKind, int]


@dataclass(frozen=True, slots=True)
class _Graph:
    """nodes: (sm, index, entry) by number; `ready`: the node of each op that hands packets on."""

    graph: nx.DiGraph
    nodes: list[tuple[int, int, Entry]]
    entries_of: dict[OpKey, list[int]]
    ready: dict[OpKey, int]


def check_order(plan: Plan) -> tuple[list[Property], int]:
    """Shows that the graph has no cycle and buffers are reused safely; also its number of edges.

    Raises VerifyError MKC301 (a cycle) or MKC303 (a buffer could be overwritten before it is read).
    """
    order = _build(plan)
    edges = order.graph.number_of_edges()
    if not nx.is_directed_acyclic_graph(order.graph):
        _raise_cycle(order)
    pairs = _check_reuse(plan, order)
    return [
        Property(
            "no deadlock",
            "program order and packet dependencies, each dynamic entry depending on all entries it "
            "could depend on, form an acyclic graph; the ring is filled in program order",
            edges,
        ),
        Property(
            "reuse of partials",
            "a path leads from every merge of layer l to every attention task of layer l + 2, "
            "which writes the same buffer",
            pairs,
        ),
    ], edges


def _build(plan: Plan) -> _Graph:
    nodes: list[tuple[int, int, Entry]] = []
    entries_of: dict[OpKey, list[int]] = {}
    graph = nx.DiGraph()
    for sm, program in enumerate(plan.programs):
        first = len(nodes)
        for index, entry in enumerate(program):
            entries_of.setdefault((entry.kind, entry.layer), []).append(len(nodes))
            nodes.append((sm, index, entry))
        nx.add_path(graph, range(first, len(nodes)))
    ready: dict[OpKey, int] = {}
    layers = len(plan.spec.layers)
    ops = build_ops(plan.spec)
    for source, destination, packets in ops.edges(data="packets"):
        if packets == "registers":
            continue
        producer = _key(ops.nodes[source]["op"].kind, ops.nodes[source]["op"].layer, layers)
        reader = _key(ops.nodes[destination]["op"].kind, ops.nodes[destination]["op"].layer, layers)
        if packets == "layer_input":
            reader = (EntryKind.STAGE, reader[1])
        if producer not in ready:
            node = ready[producer] = len(nodes) + len(ready)
            graph.add_edges_from((entry, node) for entry in entries_of.get(producer, ()))
        graph.add_edges_from((ready[producer], entry) for entry in entries_of.get(reader, ()))
    return _Graph(graph, nodes, entries_of, ready)


def _key(kind: OpKind, layer: int, layers: int) -> OpKey:
    """An op's entries: those of embed are in layer 0, of head and sample behind the last layer."""
    entry_kind = EntryKind[kind.name]
    if layer < 0:
        layer = 0 if kind == OpKind.EMBED else layers
    return entry_kind, layer


def _raise_cycle(order: _Graph) -> None:
    cycle = [edge[0] for edge in nx.find_cycle(order.graph)]
    entries = [order.nodes[node] for node in cycle if node < len(order.nodes)]
    sm, index, entry = entries[0]
    way = " -> ".join(f"SM {at} {entry_name(step)}" for at, _, step in entries[:6])
    more = f" and {len(entries) - 6} more" if len(entries) > 6 else ""
    raise VerifyError("MKC301", f"waits for itself: {way}{more} -> back", sm, index, entry)


def _check_reuse(plan: Plan, order: _Graph) -> int:
    """Walks from "all merges of layer l are done" up to layer l + 2, for every l."""
    pairs = 0
    layers = len(plan.spec.layers)
    for layer in range(layers - PARTIAL_BUFFERS):
        merge = (EntryKind.MERGE, layer)
        start = order.ready[merge]
        reached = _reachable(order, start, layer + PARTIAL_BUFFERS)
        readers = order.entries_of.get(merge, [])
        writers = order.entries_of.get((EntryKind.ATTENTION, layer + PARTIAL_BUFFERS), [])
        for writer in writers:
            if writer not in reached:
                sm, index, entry = order.nodes[writer]
                raise VerifyError(
                    "MKC303",
                    f"may write packet set partials before the merges of layer {layer} read it",
                    sm,
                    index,
                    entry,
                )
        pairs += len(readers) * len(writers)
    return pairs


def _reachable(order: _Graph, start: int, last_layer: int) -> set[int]:
    """Nodes behind `start`, not going on from entries of layers after `last_layer`."""
    reached = {start}
    queue = deque([start])
    while queue:
        for node in order.graph.successors(queue.popleft()):
            is_near = node >= len(order.nodes) or order.nodes[node][2].layer <= last_layer
            if node not in reached and is_near:
                reached.add(node)
                queue.append(node)
    return reached
