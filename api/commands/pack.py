"""`mkc pack`: writes a checkpoint's weights as the kernel reads them, once for all later starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mkc.api.commands.common import JsonOption, ModelArgument, print_json, print_lines, size
from mkc.api.commands.kernel import progress

if TYPE_CHECKING:
    from mkc.compiler.place import Layout
    from mkc.compiler.spec import ModelSpec


def pack_checkpoint(
    model: ModelArgument,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder with the weights, bf16 safetensors.  [default: MODEL]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write.  [default: build/<model>.mkcpack]",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Write nothing: compare every byte of the file with its checksums, and with "
            "--checkpoint what it was made of.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint's weights in packed form, so that later starts take seconds.

    Every tensor is checked before one is read. The file fits every target and batch size, and
    appears only when it is complete.
    """
    from mkc.compiler.parse import load_model

    spec = load_model(model)
    layout = _layout(spec)
    path = output or Path("build") / f"{spec.name}.mkcpack"
    folder = checkpoint or _folder(Path(model))
    if folder is None and not verify:
        raise typer.BadParameter("MODEL is no Hugging Face folder", param_hint="--checkpoint")

    from mkc.runtime.checkpoint import open_checkpoint
    from mkc.runtime.packed import open_packed, read_packed_header, write_packed

    found = None if folder is None else open_checkpoint(folder, spec)
    done, steps = 0, len(spec.layers) + 3 + (not spec.tied_head)
    with progress() as hear:

        def step(what: str) -> None:
            nonlocal done
            hear(done, steps, what)
            done += 1

        if verify:
            hear(0, 0, "checksums")
            fingerprint = None if found is None else found.fingerprint()
            open_packed(path, layout, spec, checkpoint=fingerprint, verify=True)
            header = read_packed_header(path)
        else:
            assert found is not None
            fingerprint = found.fingerprint()
            header = write_packed(path, layout, spec, found.weights(), fingerprint, step)
    if as_json:
        print_json(
            {
                "packed": str(path),
                "model": header.model,
                "bytes": path.stat().st_size,
                "regions": len(header.regions),
                "spec_hash": header.spec_hash,
                "layout_hash": header.layout_hash,
                "checkpoint": header.checkpoint,
                "written": not verify,
            }
        )
    elif verify:
        print_lines(f"{path}: {len(header.regions)} regions match their checksums")
    else:
        print_lines(f"wrote {path}: {header.model}, {size(path.stat().st_size)}")


def _folder(model: Path) -> Path | None:
    """The Hugging Face folder that MODEL is or lies in, if it is such."""
    if model.name == "config.json":
        return model.parent
    return model if (model / "config.json").is_file() else None


def _layout(spec: ModelSpec) -> Layout:
    """A layout of the model; where its weights lie is the same for all targets and options."""
    from mkc.compiler.place import place
    from mkc.compiler.plan import Options
    from mkc.compiler.target import load_target
    from mkc.compiler.tile import tile

    target, options = load_target("h200"), Options()
    return place(spec, tile(spec, target, options.max_batch, options.chunk_fragments), target)
