"""The JSON files of an artifact: written to be compared line by line, read back into a plan.

A list takes one line an item. A program takes one line for each SM and layer, in which an entry is
`kind:tile/warp`; a missing tile or warp is 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

import networkx as nx

from mkc.compiler.ops import BF16_BYTES, Op, ops_of
from mkc.compiler.place import KvGroup, Layout, PacketSet, Region, SharedMemory
from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.schedule import Programs
from mkc.compiler.tile import LayerTiling, Tiling


def dump_ops(graph: nx.DiGraph) -> str:
    """The op graph: nodes in topological order, then edges."""
    nodes = [
        {"name": op.name} | asdict(op) | {"weight_bytes_one_row": round(op.weight_bytes())}
        for op in ops_of(graph)
    ]
    edges = [
        {"from": source, "to": destination, "packets": packets}
        for source, destination, packets in graph.edges(data="packets")
    ]
    return _document({"ops": nodes, "edges": edges})


def dump_dot(graph: nx.DiGraph) -> str:
    """The op graph for Graphviz, with the bytes of all weights of each op."""
    lines = ["digraph ops {", "  node [shape=box, fontname=monospace];"]
    for op in ops_of(graph):
        lines.append(f'  "{op.name}" [label="{_dot_label(op)}"];')
    for source, destination, packets in graph.edges(data="packets"):
        lines.append(f'  "{source}" -> "{destination}" [label="{packets}"];')
    return "\n".join([*lines, "}"]) + "\n"


def _dot_label(op: Op) -> str:
    if not op.matrices:
        return op.name
    size = op.matrices * op.rows * op.columns * BF16_BYTES
    many = f"{op.matrices} x " if op.matrices > 1 else ""
    return f"{op.name}\\n{many}[{op.rows}, {op.columns}]\\n{size / 1e6:.2f} MB"


def dump_plan(plan: Plan) -> str:
    """Tile counts and programs."""
    tiling = asdict(plan.tiling)
    layers = tiling.pop("layers")
    return _document({"tiling": tiling, "layers": layers, "programs": program_lines(plan.programs)})


def program_lines(programs: Programs) -> list[list[Any]]:
    """Programs as [sm, layer, entries] items, in order."""
    return [
        [sm, layer, " ".join(entry_text(entry) for entry in entries)]
        for sm, program in enumerate(programs)
        for layer, entries in groupby(program, key=lambda entry: entry.layer)
    ]


_NAMES = {kind: kind.name.lower() for kind in EntryKind}
_KINDS = {name: kind for kind, name in _NAMES.items()}


def entry_text(entry: Entry) -> str:
    """An entry without its layer, such as `qkv:17/3`: tile 17, warp 3."""
    tile = f":{entry.tile}" if entry.tile or entry.warp else ""
    return _NAMES[entry.kind] + tile + (f"/{entry.warp}" if entry.warp else "")


def read_plan(content: bytes) -> tuple[Tiling, Programs]:
    """The inverse of `dump_plan`. Raises KeyError, TypeError or ValueError."""
    document = _object(content)
    layers = tuple(LayerTiling(**layer) for layer in document["layers"])
    tiling = Tiling(**document["tiling"], layers=layers)
    programs: list[list[Entry]] = []
    for sm, layer, text in document["programs"]:
        if sm == len(programs):
            programs.append([])
        if sm != len(programs) - 1:
            raise ValueError(f"the program of SM {sm} is out of order")
        programs[sm] += [_read_entry(word, layer) for word in text.split()]
    return tiling, tuple(tuple(program) for program in programs)


def _read_entry(word: str, layer: int) -> Entry:
    name, _, rest = word.partition(":")
    tile, _, warp = rest.partition("/")
    return Entry(_KINDS[name], layer, int(tile or 0), int(warp or 0))


def dump_layout(layout: Layout) -> str:
    """All addresses."""
    return _document(asdict(layout))


def read_layout(content: bytes) -> Layout:
    """The inverse of `dump_layout`. Raises KeyError, TypeError or ValueError."""
    document = {key: _tupled(value) for key, value in _object(content).items()}
    return Layout(
        regions=tuple(Region(**region) for region in document["regions"]),
        arena_bytes=document["arena_bytes"],
        packet_sets=tuple(PacketSet(**packets) for packets in document["packet_sets"]),
        packet_count=document["packet_count"],
        kv_groups=tuple(KvGroup(**group) for group in document["kv_groups"]),
        shared=tuple(SharedMemory(**shared) for shared in document["shared"]),
    )


def _object(content: bytes) -> dict[str, Any]:
    document = json.loads(content)
    if not isinstance(document, dict):
        raise TypeError("it holds no JSON object")
    return document


def _tupled(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tupled(item) for item in value)
    if isinstance(value, dict):
        return {key: _tupled(item) for key, item in value.items()}
    return value


def _document(fields: Mapping[str, Any]) -> str:
    lines = []
    for key, value in fields.items():
        text = _list(value) if isinstance(value, list | tuple) else _compact(value)
        lines.append(f'  "{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _list(items: Iterable[Any]) -> str:
    return "[\n" + ",\n".join(f"    {_compact(item)}" for item in items) + "\n  ]"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
