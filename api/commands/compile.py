"""`mkc compile`: a model description becomes an artifact."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mkc.api.commands.common import (
    CacheDirOption,
    JsonOption,
    ModelArgument,
    console,
    print_json,
    print_lines,
    print_table,
)

if TYPE_CHECKING:
    from mkc.compiler.artifact import Artifact
    from mkc.compiler.cache import Cache
    from mkc.compiler.pipeline import Compiled
    from mkc.compiler.plan import Options
    from mkc.compiler.spec import ModelSpec
    from mkc.compiler.target import Target

EMITTED = ("cu", "cubin", "html", "ops", "plan")
OPTIONAL = ("ptx", "dot", "trace")


def _print_passes(wanted: bool) -> None:
    if wanted:
        from mkc.compiler.pipeline import PASSES

        print_table(("pass", "what it does"), PASSES, left=(0, 1))
        raise typer.Exit


def compile_model(
    model: ModelArgument,
    target: Annotated[
        str, typer.Option(envvar="MKC_TARGET", help="The GPU to compile for; a prefix will do.")
    ] = "h100",
    max_batch: Annotated[int, typer.Option(help="Rows of the largest step, 1 to 8.")] = 8,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder of the artifact.  [default: build/<model>-<target>]",
            show_default=False,
        ),
    ] = None,
    emit: Annotated[
        str,
        typer.Option(
            help="Files to write beside manifest and layout, out of cu, cubin, html, ops, plan "
            "(always there), ptx, dot and trace."
        ),
    ] = "cu,cubin,html,ops,plan",
    fail_on_spill: Annotated[
        bool, typer.Option("--fail-on-spill", help="End with 1 if a register is spilled.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compile twice and compare every file but the cubin."),
    ] = False,
    print_passes: Annotated[
        bool,
        typer.Option(
            "--print-passes", callback=_print_passes, is_eager=True, help="List the passes and end."
        ),
    ] = False,
    time_passes: Annotated[
        bool, typer.Option("--time-passes", help="Compile afresh and show each pass's seconds.")
    ] = False,
    dump_after: Annotated[
        str | None,
        typer.Option(metavar="PASS", help="Print what the pass returned, and end."),
    ] = None,
    cache_dir: CacheDirOption = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither read the cache nor write to it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compile a model into an artifact: plan, proof and kernel for one GPU model."""
    from mkc.compiler.parse import load_model
    from mkc.compiler.plan import Options
    from mkc.compiler.target import load_target

    extras = _extras(emit)
    spec, gpu, options = load_model(model), load_target(target), Options(max_batch=max_batch)
    if dump_after is not None:
        from mkc.api.commands.dump import dump

        sys.stdout.write(dump(dump_after, spec, gpu, options))
        return
    folder = output or Path("build") / f"{spec.name}-{gpu.name}"
    cache = None if no_cache else _cache(cache_dir)
    job = Job(spec, gpu, options, extras, folder)
    artifact, seconds = job.run(cache, fresh=check or time_passes)
    if check:
        arguments = [model, "--target", target, "--max-batch", str(max_batch), "--emit", emit]
        _check_same(artifact.folder, arguments)
    _show(artifact, seconds, check, time_passes, as_json)
    if fail_on_spill and artifact.spills:
        from mkc.compiler.errors import CheckError

        raise CheckError(
            "MKC403",
            "the assembled kernel spills registers or uses local memory",
            f"the artifact is in {artifact.folder}, to be looked at with `mkc inspect`",
        )


def _extras(emit: str) -> list[str]:
    """The optional files asked for by --emit."""
    names = [name.strip() for name in emit.split(",") if name.strip()]
    for name in names:
        if name not in (*EMITTED, *OPTIONAL):
            known = ", ".join((*EMITTED, *OPTIONAL))
            raise typer.BadParameter(f"{name!r} is not one of {known}", param_hint="--emit")
    return sorted({name for name in names if name in OPTIONAL})


def _cache(folder: Path | None) -> Cache:
    from mkc.compiler.cache import Cache, default_cache_dir

    return Cache(folder or default_cache_dir())


@dataclass(frozen=True)
class Job:
    """One compilation and where its artifact goes."""

    spec: ModelSpec
    target: Target
    options: Options
    extras: Collection[str]
    folder: Path

    def run(self, cache: Cache | None, fresh: bool) -> tuple[Artifact, dict[str, float] | None]:
        """The artifact, and the seconds of each pass unless it came from the cache.

        fresh: compile even if the cache has it.
        """
        from mkc.compiler.artifact import copy_artifact, write_artifact

        if cache is None:
            compiled = self._compile()
            return write_artifact(compiled, self.folder, self.extras), compiled.seconds
        from mkc.compiler.cache import cache_key

        key = cache_key(self.spec, self.target, self.options, self.extras)
        found = None if fresh else cache.find(key)
        if found is not None:
            copy_artifact(found.folder, self.folder)
            return replace(found, folder=self.folder), None
        compiled = self._compile()
        artifact = write_artifact(compiled, self.folder, self.extras)
        cache.store(key, artifact)
        return artifact, compiled.seconds

    def _compile(self) -> Compiled:
        from mkc.compiler import pipeline

        with _progress() as hear:
            return pipeline.compile_model(self.spec, self.target, self.options, hear)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows the pass that runs, on terminals only."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda name: None
        return
    with screen.status("") as status:
        yield lambda name: status.update(f"{name} ...")


def _check_same(folder: Path, arguments: list[str]) -> None:
    """Compiles again in a process with other hash seeds, and compares.

    Raises CheckError MKC601 naming the first file that differs.
    """
    from mkc.compiler.errors import CheckError

    with tempfile.TemporaryDirectory(prefix="mkc-check-") as scratch:
        again = Path(scratch) / "again"
        command = [sys.executable, "-m", "mkc.api.cli", "compile", *arguments]
        command += ["--no-cache", "--json", "--output", str(again)]
        seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        run = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        if run.returncode:
            raise CheckError("MKC601", f"the second compilation failed:\n{run.stderr.strip()}")
        for name in sorted({file.name for place in (folder, again) for file in place.iterdir()}):
            if name != "kernel.cubin" and _comparable(folder / name) != _comparable(again / name):
                raise CheckError("MKC601", f"{name} differs between two compilations")


def _comparable(path: Path) -> object:
    """A file's content; of the manifest, all that does not follow from the cubin."""
    if not path.exists():
        return None
    content = path.read_bytes()
    if path.name != "manifest.json":
        return content
    manifest = json.loads(content)
    del manifest["digest"], manifest["files"]["kernel.cubin"]
    return manifest


def _show(
    artifact: Artifact,
    seconds: dict[str, float] | None,
    checked: bool,
    time_passes: bool,
    as_json: bool,
) -> None:
    from mkc.api.commands.summary import print_summary, summary

    if as_json:
        extra: dict[str, Any] = {"from_cache": seconds is None}
        extra |= {"reproducible": True} if checked else {}
        extra |= {"seconds": seconds} if time_passes else {}
        print_json(summary(artifact) | extra)
        return
    print_summary(artifact)
    if seconds is None:
        print_lines("              (from the cache; --no-cache compiles afresh)")
    if checked:
        print_lines("check         a second compilation gave the same files")
    if time_passes and seconds is not None:
        print_lines("")
        print_table(("pass", "seconds"), [(name, f"{s:.3f}") for name, s in seconds.items()])
