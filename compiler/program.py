"""Programs: what each SM does in a step, in order. One entry is one word on the device.

An entry names an op, a layer and a tile. Entries of dynamic ops (attention, ffn_up, ffn_down) stand
for all that SM's tasks of the op; `rules` says which those are once lengths and routing are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from mkc.compiler.errors import LoweringError

WARP_BITS, LAYER_BITS, TILE_BITS = 3, 8, 17  # of an entry's word, behind four for its kind


class EntryKind(IntEnum):
    """Kinds of program entry; the numbers are the wire format.

    END ends a program. STAGE brings a layer's input into shared memory. For ATTENTION and FFN_UP,
    `tile` is the SM's rank in the dynamic rule.
    """

    END = 0
    EMBED = 1
    STAGE = 2
    ROUTER = 3
    QKV = 4
    ATTENTION = 5
    FFN_UP = 6
    MERGE = 7
    OUT = 8
    FFN_DOWN = 9
    RESIDUAL = 10
    HEAD = 11
    SAMPLE = 12


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: `warp` is the consumer warp of its first task, the next tasks follow round robin.

    HEAD entries cover tiles `tile`, `tile + stride`, ... of the LM head, where the stride is the
    number of SMs.
    """

    kind: EntryKind
    layer: int = 0
    tile: int = 0
    warp: int = 0


def encode_programs(programs: Sequence[Sequence[Entry]]) -> npt.NDArray[np.uint32]:
    """Programs -> device table [sms, pitch]: kind | warp << 4 | layer << 7 | tile << 15.

    Every program ends with END; short ones are padded with it. Raises LoweringError MKC201 if a
    field is too large for its bits.
    """
    pitch = max(len(program) for program in programs) + 1
    table = np.zeros((len(programs), pitch), dtype=np.uint32)
    for sm, program in enumerate(programs):
        for index, entry in enumerate(program):
            fields = (entry.warp, WARP_BITS), (entry.layer, LAYER_BITS), (entry.tile, TILE_BITS)
            if any(value >> bits for value, bits in fields):
                raise LoweringError("MKC201", f"{entry} of SM {sm} does not fit an entry's 32 bits")
            table[sm, index] = entry.kind | entry.warp << 4 | entry.layer << 7 | entry.tile << 15
    return table
