"""Proof that nothing waits for ever: three actors on each SM, in one graph of all their waits.

On an SM the consumer warps, the producer warp and the helper warps each walk the SM's program. A
node is what one of the three does for one entry:

- consumers: every entry but MERGE;
- producer: the entries that stream, and STAGE, where it says that it has begun a layer;
- helpers: STAGE of a routed layer, whose routing they work out, and MERGE.

An edge u -> v says that v may have to wait until u is done:

- each actor's entries follow one another in the order of the program;
- consumers wait for the producer's chunks of the same entry;
- the producer waits for room in the ring. The graph has the shallowest ring that works: to send for
  an entry's chunks, the consumers must be done with all entries before it. A deeper one waits less;
- FFN_UP and FFN_DOWN of a routed layer, of consumers and of the producer, wait for the helpers'
  routing, as the producer needs the experts' ids; the helpers' routing waits until consumers and
  producer have begun the layer before, as its table was theirs two routed layers ago;
- one node for each op that hands packets on stands for "all of this op's packets are there": from
  every entry of the op to it, and from it to every node that reads its packets. So a dynamic entry
  waits for all entries it could wait for, and one graph covers all lengths and routings.

If it is acyclic, all is done, by induction over an order of its nodes: once all nodes before a node
are done, it ends. Helper warps have nothing else to wait for but one another, at one barrier for
each routing, which all of them reach. For consumers and producer look inside the entry. All that
their warps do there has a place in one order: by tile or split; within a tile first chunks by their
numbers, then opening this tile's part of the sums, closing it, collecting all parts; within a split
pairs of chunks by their numbers, then lending, taking what was lent, sending. Each warp's actions
ascend in this order, and each waits only for actions before it, so the first that is not done can
be done:

- *Taking chunk n* waits until it is sent for, thus for chunk n - slots to be given back, and for
  copies of earlier chunks, which need nobody. That chunk has a smaller number, and its sharers are
  not waiting for n: a warp holds one chunk at a time, in attention the pair n - 1 and n, so two
  slots are enough. A window of one chunk ends by itself.
- *Opening a tile's part* waits for the collection of the tile before the last, *collecting* for all
  parts of this tile.
- *Lending* waits until the state that the warp lent before, of an earlier split, was taken. The
  warp that finishes a split waits for what is lent for it, and its scratch like a lender.
- *Packets* are in the graph: a warp may wait for the new token's K and V while it holds a pair of
  chunks, or for hidden values between chunks, but these come from nodes before this one.

A buffer that is used again needs more than this: a wait that *will* happen, not one that may. From
the merges of layer l `_check_reuse` follows only such waits: OUT reads all tiles of all live rows'
merged values; RESIDUAL is sent once all warps of its SM are done with OUT; STAGE reads all tiles of
a layer's input; QKV is sent once all warps of its SM have staged. Every split reads queries of QKV
before it is sent. So if every QKV task of layer l + 2 is behind all merges of layer l, the splits
of layer l + 2 may use their buffer. Idle rows have no splits, and their merges read none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import networkx as nx

from mkc.compiler.ops import OpKind, build_ops
from mkc.compiler.place import PARTIAL_BUFFERS
from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.proof import Property, VerifyError, entry_name
from mkc.compiler.verify_programs import STREAMS_WEIGHTS

OpKey = tuple[EntryKind, int]


class Actor(Enum):
    """Who of an SM's warps walks the program here."""

    CONSUMERS = "consumers"
    PRODUCER = "producer"
    HELPERS = "helpers"


@dataclass(frozen=True, slots=True)
class Node:
    """What one actor of an SM does for one entry of its program."""

    sm: int
    index: int
    entry: Entry
    actor: Actor


STREAMS = (*STREAMS_WEIGHTS, EntryKind.ATTENTION)
USES_ROUTING = (EntryKind.FFN_UP, EntryKind.FFN_DOWN)
CERTAIN = (EntryKind.MERGE, EntryKind.RESIDUAL)
"""Ops whose packets are all read by every entry that reads any, whatever lengths and routing."""


def actors_of(entry: Entry, plan: Plan) -> tuple[Actor, ...]:
    """Who has something to do for an entry, in the order in which they do it."""
    match entry.kind:
        case EntryKind.MERGE:
            return (Actor.HELPERS,)
        case EntryKind.STAGE if is_routed(plan, entry.layer):
            return (Actor.PRODUCER, Actor.CONSUMERS, Actor.HELPERS)
        case EntryKind.STAGE:
            return (Actor.PRODUCER, Actor.CONSUMERS)
        case kind if kind in STREAMS:
            return (Actor.PRODUCER, Actor.CONSUMERS)
    return (Actor.CONSUMERS,)


def is_routed(plan: Plan, layer: int) -> bool:
    """Whether a router chooses the layer's experts; False for layers that do not exist."""
    layers = plan.tiling.layers
    return 0 <= layer < len(layers) and layers[layer].routed


@dataclass(slots=True)
class _Graph:
    """Nodes by number, and by op for consumers and helpers; `ready`: the node of each op that hands
    packets on, numbered behind all others."""

    graph: nx.DiGraph = field(default_factory=nx.DiGraph)
    nodes: list[Node] = field(default_factory=list)
    workers: dict[OpKey, list[int]] = field(default_factory=dict)
    routings: dict[int, list[int]] = field(default_factory=dict)
    ready: dict[OpKey, int] = field(default_factory=dict)


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
            "the waits of consumers, producer and helpers of all SMs for one another, for the "
            "shallowest ring and for every packet that a dynamic entry could need, form an acyclic "
            "graph",
            edges,
        ),
        Property(
            "reuse of partials",
            "by waits that happen whatever lengths and routing are, every QKV task of layer l + 2, "
            "which its splits read first, comes behind all merges of layer l",
            pairs,
        ),
    ], edges


