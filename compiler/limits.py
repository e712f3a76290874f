"""What a well-formed description may still ask for that the compiler does not support.

The rules speak of `ModelSpec`; an `Origin` translates to the user's file, so that one set of rules
serves every format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mkc.compiler.errors import DescriptionError, Location
from mkc.compiler.source import quoted
from mkc.compiler.spec import DenseFfn, LayerSpec, ModelSpec

SpecPath = tuple[str | int, ...]
"""Field names and list indices from a ModelSpec down, such as ("layers", 3, "ffn", "width")."""

MAX_LAYERS = 1024
MAX_GROUP = 8
HEAD_DIM_MULTIPLE = 32
MAX_HEAD_DIM = 256
TILE_ROWS = 16
MAX_EXPERTS = 128
MAX_EXPERTS_PER_TOKEN = 8

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def dotted(path: SpecPath) -> str:
    """A path as text: `layers[3].ffn.width`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a spec's fields come from: their names in the user's file and their places in it."""

    name: Callable[[SpecPath], str]
    locate: Callable[[SpecPath], Location | None]

    def error(
        self, code: str, path: SpecPath, message: str, hint: str | None = None
    ) -> DescriptionError:
        """An error about the field at `path`; the message continues the field's name."""
        return DescriptionError(code, f"{self.name(path)} {message}", hint, self.locate(path))


SPEC_ORIGIN = Origin(dotted, lambda path: None)
"""For a spec that was built in code."""


def check_limits(spec: ModelSpec, origin: Origin = SPEC_ORIGIN) -> None:
    """Raise the first DescriptionError (MKC117 to MKC129) of a spec that is not supported."""
    if not NAME_PATTERN.fullmatch(spec.name):
        raise origin.error(
            "MKC129",
            ("name",),
            f"{quoted(spec.name)} is not usable as a file name",
            "use up to 100 letters, digits, '.', '_' and '-', a letter or digit first",
        )
    if spec.hidden_size % TILE_ROWS:
        raise _not_multiple(origin, "MKC123", ("hidden_size",), spec.hidden_size, TILE_ROWS)
    _check_attention(spec, origin)
    if not 1 <= len(spec.layers) <= MAX_LAYERS:
        raise origin.error(
            "MKC117",
            ("layers",),
            f"makes {len(spec.layers)} layers; there must be 1 to {MAX_LAYERS}",
        )
    for index, layer in enumerate(spec.layers):
        _check_layer(spec, layer, ("layers", index), origin)
    for index, token in enumerate(spec.eos_tokens):
        if not 0 <= token < spec.vocab_size:
            raise origin.error(
                "MKC128",
                ("eos_tokens", index),
                f"is {token}, outside the vocabulary of 0 to {spec.vocab_size - 1}",
            )


def _check_attention(spec: ModelSpec, origin: Origin) -> None:
    attention = spec.attention
    if attention.query_heads % attention.kv_heads:
        raise origin.error(
            "MKC120",
            ("attention", "query_heads"),
            f"is {attention.query_heads}, not a multiple of "
            f"{origin.name(('attention', 'kv_heads'))} ({attention.kv_heads})",
        )
    if attention.group > MAX_GROUP:
        raise origin.error(
            "MKC121",
            ("attention", "query_heads"),
            f"is {attention.query_heads}: {attention.group} query heads share a KV head, "
            f"at most {MAX_GROUP} may",
        )
    if attention.head_dim % HEAD_DIM_MULTIPLE or attention.head_dim > MAX_HEAD_DIM:
        raise origin.error(
            "MKC122",
            ("attention", "head_dim"),
            f"is {attention.head_dim}; it must be a multiple of {HEAD_DIM_MULTIPLE} "
            f"up to {MAX_HEAD_DIM}",
        )


def _check_layer(spec: ModelSpec, layer: LayerSpec, path: SpecPath, origin: Origin) -> None:
    if layer.window is not None and layer.window > spec.max_positions:
        raise origin.error(
            "MKC127",
            (*path, "window"),
            f"is {layer.window}, more than {origin.name(('max_positions',))} "
            f"({spec.max_positions})",
            "a layer that sees every token has no window (null)",
        )
    ffn = layer.ffn
    ffn_path = (*path, "ffn")
    if ffn.width % TILE_ROWS:
        raise _not_multiple(origin, "MKC124", (*ffn_path, "width"), ffn.width, TILE_ROWS)
    if isinstance(ffn, DenseFfn):
        return
    if ffn.experts > MAX_EXPERTS:
        raise origin.error(
            "MKC126", (*ffn_path, "experts"), f"is {ffn.experts}; at most {MAX_EXPERTS} can be used"
        )
    if ffn.experts_per_token > min(MAX_EXPERTS_PER_TOKEN, ffn.experts):
        raise origin.error(
            "MKC125",
            (*ffn_path, "experts_per_token"),
            f"is {ffn.experts_per_token}; at most {MAX_EXPERTS_PER_TOKEN} and no more than "
            f"{origin.name((*ffn_path, 'experts'))} ({ffn.experts}) can be chosen",
        )


def _not_multiple(
    origin: Origin, code: str, path: SpecPath, value: int, multiple: int
) -> DescriptionError:
    return origin.error(code, path, f"is {value}; it must be a multiple of {multiple}")
