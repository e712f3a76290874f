"""The summary of an artifact, as `mkc compile` and `mkc inspect` show it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from mkc.api.commands.common import count, print_lines, print_table, size

if TYPE_CHECKING:
    from mkc.compiler.artifact import Artifact


def summary(artifact: Artifact) -> dict[str, Any]:
    """What the text shows, for --json: part of the manifest and where the artifact is."""
    keys = (
        "model",
        "parameters",
        "mkc",
        "compiler",
        "options",
        "tasks_per_sm",
        "prediction",
        "kernels",
        "proof",
    )
    shown = {key: artifact.manifest[key] for key in keys}
    return {"artifact": str(artifact.folder), "target": artifact.plan.target.name} | shown


def print_summary(artifact: Artifact) -> None:
    """Model, tasks, prediction, resources, proof and place of an artifact, as text."""
    manifest, target = artifact.manifest, artifact.plan.target
    tasks, proof = manifest["tasks_per_sm"], manifest["proof"]
    print_lines(
        f"model         {manifest['model']}, {count(manifest['parameters'])} parameters",
        f"target        {target.name}: {target.gpu}, {target.arch}, {target.sms} SMs",
        f"rows          1 to {manifest['options']['max_batch']} a step",
        f"tasks per SM  {tasks['min']} min, {tasks['mean']} mean, {tasks['max']} max",
        "",
    )
    print_table(
        ("batch", "context", "a step", "floor ms", "predicted ms", "of floor", "tokens/s"),
        [
            (
                point["batch"],
                point["context"],
                size(point["bytes"]),
                f"{point['floor_seconds'] * 1e3:.3f}",
                f"{point['predicted_seconds'] * 1e3:.3f}",
                f"{point['share_of_floor']:.1%}",
                f"{point['batch'] / point['predicted_seconds']:.0f}",
            )
            for point in manifest["prediction"]
        ],
        left=(),
    )
    print_lines("")
    print_table(
        ("entry point", "registers", "spilled", "stack", "shared memory", "ring"),
        [
            (
                kernel["name"],
                kernel["registers"],
                f"{kernel['spill_store_bytes'] + kernel['spill_load_bytes']} B",
                f"{kernel['stack_bytes']} B",
                f"{kernel['shared_bytes']} B" if "shared_bytes" in kernel else "-",
                f"{kernel['ring_slots']} chunks" if "ring_slots" in kernel else "-",
            )
            for kernel in manifest["kernels"]
        ],
    )
    proven = ", ".join(shown["name"] for shown in proof["properties"])
    print_lines(
        "",
        textwrap.fill(f"proven        {proven}", 96, subsequent_indent=" " * 14),
        f"              over {proof['entries']} entries, {proof['packets']} packets, "
        f"{proof['edges']} edges",
        f"artifact      {artifact.folder}",
    )
