"""What the verbs that run kernels share: GPU, compiled model, progress, lists of numbers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mkc.api.commands.common import console

if TYPE_CHECKING:
    from mkc.compiler.artifact import Artifact
    from mkc.compiler.plan import Options
    from mkc.compiler.spec import ModelSpec
    from mkc.compiler.target import Target

Hear = Callable[[int, int, str], None]
"""Told how much is done, of how much (0 if unknown), and what runs now."""


def find_gpu(target: str | None) -> tuple[str, Target]:
    """Name of the GPU that torch has current, and the target called `target` or made for it.

    Raises GpuError MKC602 without a GPU or a target for it.
    """
    import torch

    from mkc.compiler.target import load_target, target_of_gpu
    from mkc.runtime.megakernel import GpuError

    if not torch.cuda.is_available():
        raise GpuError("MKC602", "torch finds no GPU", "see `mkc doctor`")
    name = torch.cuda.get_device_name()
    chosen = target or target_of_gpu(name)
    if chosen is None:
        raise GpuError("MKC602", f"no target file describes {name}", "name one with --target")
    return name, load_target(chosen)


def compiled_artifact(
    spec: ModelSpec, target: Target, options: Options, cache_dir: Path | None, hear: Hear
) -> Artifact:
    """The compiled model, from the cache if it is there."""
    from mkc.compiler import pipeline
    from mkc.compiler.artifact import write_artifact
    from mkc.compiler.cache import Cache, cache_key, default_cache_dir

    cache = Cache(cache_dir or default_cache_dir())
    key = cache_key(spec, target, options, ())
    found = cache.find(key)
    if found is not None:
        return found
    compiled = pipeline.compile_model(spec, target, options, lambda name: hear(0, 0, name))
    with tempfile.TemporaryDirectory(prefix="mkc-") as scratch:
        artifact = write_artifact(compiled, Path(scratch) / "artifact")
        cache.store(key, artifact)
        return artifact


@contextlib.contextmanager
def progress() -> Iterator[Hear]:
    """Shows what runs and how much is left, on terminals only."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda done, total, what: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=None)

        def hear(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        yield hear


def numbers(text: str, option: str, largest: int) -> list[int]:
    """Numbers from 1 to `largest`, ascending, from text such as 1,4,8 or 1-8."""
    found: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), min(int(last or first), largest + 1) + 1))
    except ValueError:
        found = set()
    if not found or min(found) < 1 or max(found) > largest:
        wanted = f"{text!r} has to be numbers from 1 to {largest}"
        raise typer.BadParameter(wanted, param_hint=option)
    return sorted(found)
