"""`mkc inspect`: what an artifact holds, in tables for people and JSON for programs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mkc.api.commands.common import (
    ArtifactArgument,
    JsonOption,
    print_json,
    print_lines,
    print_table,
    size,
)

if TYPE_CHECKING:
    from mkc.compiler.artifact import Artifact


class What(StrEnum):
    """Parts of an artifact; SM and LAYER take a number."""

    SUMMARY = "summary"
    SM = "sm"
    LAYER = "layer"
    PACKETS = "packets"
    LAYOUT = "layout"
    CUDA = "cuda"
    OPS = "ops"


def inspect_artifact(
    artifact: ArtifactArgument,
    what: Annotated[
        What,
        typer.Argument(
            metavar="WHAT",
            help="summary; sm N, the program of an SM; layer N, its tasks over the SMs; packets, "
            "what travels between SMs; layout, the memory; cuda, the source; ops, the graph.",
        ),
    ] = What.SUMMARY,
    number: Annotated[
        int | None, typer.Argument(metavar="N", help="The SM or layer.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is in an artifact."""
    from mkc.compiler.artifact import load_artifact

    loaded = load_artifact(artifact)
    if what in (What.SM, What.LAYER):
        plan = loaded.plan
        limit = plan.target.sms if what is What.SM else len(plan.spec.layers)
        if number is None or not 0 <= number < limit:
            raise typer.BadParameter(f"{what} takes a number from 0 to {limit - 1}")
        show = _show_sm if what is What.SM else _show_layer
        show(loaded, number, as_json)
        return
    if number is not None:
        raise typer.BadParameter(f"{what} takes no number")
    {
        What.SUMMARY: _show_summary,
        What.PACKETS: _show_packets,
        What.LAYOUT: _show_layout,
        What.CUDA: _show_cuda,
        What.OPS: _show_ops,
    }[what](loaded, as_json)


def _show_summary(artifact: Artifact, as_json: bool) -> None:
    from mkc.api.commands.summary import print_summary, summary

    if as_json:
        print_json(summary(artifact))
    else:
        print_summary(artifact)


def _show_sm(artifact: Artifact, sm: int, as_json: bool) -> None:
    """The program of one SM."""
    program = artifact.plan.programs[sm]
    rows = [
        (index, entry.layer, entry.kind.name.lower(), entry.tile, entry.warp)
        for index, entry in enumerate(program)
    ]
    _table_or_json(("entry", "layer", "kind", "tile", "warp"), rows, as_json, left=(2,))


def _show_layer(artifact: Artifact, layer: int, as_json: bool) -> None:
    """The tasks of one layer: a line an SM, tiles by op; dynamic ops show the SM's rank."""
    from mkc.compiler.program import EntryKind

    kinds = [
        EntryKind.ROUTER,
        EntryKind.QKV,
        EntryKind.ATTENTION,
        EntryKind.FFN_UP,
        EntryKind.MERGE,
        EntryKind.OUT,
    ]
    rows = []
    for sm, program in enumerate(artifact.plan.programs):
        tiles: dict[EntryKind, list[int]] = {kind: [] for kind in kinds}
        for entry in program:
            if entry.layer == layer and entry.kind in tiles:
                tiles[entry.kind].append(entry.tile)
        rows.append((sm, *(" ".join(map(str, tiles[kind])) for kind in kinds)))
    headers = ("sm", "router", "qkv", "attention rank", "ffn_up rank", "merge", "owned tiles")
    _table_or_json(headers, rows, as_json, left=(1, 2, 5, 6))


def _show_packets(artifact: Artifact, as_json: bool) -> None:
    rows = [
        (
            packets.name,
            packets.base,
            packets.size,
            packets.packets,
            " x ".join(f"{axis} {n}" for axis, n in zip(packets.axes, packets.shape, strict=True)),
        )
        for packets in artifact.plan.layout.packet_sets
    ]
    headers = ("set", "first packet", "packets", "per item", "items")
    _table_or_json(headers, rows, as_json, left=(0, 4))


def _show_layout(artifact: Artifact, as_json: bool) -> None:
    """Regions of the weight arena, KV groups, shared memory."""
    from dataclasses import asdict

    layout = artifact.plan.layout
    if as_json:
        print_json(asdict(layout))
        return
    print_lines(f"weight arena, {size(layout.arena_bytes)}")
    print_table(
        ("region", "layer", "offset", "bytes", "matrices x out x in", "order"),
        [
            (
                region.name,
                region.layer if region.layer >= 0 else "-",
                region.offset,
                region.bytes,
                " x ".join(map(str, region.shape)),
                region.layout,
            )
            for region in layout.regions
        ],
        left=(0, 5),
    )
    print_lines("", "KV blocks of 64 tokens")
    print_table(
        ("window", "layers", "block bytes"),
        [
            (group.window or "all", " ".join(map(str, group.layers)), group.block_bytes)
            for group in layout.kv_groups
        ],
        left=(0, 1),
    )
    print_lines("", "shared memory")
    print_table(
        ("rows", "ring chunks", "bytes"),
        [(shared.rows, shared.ring_slots, shared.bytes) for shared in layout.shared],
        left=(),
    )


def _show_cuda(artifact: Artifact, as_json: bool) -> None:
    cuda = (artifact.folder / "kernel.cu").read_text("utf-8")
    if as_json:
        print_json({"cuda": cuda})
    else:
        typer.echo(cuda, nl=False)


def _show_ops(artifact: Artifact, as_json: bool) -> None:
    """Each op with its weights and where its values go, from ops.json."""
    import json

    document: dict[str, Any] = json.loads((artifact.folder / "ops.json").read_bytes())
    if as_json:
        print_json(document)
        return
    rows = []
    for op in document["ops"]:
        goes = [
            f"{edge['packets']} to {edge['to']}"
            for edge in document["edges"]
            if edge["from"] == op["name"]
        ]
        shape = f"{op['matrices']} x {op['rows']} x {op['columns']}" if op["matrices"] else ""
        moved = size(op["weight_bytes_one_row"]) if op["matrices"] else ""
        rows.append((op["name"], shape, moved, ", ".join(goes)))
    headers = ("op", "matrices x out x in", "streamed by one row", "hands on")
    print_table(headers, rows, left=(0, 3))


def _table_or_json(
    headers: tuple[str, ...], rows: list[tuple[Any, ...]], as_json: bool, left: tuple[int, ...]
) -> None:
    if as_json:
        print_json([dict(zip(headers, row, strict=True)) for row in rows])
    else:
        print_table(headers, rows, left)
