"""One file of a checkpoint in the safetensors format: what its header says, fully checked.

    uint64 n, n bytes of JSON {name: {dtype, shape, data_offsets}}, the tensors' bytes

Files come from anywhere, so nothing is believed: whatever is wrong is a WeightsError that names the
file and the tensor, before a byte of a tensor is read. Tensors must cover the data without gaps or
overlaps, as the format demands; a file that is cut short is told by that.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mkc.compiler.source import quoted
from mkc.runtime.weights import WeightsError

MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
MAX_DIMENSIONS = 8
LENGTH_BYTES = 8
METADATA = "__metadata__"
DOWNLOAD_AGAIN = "download or write the file again"

_BYTES_OF_DTYPES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file: `bytes` bytes from `offset` on; dtype in safetensors' words."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name, in the order of their bytes.

    Raises WeightsError MKC608 if it is missing, cut short or otherwise not well-formed.
    """
    with open_file(path) as stream:
        size = path.stat().st_size
        start, text = _header_text(stream, path, size)
    header = parse_object(text, f"the header of {path}")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict):
        raise damaged(path, f"its {METADATA} is {_shown(metadata)}, not an object")
    entries = [_entry(path, name, value, start) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.bytes))
    end = start
    for entry in entries:
        if entry.offset != end:
            kind = "overlaps" if entry.offset < end else "leaves a gap behind"
            raise damaged(path, f"{shown_name(entry.name)} {kind} the tensor before it")
        end += entry.bytes
    if end != size:
        what = "is cut short" if size < end else "has bytes behind its last tensor"
        raise damaged(path, f"it {what}: {size} bytes, its header says {end}")
    return {entry.name: entry for entry in entries}


def open_file(path: Path) -> BinaryIO:
    """A regular file, open for reading. Raises WeightsError MKC608 for anything else."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path.open("rb")
        reason = "it is not a regular file"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise WeightsError("MKC608", f"{path} cannot be read: {reason}")


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object; keys that come twice are refused. Raises WeightsError MKC608 naming `what`."""

    def distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"it has {shown_name(key)} twice")
            found[key] = value
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=distinct)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)[:200]
    else:
        if isinstance(value, dict):
            return value
        reason = f"it is {_shown(value)}"
    raise WeightsError("MKC608", f"{what} is no JSON object: {reason}", DOWNLOAD_AGAIN)


def damaged(path: Path, what: str) -> WeightsError:
    """The error for a file that says or holds what it should not."""
    return WeightsError("MKC608", f"{path} is damaged: {what}", DOWNLOAD_AGAIN)


def shown_name(name: str) -> str:
    """A tensor's or file's name in a message: quoted in ASCII unless it is plain."""
    return name if re.fullmatch(r"[\w.-]{1,200}", name, re.ASCII) else quoted(name)


def _header_text(stream: BinaryIO, path: Path, size: int) -> tuple[int, bytes]:
    """(where the tensors' bytes begin, the header's JSON)."""
    prefix = stream.read(LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES or LENGTH_BYTES + length > size:
        raise damaged(
            path,
            f"its {size} bytes do not hold a header"
            + (f" of {length} bytes" if len(prefix) == LENGTH_BYTES else ""),
        )
    if length > MAX_HEADER_BYTES:
        raise damaged(path, f"its header has {length} bytes, more than {MAX_HEADER_BYTES}")
    text = stream.read(length)
    if len(text) < length:
        raise damaged(path, f"it ended after {len(text)} of its header's {length} bytes")
    return LENGTH_BYTES + length, text


def _entry(path: Path, name: str, value: Any, start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise damaged(
            path, f"{shown_name(name)} has not just dtype, shape and data_offsets: {_shown(value)}"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise damaged(path, f"{shown_name(name)} has dtype {_shown(dtype)}")
    if not _is_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise damaged(path, f"{shown_name(name)} has shape {_shown(shape)}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise damaged(path, f"{shown_name(name)} has data_offsets {_shown(offsets)}")
    size = offsets[1] - offsets[0]
    needed = _BYTES_OF_DTYPES.get(dtype)
    if needed is not None:
        for extent in shape:
            needed *= extent
        if needed != size:
            raise damaged(
                path,
                f"{shown_name(name)} is {shown_name(dtype)} {shape}, which does not take the "
                f"{size} bytes it has",
            )
    return TensorEntry(name, path, dtype, tuple(shape), start + offsets[0], size)


def _is_counts(value: Any) -> bool:
    """Whether it is a list of integers that can count something in a file."""
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:56] + "..."
