"""A packed copy: the weight arena as one file, written once, mapped or read at later starts.

docs/format.md has its bytes. The file appears by one rename, whole. A start reads the header and
compares sizes, model and layout; every byte is compared with its region's hash only on request, for
that takes as long as reading all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import mmap
import os
import secrets
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mkc.compiler.place import Layout
from mkc.compiler.spec import ModelSpec
from mkc.runtime.packing import pack_weights
from mkc.runtime.reading import Reader
from mkc.runtime.shard import open_file, parse_object
from mkc.runtime.weights import ModelWeights, WeightsError

MAGIC = b"MKCPACK\0"
FORMAT_VERSION = 1
PRELUDE = struct.Struct("<8sIIQQ32s")
ALIGNMENT = 4096
MAX_HEADER_BYTES = 64 << 20
HASH_THREADS = 8
PACK_AGAIN = "write it again with `mkc pack`"


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """What a packed copy says of itself; `regions` are [name, layer, offset, bytes, sha256]."""

    model: str
    mkc: str
    spec_hash: str
    layout_hash: str
    checkpoint: str
    arena_offset: int
    arena_bytes: int
    regions: tuple[tuple[str, int, int, int, str], ...]


def spec_hash(spec: ModelSpec) -> str:
    """SHA-256 of all that a description says but the model's name."""
    return _hash(spec.model_dump(mode="json", exclude={"name"}))


def layout_hash(layout: Layout) -> str:
    """SHA-256 of the arena's regions: where each weight lies and in which order of bytes."""
    return _hash([layout.arena_bytes, [asdict(region) for region in layout.regions]])


def write_packed(
    path: Path,
    layout: Layout,
    spec: ModelSpec,
    weights: ModelWeights,
    checkpoint: str,
    progress: Callable[[str], None] | None = None,
) -> PackedHeader:
    """Packs `weights`, on the CPU, to the file `path`; `checkpoint` is their fingerprint.

    The arena is the file's mapping, so memory beside it holds one layer. A packed copy that is
    there already is replaced; anything else is refused with WeightsError MKC609. Raises OSError
    if the disk is too small, before anything is packed.
    """
    if path.exists() and not _is_packed(path):
        raise WeightsError(
            "MKC609", f"{path} exists and is no packed copy, so it is left as it is", "choose -o"
        )
    header = PackedHeader(
        model=spec.name,
        mkc=importlib.metadata.version("mkc"),
        spec_hash=spec_hash(spec),
        layout_hash=layout_hash(layout),
        checkpoint=checkpoint,
        arena_offset=_header_room(layout),
        arena_bytes=layout.arena_bytes,
        regions=(),
    )
    report = progress or (lambda what: None)
    with _replacing(path) as descriptor:
        size = header.arena_offset + header.arena_bytes
        os.posix_fallocate(descriptor, 0, size)
        mapped = mmap.mmap(descriptor, size)
        arena = torch.frombuffer(mapped, dtype=torch.uint8, offset=header.arena_offset)
        pack_weights(layout, spec, weights, "cpu", progress, into=arena)
        report("checksums")
        runs = [(region.offset, region.bytes) for region in layout.regions]
        regions = tuple(
            (region.name, region.layer, region.offset, region.bytes, sha)
            for region, sha in zip(layout.regions, _hashes(arena, runs), strict=True)
        )
        header = replace(header, regions=regions)
        content = _dump(header)
        mapped[: len(content)] = content
        report("writing")
        mapped.flush()
    return header


def open_packed(
    path: Path,
    layout: Layout,
    spec: ModelSpec,
    device: torch.device | str = "cpu",
    checkpoint: str | None = None,
    verify: bool = False,
) -> Tensor:
    """The arena of a packed copy, uint8 [layout.arena_bytes]: on the CPU a read-only mapping of the
    file, on a GPU read through pinned memory.

    checkpoint: the fingerprint that the copy must have been made of. verify: compare every byte
    with the hashes. Raises WeightsError MKC609 that says what does not fit.
    """
    header = read_packed_header(path)
    for what, found, wanted in (
        ("of another model", header.spec_hash, spec_hash(spec)),
        ("in another layout", header.layout_hash, layout_hash(layout)),
        ("of another checkpoint", header.checkpoint, checkpoint or header.checkpoint),
    ):
        if found != wanted:
            raise WeightsError("MKC609", f"{path} has the weights {what}", PACK_AGAIN)
    if verify:
        verify_packed(path, header)
    if torch.device(device).type == "cpu":
        return _mapping(path, header)
    arena = torch.empty(header.arena_bytes, dtype=torch.uint8, device=device)
    Reader(device).read(path, header.arena_offset, arena)
    return arena


