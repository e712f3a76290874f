"""The artifact: the folder that a compilation leaves, and the only thing that the runtime reads.

    manifest.json  versions, model, target, options, resources, proof, prediction, hashes
    ops.json       the model's graph
    plan.json      tile counts, and the program of every SM, a line for each layer
    layout.json    the address of every weight, packet, page and shared word
    kernel.cu      the rendered CUDA
    kernel.cubin   what the GPU loads
    report.html    all of this for people: charts of a predicted step, resources, proofs
    kernel.ptx, ops.dot, trace.json.gz   if asked for

Same inputs, same bytes, the cubin and its hash aside; nothing holds a date or an absolute path.
`load_artifact` trusts nothing that does not match its hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkc.compiler import artifact_json
from mkc.compiler.errors import ArtifactError
from mkc.compiler.plan import Options, Plan
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import Target

if TYPE_CHECKING:
    from mkc.compiler.pipeline import Compiled

FORMAT_VERSION = 1
FORMAT_NAME = "mkc artifact"
MANIFEST = "manifest.json"
REQUIRED_FILES = (
    "ops.json",
    "plan.json",
    "layout.json",
    "kernel.cu",
    "kernel.cubin",
    "report.html",
)
EXTRAS = {"ptx": "kernel.ptx", "dot": "ops.dot", "trace": "trace.json.gz"}


@dataclass(frozen=True, slots=True)
class Artifact:
    """A loaded artifact: where it is, its manifest, the plan its files describe, and the cubin."""

    folder: Path
    manifest: Mapping[str, Any]
    plan: Plan
    cubin: bytes

    @property
    def spills(self) -> bool:
        """Whether any entry point spills registers or uses local memory."""
        return any(
            kernel["spill_store_bytes"] or kernel["spill_load_bytes"] or kernel["stack_bytes"]
            for kernel in self.manifest["kernels"]
        )


def write_artifact(compiled: Compiled, folder: Path, extras: Collection[str] = ()) -> Artifact:
    """Writes `compiled` to `folder`; extras: names out of EXTRAS for the optional files.

    The files appear by one rename of a finished folder. An artifact that is already there is
    replaced; anything else is refused with ArtifactError MKC502.
    """
    files = _files(compiled, extras)
    manifest = _manifest(compiled, files)
    with replacing(folder) as temporary:
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        (temporary / MANIFEST).write_text(_dump_manifest(manifest), "utf-8")
    return Artifact(folder, manifest, compiled.plan, compiled.assembly.cubin)


def load_artifact(folder: Path) -> Artifact:
    """Reads the artifact in `folder`, its plan rebuilt from the files alone.

    Raises ArtifactError, naming the file: MKC501 (missing or truncated), MKC502 (not an artifact),
    MKC503 (differs from its hash), MKC504 (another format version).
    """
    manifest = load_manifest(folder)
    files = {name: _read_checked(folder, name, sha) for name, sha in manifest["files"].items()}
    for name in REQUIRED_FILES:
        if name not in files:
            raise ArtifactError("MKC501", f"{folder / MANIFEST} does not list {name}", RECOMPILE)
    with _well_formed(folder / MANIFEST):
        spec = ModelSpec.model_validate_json(json.dumps(manifest["spec"]))
        target = Target.model_validate_json(json.dumps(manifest["target"]))
        options = Options(**manifest["options"])
    with _well_formed(folder / "plan.json"):
        tiling, programs = artifact_json.read_plan(files["plan.json"])
    with _well_formed(folder / "layout.json"):
        layout = artifact_json.read_layout(files["layout.json"])
    plan = Plan(spec, target, options, tiling, layout, programs)
    return Artifact(folder, manifest, plan, files["kernel.cubin"])


def load_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in `folder`, checked by itself; raises ArtifactError as `load_artifact` does."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactError("MKC501", f"there is no folder {folder}", "run `mkc compile` first")
    content = _read(path)
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise ArtifactError("MKC501", f"{path} is truncated or no JSON: {error}", RECOMPILE) from (
            error
        )
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT_NAME:
        raise ArtifactError("MKC502", f"{path} is not the manifest of an mkc artifact", RECOMPILE)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            "MKC504",
            f"{path} has format version {manifest.get('format_version')!r}; "
            f"this mkc reads version {FORMAT_VERSION}",
            RECOMPILE,
        )
    if not isinstance(manifest.get("files"), dict):
        raise ArtifactError("MKC502", f"{path} lists no files", RECOMPILE)
    if manifest.get("digest") != _digest(manifest):
        raise ArtifactError("MKC503", f"{path} does not match its own digest", RECOMPILE)
    return manifest


RECOMPILE = "compile the model again"


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place if the block ends well.

    An artifact or an empty folder in that place is moved away first, so a reader finds the old
    files, for an instant none, or the new ones, never a mixture. Raises ArtifactError MKC502 if
    something else is there.
    """
    if folder.exists() and not _is_replaceable(folder):
        raise ArtifactError(
            "MKC502",
            f"{folder} exists and is not an mkc artifact, so it is left as it is",
            "choose another folder with -o",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        temporary = Path(scratch) / "new"
        temporary.mkdir()
        yield temporary
        if folder.exists():
            os.rename(folder, Path(scratch) / "old")
        os.rename(temporary, folder)


def copy_artifact(source: Path, destination: Path) -> None:
    """Copies the files of one artifact folder to another place, with the rules of `replacing`."""
    with replacing(destination) as temporary:
        for file in source.iterdir():
            shutil.copyfile(file, temporary / file.name)


def _is_replaceable(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT_NAME


def _files(compiled: Compiled, extras: Collection[str]) -> dict[str, bytes]:
    from mkc.compiler.report import render_report
    from mkc.compiler.report_data import ReportInputs

    files = {
        "ops.json": artifact_json.dump_ops(compiled.graph).encode(),
        "plan.json": artifact_json.dump_plan(compiled.plan).encode(),
        "layout.json": artifact_json.dump_layout(compiled.plan.layout).encode(),
        "kernel.cu": compiled.cuda.encode(),
        "kernel.cubin": compiled.assembly.cubin,
        "report.html": render_report(ReportInputs.of_compiled(compiled)).encode(),
    }
    if "trace" in extras:
        from mkc.compiler.trace import dump_trace

        files[EXTRAS["trace"]] = dump_trace(compiled.prediction.step, name=compiled.plan.spec.name)
    if "ptx" in extras:
        files[EXTRAS["ptx"]] = compiled.assembly.ptx.encode()
    if "dot" in extras:
        files[EXTRAS["dot"]] = artifact_json.dump_dot(compiled.graph).encode()
    return files


def _manifest(compiled: Compiled, files: Mapping[str, bytes]) -> dict[str, Any]:
    plan = compiled.plan
    tasks = [len(program) for program in plan.programs]
    shared = {
        f"decode_step_{memory.rows}": {
            "shared_bytes": memory.bytes,
            "ring_slots": memory.ring_slots,
        }
        for memory in plan.layout.shared
    }
    manifest: dict[str, Any] = {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "mkc": importlib.metadata.version("mkc"),
        "model": plan.spec.name,
        "parameters": parameter_count(plan),
        "spec": plan.spec.model_dump(mode="json"),
        "target": plan.target.model_dump(mode="json"),
        "options": asdict(plan.options),
        "compiler": compiled.assembly.compiler,
        "kernels": [
            asdict(kernel) | shared.get(kernel.name, {}) for kernel in compiled.assembly.kernels
        ],
        "tasks_per_sm": {
            "min": min(tasks),
            "mean": round(sum(tasks) / len(tasks), 1),
            "max": max(tasks),
        },
        "proof": asdict(compiled.proof),
        "prediction": [asdict(point) for point in compiled.prediction.points],
        "files": {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)},
    }
    return manifest | {"digest": _digest(manifest)}


def parameter_count(plan: Plan) -> int:
    """Parameters of the model: all weights, before any padding."""
    return sum(
        matrices * rows * columns
        for matrices, rows, columns in (region.shape for region in plan.layout.regions)
    )


def _digest(manifest: Mapping[str, Any]) -> str:
    """The hash of a manifest without its digest, whatever the file's white space."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _dump_manifest(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ArtifactError("MKC501", f"{path} is missing", RECOMPILE) from error
    except OSError as error:
        raise ArtifactError("MKC501", f"{path} cannot be read: {error.strerror}") from error


def _read_checked(folder: Path, name: str, expected: str) -> bytes:
    if Path(name).name != name:
        raise ArtifactError("MKC502", f"{folder / MANIFEST} lists {name!r}, not a file name")
    content = _read(folder / name)
    if hashlib.sha256(content).hexdigest() != expected:
        raise ArtifactError(
            "MKC503", f"{folder / name} is not the file that was compiled", RECOMPILE
        )
    return content


@contextlib.contextmanager
def _well_formed(path: Path) -> Iterator[None]:
    """Turns what goes wrong inside a file whose hash is right into an ArtifactError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ArtifactError("MKC502", f"{path} is not well formed: {error}", RECOMPILE) from error
