"""Proofs about the programs alone: what each SM does, how often, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from mkc.compiler.place import CONSUMER_WARPS
from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.proof import Property, VerifyError, entry_name
from mkc.compiler.tile import FRAGMENT_EDGE, Tiling

PHASES = {
    EntryKind.STAGE: 0,
    EntryKind.ROUTER: 1,
    EntryKind.QKV: 2,
    EntryKind.ATTENTION: 3,
    EntryKind.FFN_UP: 4,
    EntryKind.MERGE: 5,
    EntryKind.OUT: 6,
    EntryKind.FFN_DOWN: 6,
    EntryKind.RESIDUAL: 6,
    EntryKind.HEAD: 7,
    EntryKind.SAMPLE: 8,
}
"""The order of a layer's ops in every program; the three ops of an owned tile go together."""

OWNED = (EntryKind.OUT, EntryKind.FFN_DOWN, EntryKind.RESIDUAL)
RANKED = (EntryKind.ATTENTION, EntryKind.FFN_UP, EntryKind.HEAD)
ONCE_PER_SM = (EntryKind.STAGE, EntryKind.SAMPLE, *RANKED)
AFTER_LAYERS = (EntryKind.HEAD, EntryKind.SAMPLE)
STREAMS_WEIGHTS = (
    EntryKind.ROUTER,
    EntryKind.QKV,
    EntryKind.FFN_UP,
    EntryKind.OUT,
    EntryKind.FFN_DOWN,
    EntryKind.HEAD,
)

Places = dict[tuple[EntryKind, int], dict[int, tuple[int, int]]]
"""(kind, layer) -> tile -> (SM, index); the tile of STAGE and SAMPLE is the SM itself."""


def check_programs(plan: Plan) -> list[Property]:
    """Shows that every task is done exactly once, where and when it must be.

    Raises VerifyError MKC302 or MKC306 (a task missing or done twice), MKC303 (an input is not
    staged), MKC304 (order), MKC305 (an SM or warp that does not exist), MKC307 (no such tile).
    """
    if len(plan.programs) != plan.target.sms:
        raise VerifyError(
            "MKC305", f"{len(plan.programs)} programs for {plan.target.sms} SMs of the target"
        )
    for sm, program in enumerate(plan.programs):
        _check_order_of(plan, sm, program)
    places, tasks = _collect(plan)
    _check_complete(plan, places)
    _check_owners(plan, places)
    entries = sum(len(program) for program in plan.programs)
    return [
        Property(
            "program order",
            "each program was walked: layers and phases never go back, every layer begins with "
            "the STAGE of its own input, and out, ffn_down, residual of a tile are neighbours, so "
            "their sum stays in registers",
            entries,
        ),
        Property(
            "coverage",
            "the tiles found for each op of each layer are all of its tiles, each once; ranks of "
            "attention, ffn_up and head are permutations of the SMs, so that the dynamic rules "
            "partition their work",
            tasks,
        ),
        Property(
            "owners",
            "the SM that embeds a tile of the residual has its out, ffn_down and residual tasks in "
            "every layer, and keeps it in a slot (tile / SMs) that no other of its tiles has",
            plan.tiling.hidden_tiles * len(plan.tiling.layers),
        ),
    ]


def _check_order_of(plan: Plan, sm: int, program: tuple[Entry, ...]) -> None:
    layers = len(plan.tiling.layers)
    previous: Entry | None = None
    reached = (-1, 0)
    staged = -1
    for index, entry in enumerate(program):
        reject = partial(_rejection, sm, index, entry)
        if not 0 <= entry.warp < CONSUMER_WARPS:
            raise reject("MKC305", f"warp {entry.warp} is not one of {CONSUMER_WARPS}")
        kind = entry.kind
        if kind == EntryKind.EMBED:
            place = (-1, 0)
            is_layer_right = entry.layer == 0
        elif kind in PHASES:
            place = (entry.layer, PHASES[kind])
            last = layers if kind in AFTER_LAYERS or kind == EntryKind.STAGE else layers - 1
            is_layer_right = (layers if kind in AFTER_LAYERS else 0) <= entry.layer <= last
        else:
            raise reject("MKC304", "ends the program before its last entry")
        if not is_layer_right:
            raise reject("MKC307", f"the model has no such op in layer {entry.layer}")
        if place < reached:
            after = "" if previous is None else f" {entry_name(previous)}"
            raise reject("MKC304", f"stands behind{after}, whose place is after it")
        _check_owned_run(previous, entry, reject)
        if kind == EntryKind.STAGE:
            staged = entry.layer
        elif kind != EntryKind.EMBED and staged != entry.layer:
            have = f"that of layer {staged}" if staged >= 0 else "none"
            raise reject("MKC303", f"the input of layer {entry.layer} is not staged, but {have}")
        previous, reached = entry, place
    if previous is None or previous.kind != EntryKind.SAMPLE:
        raise VerifyError("MKC304", "the program does not end with sample", sm)


