"""`mkc models` and `mkc import`: which descriptions there are, and how to get one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mkc.api.commands.common import JsonOption, count, print_json, print_lines, print_table


def list_models(as_json: JsonOption = False) -> None:
    """List the model descriptions that come with mkc."""
    from mkc.compiler.parse import load_model
    from mkc.models import shipped_models

    specs = {name: load_model(path) for name, path in shipped_models().items()}
    if as_json:
        print_json(
            {
                name: {"path": str(shipped_models()[name]), "spec": spec.model_dump(mode="json")}
                for name, spec in specs.items()
            }
        )
        return
    print_table(
        ("model", "layers", "hidden", "heads", "experts", "vocabulary"),
        [
            (
                name,
                len(spec.layers),
                spec.hidden_size,
                f"{spec.attention.query_heads}/{spec.attention.kv_heads}",
                max((getattr(layer.ffn, "experts", 0) for layer in spec.layers), default=0) or "-",
                count(spec.vocab_size),
            )
            for name, spec in specs.items()
        ],
    )


def import_config(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="A Hugging Face config.json, or the folder that holds it."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; standard output without it."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the YAML description of a Hugging Face model."""
    from mkc.compiler.describe import describe
    from mkc.compiler.parse import load_model

    spec = load_model(Path(config))
    text = describe(spec)
    if output is not None:
        output.write_text(text, "utf-8")
    if as_json:
        print_json({"output": output and str(output), "spec": spec.model_dump(mode="json")})
    elif output is None:
        typer.echo(text, nl=False)
    else:
        print_lines(f"wrote {output}; next: mkc compile {output}")
