"""Proof that what the warps of one SM share is not overwritten while another still needs it.

- *Routing tables.* Two take turns. The helpers fill that of the r-th routed layer L once every
  consumer warp and the producer has begun layer L - 1; the table was last used in the FFN of the
  routed layer r - 2. So that FFN must stand before the STAGE of layer L - 1 in every program. Of
  the helpers, none can fill a table that another still lists: they meet once for each routing.
- *Norm weights of an owned tile.* The warp of OUT keeps them for the warp of RESIDUAL, and the next
  OUT overwrites them. With one warp for all OUT and RESIDUAL of an SM its own order is enough.
- *Residual rows* may go from one finishing warp to another: a warp finishes a tile once it has seen
  all eight parts of its sums, and a warp closes its part after all it did in earlier entries.
- *Layer input and its squares.* Each warp has its own slice of K, which only it writes (STAGE) and
  only it reads (`verify_ring` shows that slices agree), so other warps may be a layer behind.
- *Sums of a tile.* Each warp writes its own part. OUT opens it, FFN_DOWN adds to it and RESIDUAL
  closes it: `verify_programs` shows that the three are neighbours.
- *Lent states.* A warp's scratch has a state until the warp that finishes the split has taken it;
  the split's number, layer * rows + row, must not come twice on an SM: a rank has at most one split
  of a row, as the KV heads' splits are no more than the SMs. A row's attention state must fit.
- *Values in scratch.* Of an expert's members, at most all rows, scratch takes a piece of a slice at
  a time, of whole steps of the multiplication; it must hold one step of each row.
"""

from __future__ import annotations

from mkc.compiler.place import SCRATCH_WORDS_PER_PARCEL, scratch_words
from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.proof import Property, VerifyError
from mkc.compiler.tile import FRAGMENT_EDGE
from mkc.compiler.verify_order import USES_ROUTING

LANES = 32
STEP_FRAGMENTS = 8  # that a warp multiplies at a time


def check_shared(plan: Plan) -> list[Property]:
    """Shows the reuse of what warps of one SM share.

    Raises VerifyError MKC303 (overwritten before it is read) or MKC305 (does not fit).
    """
    routed = [index for index, layer in enumerate(plan.tiling.layers) if layer.routed]
    uses = owned = 0
    for sm, program in enumerate(plan.programs):
        uses += _check_tables(sm, program, routed)
        owned += _check_owner_warp(sm, program)
    _check_states(plan)
    return [
        Property(
            "reuse of routing tables",
            "on every SM the FFN of a routed layer stands before the STAGE after which the "
            "helpers may fill its table again",
            uses,
        ),
        Property(
            "owner's warp",
            "on every SM one warp finishes all tiles of the residual, so the norm weights it keeps "
            "are its own; a split's state fits a warp's scratch and its number is its own",
            owned,
        ),
    ]


def _check_tables(sm: int, program: tuple[Entry, ...], routed: list[int]) -> int:
    freed = {old: new - 1 for old, new in zip(routed, routed[2:], strict=False)}
    begun: set[int] = set()
    uses = 0
    for index, entry in enumerate(program):
        if entry.kind == EntryKind.STAGE:
            begun.add(entry.layer)
        elif entry.kind in USES_ROUTING and entry.layer in freed:
            if freed[entry.layer] in begun:
                raise VerifyError(
                    "MKC303",
                    f"layer {freed[entry.layer]} has begun, so the routing of layer "
                    f"{freed[entry.layer] + 1} may have replaced that of layer {entry.layer}",
                    sm,
                    index,
                    entry,
                )
            uses += 1
    return uses


def _check_owner_warp(sm: int, program: tuple[Entry, ...]) -> int:
    warp, owned = None, 0
    for index, entry in enumerate(program):
        if entry.kind not in (EntryKind.OUT, EntryKind.RESIDUAL):
            continue
        if warp is None:
            warp = entry.warp
        if entry.warp != warp:
            raise VerifyError(
                "MKC303",
                f"warp {warp} finishes the SM's other tiles of the residual: the norm weights of "
                "one could be replaced before they are used",
                sm,
                index,
                entry,
            )
        owned += 1
    return owned


def _check_states(plan: Plan) -> None:
    tiling = plan.tiling
    if tiling.kv_heads * tiling.max_splits > plan.target.sms:
        raise VerifyError("MKC303", "an SM could have two splits of a row, with the same number")
    words = scratch_words(tiling, 1)
    lent = 4 * (tiling.head_tiles + 1) * LANES
    finished = tiling.group * (tiling.head_tiles * FRAGMENT_EDGE + 2)
    if max(lent, finished) > words:
        raise VerifyError(
            "MKC305", f"a split's state of {max(lent, finished)} words exceeds scratch"
        )
    for shared in plan.layout.shared:
        parcels = scratch_words(tiling, shared.rows) // SCRATCH_WORDS_PER_PARCEL
        if parcels < STEP_FRAGMENTS * shared.rows:
            raise VerifyError("MKC305", f"scratch of {parcels} parcels holds no step of all rows")