def _build(plan: Plan) -> _Graph:
    order = _Graph()
    for sm, program in enumerate(plan.programs):
        _add_program(order, plan, sm, program)
    layers = len(plan.spec.layers)
    ops = build_ops(plan.spec)
    for source, destination, packets in ops.edges(data="packets"):
        if packets == "registers":
            continue
        producer = _key(ops.nodes[source]["op"].kind, ops.nodes[source]["op"].layer, layers)
        reader = _key(ops.nodes[destination]["op"].kind, ops.nodes[destination]["op"].layer, layers)
        if producer not in order.ready:
            ready = order.ready[producer] = len(order.nodes) + len(order.ready)
            order.graph.add_edges_from((node, ready) for node in order.workers.get(producer, ()))
        readers = order.workers.get(reader, [])
        if packets == "layer_input":
            readers = order.workers.get((EntryKind.STAGE, reader[1]), [])
        elif packets == "router_logits":
            readers = order.routings.get(reader[1], [])
        order.graph.add_edges_from((order.ready[producer], node) for node in readers)
    return order


def _add_program(order: _Graph, plan: Plan, sm: int, program: tuple[Entry, ...]) -> None:
    """The nodes of one SM and the edges between them."""
    graph = order.graph
    last: dict[Actor, int] = {}
    began: list[int] = []  # the nodes of consumers and producer for the STAGE before
    routing: dict[int, int] = {}
    for index, entry in enumerate(program):
        begins: list[int] = []
        for actor in actors_of(entry, plan):
            node = len(order.nodes)
            order.nodes.append(Node(sm, index, entry, actor))
            graph.add_node(node)
            graph.add_edges_from((before, node) for before in _waits_of(actor, entry, last))
            if entry.kind in USES_ROUTING and entry.layer in routing:
                graph.add_edge(routing[entry.layer], node)
            if actor == Actor.HELPERS and entry.kind == EntryKind.STAGE:
                graph.add_edges_from((stage, node) for stage in began)
                routing[entry.layer] = node
                order.routings.setdefault(entry.layer, []).append(node)
            elif actor != Actor.PRODUCER:
                order.workers.setdefault((entry.kind, entry.layer), []).append(node)
            if actor != Actor.HELPERS and entry.kind == EntryKind.STAGE:
                begins.append(node)
            last[actor] = node
        began = begins or began


def _waits_of(actor: Actor, entry: Entry, last: dict[Actor, int]) -> Iterator[int]:
    """Nodes of the same SM that come before the next of `actor`."""
    if actor in last:
        yield last[actor]
    if actor == Actor.PRODUCER and entry.kind in STREAMS and Actor.CONSUMERS in last:
        yield last[Actor.CONSUMERS]
    if actor == Actor.CONSUMERS and entry.kind in STREAMS:
        yield last[Actor.PRODUCER]


def _key(kind: OpKind, layer: int, layers: int) -> OpKey:
    """An op's entries: those of embed are in layer 0, of head and sample behind the last layer."""
    entry_kind = EntryKind[kind.name]
    if layer < 0:
        layer = 0 if kind == OpKind.EMBED else layers
    return entry_kind, layer


def _raise_cycle(order: _Graph) -> None:
    cycle = [edge[0] for edge in nx.find_cycle(order.graph)]
    nodes = [order.nodes[node] for node in cycle if node < len(order.nodes)]
    first = nodes[0]
    way = " -> ".join(f"SM {n.sm} {entry_name(n.entry)} ({n.actor.value})" for n in nodes[:6])
    more = f" and {len(nodes) - 6} more" if len(nodes) > 6 else ""
    raise VerifyError(
        "MKC301", f"waits for itself: {way}{more} -> back", first.sm, first.index, first.entry
    )


def _check_reuse(plan: Plan, order: _Graph) -> int:
    """Walks from "all merges of layer l are done" to the QKV tasks of layer l + 2, for every l."""
    pairs = 0
    for layer in range(len(plan.spec.layers) - PARTIAL_BUFFERS):
        next_layer = layer + PARTIAL_BUFFERS
        reached = _certainly_behind(order, order.ready[EntryKind.MERGE, layer], next_layer)
        tasks = order.workers.get((EntryKind.QKV, next_layer), [])
        for node in tasks:
            if node not in reached:
                place = order.nodes[node]
                raise VerifyError(
                    "MKC303",
                    f"attention of layer {next_layer} may write packet set partials before the "
                    f"merges of layer {layer} read it",
                    place.sm,
                    place.index,
                    place.entry,
                )
        pairs += len(order.workers.get((EntryKind.MERGE, layer), ())) * len(tasks)
    return pairs


def _certainly_behind(order: _Graph, start: int, last_layer: int) -> set[int]:
    """Nodes behind `start` by waits that happen in every step, up to the last layer's QKV."""
    certain = {order.ready[key] for key in order.ready if key[0] in CERTAIN}
    reached = {start}
    queue = deque([start])
    while queue:
        for node in order.graph.successors(queue.popleft()):
            if node in reached:
                continue
            if node < len(order.nodes):
                place = order.nodes[node]
                if place.actor != Actor.CONSUMERS or place.entry.layer > last_layer:
                    continue
                if (place.entry.layer, place.entry.kind) >= (last_layer, EntryKind.ATTENTION):
                    continue
            elif node not in certain:
                continue
            reached.add(node)
            queue.append(node)
    return reached
