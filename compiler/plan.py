"""`Plan`: all that the passes decided, the one object that kernel, interpreter and proofs share."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.compiler.place import Layout
from mkc.compiler.schedule import Programs
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import Target
from mkc.compiler.tile import Tiling


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose besides model and target.

    max_batch: rows of the largest step; chunk_fragments: fragments of 512 bytes in a chunk;
    window_bytes: bytes that one SM may have in flight; ring_slots: chunks that the ring holds
    (None: as many as fit); trace: whether the kernel records when each warp does what.
    """

    max_batch: int = 8
    chunk_fragments: int = 32
    window_bytes: int = 98304
    ring_slots: int | None = None
    trace: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Model, target and every decision between them. Programs are indexed by SM."""

    spec: ModelSpec
    target: Target
    options: Options
    tiling: Tiling
    layout: Layout
    programs: Programs
