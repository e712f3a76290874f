"""What racecheck reports of the kernel, sorted by what orders the accesses that it could not.

The tool follows bar.sync and syncwarp. It does not follow mbarriers through inline PTX, nor words
that are stored with release and loaded with acquire, and by these the warps of a block hand shared
memory to each other. So each report is a pair of accesses whose order it did not see;
`docs/sanitizers.md` says for each kind of pair what orders it. Any other pair is a finding.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

DEPOSITORS = {"multiply_layer_input", "add_products"}
ROUTERS = {"choose_experts", "list_active"}
WORD_STORES = {"store_release", "store_relaxed"}
WORD_LOADS = {"load_acquire", "load_relaxed", "decode_step"}
FINISHERS = {"embed", "residual"}


@dataclass(frozen=True, slots=True)
class Handover:
    """Accesses of `writers` and of `others` to the same memory, and what orders them."""

    name: str
    writers: frozenset[str]
    others: frozenset[str]

    def covers(self, one: str, other: str) -> bool:
        """Whether these two accesses are of this kind, in either order."""
        return (one in self.writers and other in self.others) or (
            other in self.writers and one in self.others
        )


def _handover(name: str, writers: set[str], others: set[str]) -> Handover:
    return Handover(name, frozenset(writers), frozenset(others))


HANDOVERS = (
    _handover("ring", {"bulk_copy"}, {"load_fragment", "write_key", "write_value"}),
    _handover("deposits", DEPOSITORS, DEPOSITORS | {"collect"}),
    _handover("words", WORD_STORES, WORD_STORES | WORD_LOADS),
    _handover(
        "routing tables",
        ROUTERS,
        ROUTERS | {"produce", "products", "finish_up", "add_products", "gather_values", "route"},
    ),
    _handover(
        "lent states",
        {"lend_state", "attend", "gather_values"},
        {"absorb_state", "load_fragment", "attend"},
    ),
    _handover("owned tiles", FINISHERS | {"add_products"}, FINISHERS | {"add_products", "publish"}),
)

_FIRST = re.compile(r"Race reported between \w+ access at (?P<where>.*?)\+0x")
_OTHER = re.compile(r"and \w+ access at (?P<where>.*?)\+0x.*?\[(?P<count>\d+) hazards\]")


def function_of(where: str) -> str:
    """The plain name of a function as the tool prints it: without scope, templates, parameters."""
    plain = where
    while (shorter := re.sub(r"<[^<>]*>", "", plain)) != plain:
        plain = shorter
    name = plain.split("(")[0].split("::")[-1].split()[-1]
    return re.sub(r"^decode_step_\d+$", "decode_step", name)


def sort_reports(text: str) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """(hazards of each kind of handover, hazards of each pair that is none of them)."""
    known: Counter[str] = Counter()
    unknown: Counter[tuple[str, str]] = Counter()
    first = ""
    for line in text.splitlines():
        if found := _FIRST.search(line):
            first = function_of(found["where"])
        elif found := _OTHER.search(line):
            other = function_of(found["where"])
            kinds = [kind.name for kind in HANDOVERS if kind.covers(first, other)]
            if kinds:
                known[kinds[0]] += int(found["count"])
            else:
                unknown[first, other] += int(found["count"])
    return known, unknown