def read_packed_header(path: Path) -> PackedHeader:
    """The header of a packed copy, its sizes compared with the file's. Raises WeightsError MKC609
    (MKC608 if there is no file to read)."""
    with open_file(path) as stream:
        prelude = stream.read(PRELUDE.size)
        if len(prelude) < PRELUDE.size or not prelude.startswith(MAGIC):
            raise WeightsError("MKC609", f"{path} is no packed copy", PACK_AGAIN)
        _, version, length, offset, size, sha = PRELUDE.unpack(prelude)
        if version != FORMAT_VERSION:
            what = f"format version {version}; this mkc reads version {FORMAT_VERSION}"
            raise WeightsError("MKC609", f"{path} has {what}", PACK_AGAIN)
        present = path.stat().st_size
        if size != present or length > MAX_HEADER_BYTES or PRELUDE.size + length > offset:
            what = f"it has {present} bytes, its header says {size}"
            raise WeightsError("MKC609", f"{path} is cut short or damaged: {what}", PACK_AGAIN)
        text = stream.read(length)
    if hashlib.sha256(text).digest() != sha:
        raise WeightsError("MKC609", f"{path} has a damaged header", PACK_AGAIN)
    document = parse_object(text, f"the header of {path}")
    try:
        regions = tuple(
            (str(name), int(layer), int(start), int(count), str(digest))
            for name, layer, start, count, digest in document.pop("regions")
        )
        header = PackedHeader(**document, regions=regions)
        is_sound = (header.arena_offset, header.arena_offset + header.arena_bytes) == (offset, size)
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise WeightsError("MKC609", f"{path} has a header that contradicts itself", PACK_AGAIN)
    return header


def verify_packed(path: Path, header: PackedHeader) -> None:
    """Compares every byte of the arena with the header's hashes.

    Raises WeightsError MKC609 that names all regions that differ, or says that bytes between them
    are not zero.
    """
    arena = _mapping(path, header)
    found = _hashes(arena, [(offset, size) for _, _, offset, size, _ in header.regions])
    wrong = [
        f"{name} of layer {layer}" if layer >= 0 else name
        for (name, layer, _, _, sha), actual in zip(header.regions, found, strict=True)
        if sha != actual
    ]
    ends = [0, *(offset + size for _, _, offset, size, _ in header.regions)]
    starts = [*(offset for _, _, offset, _, _ in header.regions), header.arena_bytes]
    if any(bool(arena[end:start].any()) for end, start in zip(ends, starts, strict=True)):
        wrong.append("what lies between regions")
    if wrong:
        raise WeightsError("MKC609", f"{path} is damaged: {', '.join(wrong)}", PACK_AGAIN)


def _mapping(path: Path, header: PackedHeader) -> Tensor:
    """The arena's bytes; they must not be written to."""
    with open_file(path) as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(
            mapped, dtype=torch.uint8, offset=header.arena_offset, count=header.arena_bytes
        )


def _hashes(arena: Tensor, runs: Sequence[tuple[int, int]]) -> list[str]:
    """SHA-256 of each (offset, bytes) of the arena; hashlib lets threads run side by side."""
    view = arena.numpy().data

    def one(run: tuple[int, int]) -> str:
        return hashlib.sha256(view[run[0] : run[0] + run[1]]).hexdigest()

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return list(pool.map(one, runs))


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _dump(header: PackedHeader) -> bytes:
    """Prelude and JSON."""
    text = json.dumps(asdict(header), separators=(",", ":")).encode()
    size = header.arena_offset + header.arena_bytes
    sha = hashlib.sha256(text).digest()
    prelude = PRELUDE.pack(MAGIC, FORMAT_VERSION, len(text), header.arena_offset, size, sha)
    return prelude + text


def _header_room(layout: Layout) -> int:
    """Bytes that the header may take: more than a region's line needs, in whole pages."""
    return -(-(1024 + 256 * len(layout.regions)) // ALIGNMENT) * ALIGNMENT


def _is_packed(path: Path) -> bool:
    with open_file(path) as stream:
        return stream.read(len(MAGIC)) == MAGIC


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """A new file beside `path`, by its descriptor, that takes its place if the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
