"""What the verifier hands back: a `Proof`, or a `VerifyError` that names the fault."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.compiler.errors import CheckError
from mkc.compiler.program import Entry, EntryKind


@dataclass(frozen=True, slots=True)
class Property:
    """One thing that was shown: its name, the argument in a sentence, and how many cases it had."""

    name: str
    shown: str
    cases: int


@dataclass(frozen=True, slots=True)
class Proof:
    """All that was shown of a plan, with the sizes of what was looked at.

    entries: of all programs; packets: of the packet area; edges: of the graph of program order and
    packet dependencies.
    """

    properties: tuple[Property, ...]
    entries: int
    packets: int
    edges: int


class VerifyError(CheckError):
    """A plan was rejected (MKC301 to MKC307): the message says where and why.

    sm, index: the program and the place in it, None for what is in no program.
    """

    def __init__(
        self,
        code: str,
        reason: str,
        sm: int | None = None,
        index: int | None = None,
        entry: Entry | None = None,
    ) -> None:
        where = [] if sm is None else [f"SM {sm}"]
        if index is not None:
            where.append(f"entry {index}")
        if entry is not None:
            where.append(entry_name(entry))
        message = f"the plan is rejected: {', '.join(where)}{': ' if where else ''}{reason}"
        super().__init__(
            code, message, "this is a fault of mkc, not of the model: please report it"
        )
        self.sm = sm
        self.index = index
        self.entry = entry


_WITHOUT_LAYER = (EntryKind.EMBED, EntryKind.HEAD, EntryKind.SAMPLE, EntryKind.END)


def entry_name(entry: Entry) -> str:
    """Such as `layer3.qkv tile 17`."""
    name = entry.kind.name.lower()
    layer = "" if entry.kind in _WITHOUT_LAYER else f"layer{entry.layer}."
    return f"{layer}{name} tile {entry.tile}"
