"""What the verbs share: options, consoles, and how numbers are written."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A YAML description, the name of a shipped model (see `mkc models`), "
        "a Hugging Face folder or its config.json.",
    ),
]
ArtifactArgument = Annotated[
    Path, typer.Argument(metavar="ARTIFACT", help="The folder that `mkc compile` wrote.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
CacheDirOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        envvar="MKC_CACHE_DIR",
        help="Folder of the cache.  [default: mkc under $XDG_CACHE_HOME]",
        show_default=False,
    ),
]


def console(stderr: bool = False) -> Console:
    """A console that colours on terminals only; NO_COLOR is honoured by rich."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[int] = (0,)
) -> None:
    """A table whose columns align right, but for those numbered in `left`."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    console().print(lines[0], style="bold", soft_wrap=True)
    sys.stdout.write("".join(line + "\n" for line in lines[1:]))


def print_lines(*lines: str) -> None:
    """Lines on standard output."""
    sys.stdout.write("".join(line + "\n" for line in lines))


def count(number: float) -> str:
    """A count in thousands, millions or billions: 30.5 B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """Bytes in powers of ten, as bandwidth is given: 7.13 GB."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:.0f} B"