def _rejection(sm: int, index: int, entry: Entry, code: str, reason: str) -> VerifyError:
    return VerifyError(code, reason, sm, index, entry)


def _check_owned_run(
    previous: Entry | None, entry: Entry, reject: Callable[[str, str], VerifyError]
) -> None:
    """out, ffn_down and residual of a tile follow one another with nothing in between."""
    before = previous.kind if previous is not None else None
    expected = None
    if before in OWNED[:2]:
        expected = OWNED[OWNED.index(before) + 1]
    if expected is None:
        if entry.kind in OWNED[1:]:
            missing = OWNED[OWNED.index(entry.kind) - 1].name.lower()
            raise reject("MKC304", f"does not follow the {missing} of its tile")
    elif previous is not None and (entry.kind, entry.tile) != (expected, previous.tile):
        raise reject("MKC304", f"parts {entry_name(previous)} from its {expected.name.lower()}")


def _collect(plan: Plan) -> tuple[Places, int]:
    places: Places = {}
    for sm, program in enumerate(plan.programs):
        for index, entry in enumerate(program):
            tile = sm if entry.kind in (EntryKind.STAGE, EntryKind.SAMPLE) else entry.tile
            found = places.setdefault((entry.kind, entry.layer), {})
            if tile in found:
                other, at = found[tile]
                raise VerifyError(
                    _missing_code(entry.kind),
                    f"SM {other}, entry {at} does it too",
                    sm,
                    index,
                    entry,
                )
            found[tile] = (sm, index)
    return places, sum(len(found) for found in places.values())


def _missing_code(kind: EntryKind) -> str:
    return "MKC306" if kind in STREAMS_WEIGHTS else "MKC302"


def expected_tasks(tiling: Tiling, sms: int) -> Iterator[tuple[EntryKind, int, int]]:
    """(kind, layer, number of static tasks or ranks) of every op that a model's programs have."""
    yield EntryKind.EMBED, 0, tiling.hidden_tiles
    for index, layer in enumerate(tiling.layers):
        yield EntryKind.STAGE, index, sms
        if layer.routed:
            yield EntryKind.ROUTER, index, -(-layer.matrices // FRAGMENT_EDGE)
        yield EntryKind.QKV, index, tiling.qkv_tiles
        yield EntryKind.ATTENTION, index, sms
        yield EntryKind.FFN_UP, index, sms
        yield EntryKind.MERGE, index, tiling.merge_units
        for kind in OWNED:
            yield kind, index, tiling.hidden_tiles
    last = len(tiling.layers)
    yield EntryKind.STAGE, last, sms
    yield EntryKind.HEAD, last, sms
    yield EntryKind.SAMPLE, last, sms


def _check_complete(plan: Plan, places: Places) -> None:
    left = dict(places)
    for kind, layer, count in expected_tasks(plan.tiling, plan.target.sms):
        found = left.pop((kind, layer), {})
        for tile, (sm, index) in found.items():
            if not 0 <= tile < count:
                entry = plan.programs[sm][index]
                raise VerifyError("MKC307", f"there are {count} tiles or ranks", sm, index, entry)
        if len(found) != count:
            tile = next(tile for tile in range(count) if tile not in found)
            missing = Entry(kind, layer, 0 if kind == EntryKind.STAGE else tile)
            raise VerifyError(_missing_code(kind), f"no SM does {entry_name(missing)}")
        if kind in ONCE_PER_SM:
            _check_one_each(plan, kind, layer, found)
    for (kind, layer), found in left.items():
        sm, index = next(iter(found.values()))
        entry = plan.programs[sm][index]
        raise VerifyError("MKC307", f"layer {layer} has no {kind.name.lower()}", sm, index, entry)


def _check_one_each(
    plan: Plan, kind: EntryKind, layer: int, found: dict[int, tuple[int, int]]
) -> None:
    seen: dict[int, int] = {}
    for sm, index in found.values():
        if sm in seen:
            entry = plan.programs[sm][index]
            raise VerifyError("MKC302", f"entry {seen[sm]} has a rank too", sm, index, entry)
        seen[sm] = index


def _check_owners(plan: Plan, places: Places) -> None:
    owners = {tile: sm for tile, (sm, _) in places[EntryKind.EMBED, 0].items()}
    slots: dict[tuple[int, int], int] = {}
    for tile, sm in owners.items():
        other = slots.setdefault((sm, tile // plan.target.sms), tile)
        if other != tile:
            raise VerifyError("MKC307", f"residual tiles {other} and {tile} share a slot", sm)
    for layer in range(len(plan.tiling.layers)):
        for kind in OWNED:
            for tile, (sm, index) in places[kind, layer].items():
                if sm != owners[tile]:
                    entry = plan.programs[sm][index]
                    raise VerifyError(
                        "MKC302", f"SM {owners[tile]} owns the tile's residual", sm, index, entry
                    )
