"""`mkc explain`: why a task sits where it does, what it waits for, and what waits for it.

An `Explanation` is a title, facts as (name, text) pairs, and tables; the command line prints it.
Times come from one simulated step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mkc.compiler.place import PacketSet
from mkc.compiler.placement import BY_BYTES, candidates, placement_rule
from mkc.compiler.plan import Plan
from mkc.compiler.program import Entry, EntryKind
from mkc.compiler.proof import entry_name
from mkc.compiler.simulate import SimulatedStep
from mkc.compiler.simulate_causes import Hop, HopKind, critical_path
from mkc.compiler.simulate_tasks import BEHAVIOUR, NONE, Signal, SimTask
from mkc.compiler.simulate_waits import Slacks, Spent, time_spent

SHOWN = 5
"""Rows of a list that would otherwise be long."""
WITHOUT_LAYER = (EntryKind.EMBED, EntryKind.HEAD, EntryKind.SAMPLE)
SEVERAL_TASKS = (EntryKind.ATTENTION, EntryKind.FFN_UP, EntryKind.HEAD)
_TASK = re.compile(r"(?:layer(?P<layer>\d+)\.)?(?P<kind>[a-z_]+):(?P<tile>\d+)")
_PACKET = re.compile(r"(?P<set>[a-z_]+)\[(?P<item>\d+(?:, ?\d+)*)\]|(?P<number>\d+)")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headers, with a line above them; columns numbered in `left` align left."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of one thing."""

    title: str
    facts: list[tuple[str, str]]
    tables: list[Table] = field(default_factory=list)


def microseconds(seconds: float) -> str:
    """Such as 12.34 us."""
    return f"{seconds * 1e6:.2f} us"


def kilobytes(size: float) -> str:
    """Such as 64 KB, of 1024 bytes as chunks are counted."""
    return f"{size / 1024:.0f} KB"


class UnknownName(LookupError):
    """A name that stands for nothing in the plan; the second argument says what would."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class Explainer:
    """Explains parts of one simulated step."""

    def __init__(self, step: SimulatedStep) -> None:
        self.step, self.plan = step, step.plan

    @cached_property
    def slacks(self) -> Slacks:
        """Slack of tasks and signals."""
        return Slacks(self.step)

    @cached_property
    def path(self) -> list[Hop]:
        """The critical path."""
        return critical_path(self.step)

    @cached_property
    def _on_path(self) -> set[tuple[int, int]]:
        return {(hop.sm, hop.place) for hop in self.path}

    def task(self, name: str) -> Explanation:
        """Why a task sits where it does. Raises UnknownName."""
        sm, index, entry = find_entry(self.plan, name)
        places = [p for p, t in enumerate(self.step.tasks.programs[sm]) if t.entry_index == index]
        facts = [
            ("where", f"SM {sm}, entry {index} of {len(self.plan.programs[sm])}"),
            ("why there", placement_rule(self.plan, entry)),
            ("how", _how(self.plan, entry)),
            ("streams", self._streams(sm, places)),
        ]
        facts += self._waits(sm, places) + self._readers(sm, places)
        return Explanation(
            entry_name(entry), facts, [*self._candidates(sm, entry), self._times(sm, places)]
        )

    def _streams(self, sm: int, places: Sequence[int]) -> str:
        pieces = [
            piece
            for place in places
            for run in self.step.tasks.programs[sm][place].runs
            for piece in run.pieces
        ]
        if not pieces:
            return "nothing" if places else "nothing: it has no task in this step"
        chunks = sum(piece.chunks for piece in pieces)
        size = sum(piece.bytes for piece in pieces)
        tasks = f" in {len(places)} tasks" if len(places) > 1 else ""
        return f"{kilobytes(size)}, {chunks} chunk{'s' * (chunks > 1)}{tasks}"

    def _waits(self, sm: int, places: Sequence[int]) -> list[tuple[str, str]]:
        signals = dict.fromkeys(
            run.signal
            for place in places
            for run in self.step.tasks.programs[sm][place].runs
            if run.signal != NONE
        )
        facts = []
        for signal in list(signals)[:SHOWN]:
            last_sm, last_place = self.step.last_writer[signal]
            last = self.step.tasks.programs[last_sm][last_place]
            facts.append(
                (
                    "waits for",
                    f"{self.signal_name(signal)}: {self.step.tasks.writers[signal]} tasks, the "
                    f"last {entry_name(last.entry)} on SM {last_sm}; seen at "
                    f"{microseconds(self.step.seen[signal])}",
                )
            )
        return facts + _more("waits for", len(signals))

    def _readers(self, sm: int, places: Sequence[int]) -> list[tuple[str, str]]:
        signals = dict.fromkeys(
            task.writes
            for place in places
            if (task := self.step.tasks.programs[sm][place]).writes != NONE
        )
        facts = []
        for signal in list(signals)[:SHOWN]:
            readers = self.slacks.readers(signal)
            kinds = dict.fromkeys(
                self.step.tasks.programs[s][p].entry.kind.name.lower() for s, p in readers
            )
            sms = len({s for s, _ in readers})
            facts.append(
                (
                    "awaited by",
                    f"{len(readers)} tasks ({', '.join(kinds)}) on {sms} SMs, through "
                    f"{self.signal_name(signal)}",
                )
            )
        return facts + _more("awaited by", len(signals))

    def _candidates(self, sm: int, entry: Entry) -> list[Table]:
        """The SMs that had streamed least when the entry was placed, and the one chosen."""
        if entry.kind not in BY_BYTES:
            return []
        ranked = candidates(self.plan, entry)
        chosen = next(n for n, candidate in enumerate(ranked) if candidate.sm == sm)
        shown = sorted(
            {*range(SHOWN), chosen, chosen + 1, len(ranked) - 1} & set(range(len(ranked)))
        )
        rows = [
            (
                f"{n + 1} of {len(ranked)}",
                f"{ranked[n].sm}",
                f"{ranked[n].streamed / 1e6:.3f} MB",
                f"{ranked[n].tiles}",
                "chosen" if n == chosen else "",
            )
            for n in shown
        ]
        headers = ("by bytes", "SM", "streamed before", "tiles of the op", "")
        title = "SMs when it was placed, least streamed first (one row, uniform routing)"
        return [Table(title, headers, rows, (0, 4))]

    def _times(self, sm: int, places: Sequence[int]) -> Table:
        times = self.step.times[sm]
        rows = []
        for place in places:
            task = self.step.tasks.programs[sm][place]
            rows.append(
                (
                    part_name(self.plan, task),
                    microseconds(times.start[place]),
                    microseconds(times.ready[place]),
                    microseconds(times.end[place]),
                    microseconds(self.slacks.of_task(sm, place)),
                    "yes" if (sm, place) in self._on_path else "",
                )
            )
        headers = ("task", "warps free", "ready", "end", "slack", "critical")
        title = "predicted, from the step's first request; slack: it could end this much later"
        return Table(title, headers, rows, (0, 5))

    def packet(self, name: str) -> Explanation:
        """Who writes a packet and who reads it: the name is `merged[3,5,0]` or a number.

        Raises UnknownName.
        """
        packets, item = find_item(self.plan, name)
        at = ", ".join(f"{axis} {n}" for axis, n in zip(packets.axes, item, strict=True))
        first = packets.index(*item)
        facts = [
            ("holds", _HOLDS[packets.name]),
            ("packets", f"{first} to {first + packets.packets - 1}, {16 * packets.packets} bytes"),
        ]
        layer = item[packets.axes.index("layer")] if "layer" in packets.axes else None
        signals = [
            n
            for n, signal in enumerate(self.step.tasks.signals)
            if signal.set == packets.name and layer in (None, signal.layer)
        ]
        rows = []
        for signal in signals[:64]:
            last_sm, last_place = self.step.last_writer[signal]
            last = self.step.tasks.programs[last_sm][last_place]
            rows.append(
                (
                    self.signal_name(signal),
                    str(self.step.tasks.writers[signal]),
                    f"SM {last_sm} {entry_name(last.entry)}",
                    microseconds(self.step.seen[signal]),
                    str(len(self.slacks.readers(signal))),
                    microseconds(self.slacks.of_signal(signal)),
                )
            )
        headers = ("waited for as", "writers", "the last", "seen", "readers", "slack")
        title = "groups that are waited for together, predicted"
        return Explanation(f"{packets.name}[{at}]", facts, [Table(title, headers, rows, (0, 2))])

    def layer(self, number: int) -> Explanation:
        """A layer from its input to the next one's: ops, and its part of the critical path."""
        if not 0 <= number < len(self.plan.spec.layers):
            raise UnknownName(f"there is no layer {number}", "they count from 0")
        begin, end = self.step.layer_begin(number), self.step.layer_begin(number + 1)
        size = self.step.layer_bytes()[number]
        rate = size / (end - begin)
        facts = [
            ("input seen", microseconds(begin)),
            ("next input seen", f"{microseconds(end)}, {microseconds(end - begin)} later"),
            ("streams", f"{size / 1e6:.2f} MB, {rate / self.plan.target.hbm_bytes_per_second:.1%} "
             "of the datasheet's bandwidth over that time"),
        ]  # fmt: skip
        hops = [hop for hop in self.path if begin - 1e-9 <= hop.begin < end - 1e-9]
        return Explanation(f"layer {number}", facts, [self._ops(number), self.hops(hops)])

    def _ops(self, layer: int) -> Table:
        found: dict[EntryKind, list[tuple[int, int]]] = {}
        for sm, program in enumerate(self.step.tasks.programs):
            for place, task in enumerate(program):
                if task.entry.layer == layer and task.entry.kind not in WITHOUT_LAYER:
                    found.setdefault(task.entry.kind, []).append((sm, place))
        rows = []
        for kind in sorted(found, key=lambda kind: self._first_start(found[kind])):
            tasks = found[kind]
            times = [self.step.times[sm] for sm, _ in tasks]
            waits = [t.ready[p] - t.start[p] for t, (_, p) in zip(times, tasks, strict=True)]
            rows.append(
                (
                    kind.name.lower(),
                    str(len(tasks)),
                    microseconds(self._first_start(tasks)),
                    microseconds(max(t.end[p] for t, (_, p) in zip(times, tasks, strict=True))),
                    microseconds(sum(waits) / len(waits)),
                    microseconds(min(self.slacks.of_task(sm, place) for sm, place in tasks)),
                )
            )
        headers = ("op", "tasks", "first start", "last end", "mean wait", "least slack")
        return Table("ops over all SMs, predicted", headers, rows)

    def _first_start(self, tasks: Sequence[tuple[int, int]]) -> float:
        return min(self.step.times[sm].start[place] for sm, place in tasks)

    def whole_step(self) -> Explanation:
        """Where the time of the step goes."""
        step, target = self.step, self.plan.target
        lengths = ", ".join(map(str, step.tasks.lengths))
        seconds = dict.fromkeys(HopKind, 0.0)
        for hop in self.path:
            seconds[hop.kind] += hop.seconds
        chain = ", ".join(f"{microseconds(s)} {_HOPS[kind]}" for kind, s in seconds.items())
        facts = [
            ("rows see", f"{lengths} tokens"),
            ("predicted", f"{step.seconds * 1e3:.4f} ms, {step.share_of_floor:.1%} of the floor"),
            ("floor", f"{step.floor_seconds * 1e3:.4f} ms: {step.bytes / 1e9:.3f} GB at "
             f"{target.hbm_bytes_per_second / 1e12:.2f} TB/s"),
            ("critical path", f"{len(self.path)} hops: {chain}"),
            ("launch", microseconds(target.measured.launch_seconds)),
        ]  # fmt: skip
        spent = time_spent(step)
        rows = []
        for cause in Spent:
            values = sorted(one[cause] for one in spent)
            mean = sum(values) / len(values)
            rows.append(
                (
                    cause.value,
                    microseconds(mean),
                    microseconds(values[-1]),
                    f"{mean / step.seconds:.1%}",
                )
            )
        headers = ("what an SM's stream does", "mean", "most", "of the step")
        return Explanation("one step", facts, [Table("time by cause", headers, rows)])

    def hops(self, hops: Sequence[Hop]) -> Table:
        """A part of the critical path as a table."""
        rows = [
            (
                microseconds(hop.begin),
                microseconds(hop.seconds),
                self.hop_text(hop),
                microseconds(hop.slack_seconds),
            )
            for hop in hops
        ]
        title = "critical path; slack: what comes next would gain as much from a sooner end"
        return Table(title, ("from", "takes", "what", "slack"), rows, (2,))

    def hop_text(self, hop: Hop) -> str:
        """A hop of the critical path as a phrase."""
        task = self.step.tasks.programs[hop.sm][hop.place]
        name = entry_name(task.entry)
        match hop.kind:
            case HopKind.STREAM:
                return f"SM {hop.sm} streams {kilobytes(hop.bytes)} up to {name}"
            case HopKind.HAND_OFF:
                return f"{self.signal_name(hop.signal)} travels from SM {hop.sm} to all"
        return f"SM {hop.sm} works on {name}"

    def signal_name(self, number: int) -> str:
        """A signal as a phrase, such as `qkv of layer 3, KV head 2`."""
        return signal_name(self.plan, self.step.tasks.signals[number])


_HOPS = {
    HopKind.STREAM: "streaming",
    HopKind.WORK: "in warps",
    HopKind.HAND_OFF: "in hand-offs",
}
_HOLDS = {
    "layer_input": "16 values of a row's layer input and the sum of their squares",
    "router_logits": "a row's logits of 16 experts",
    "qkv": "16 values of a row's Q, K or V",
    "partials": "one split's maximum, sum and 32 values of a head",
    "merged": "16 values of a row's attention output",
    "hidden": "16 hidden values of one of a row's experts, weighted",
    "candidates": "the best token of one SM's part of the vocabulary",
}


def signal_name(plan: Plan, signal: Signal) -> str:
    """A signal as a phrase."""
    heads = plan.tiling.kv_heads
    place = {
        "qkv": f", KV head {signal.part}",
        "merged": f", KV head {signal.part}",
        "partials": f", row {signal.part // heads}, KV head {signal.part % heads}",
        "hidden": f", expert group {signal.part}",
    }.get(signal.set, "")
    is_last = signal.layer == len(plan.spec.layers)
    layer = (
        ""
        if signal.set == "candidates"
        else " of the head"
        if is_last
        else f" of layer {signal.layer}"
    )
    return f"{signal.set}{layer}{place}"


def part_name(plan: Plan, task: SimTask) -> str:
    """What tells a task from the others of its entry."""
    layers = plan.tiling.layers
    match task.entry.kind:
        case EntryKind.FFN_UP:
            expert, tile = divmod(task.part, layers[task.entry.layer].width_tiles)
            return f"active expert {expert}, tile {tile}"
        case EntryKind.ATTENTION | EntryKind.MERGE:
            return f"row {task.part}"
        case EntryKind.HEAD:
            return f"vocabulary tile {task.part}"
    return f"tile {task.entry.tile}"


def find_entry(plan: Plan, name: str) -> tuple[int, int, Entry]:
    """(SM, index, entry) of a task's name, such as layer3.qkv:17, head:0 or layer3.stage:SM.

    Raises UnknownName.
    """
    match = _TASK.fullmatch(name)
    known = [kind.name.lower() for kind in BEHAVIOUR]
    if match is None or match["kind"] not in known:
        raise UnknownName(
            f"{name!r} is no task", f"layer3.qkv:17 is one; ops are {', '.join(known)}"
        )
    kind, tile = EntryKind[match["kind"].upper()], int(match["tile"])
    layer = 0 if kind == EntryKind.EMBED else len(plan.spec.layers)
    if kind not in WITHOUT_LAYER and match["layer"] is None:
        raise UnknownName(f"{name!r} names no layer", f"such as layer0.{name}")
    if match["layer"] is not None:
        layer = int(match["layer"])
    for sm, program in enumerate(plan.programs):
        for index, entry in enumerate(program):
            own = sm if kind in (EntryKind.STAGE, EntryKind.SAMPLE) else entry.tile
            if (entry.kind, entry.layer, own) == (kind, layer, tile):
                return sm, index, entry
    raise UnknownName(f"no program has {name}", "`mkc inspect ARTIFACT sm N` lists one")


def find_item(plan: Plan, name: str) -> tuple[PacketSet, tuple[int, ...]]:
    """The packet set and item of a packet's name. Raises UnknownName."""
    sets = plan.layout.packet_sets
    match = _PACKET.fullmatch(name)
    if match is not None and match["number"] is not None:
        number = int(match["number"])
        for packets in sets:
            if packets.base <= number < packets.base + packets.size:
                flat, place = (number - packets.base) // packets.packets, list[int]()
                for extent in reversed(packets.shape):
                    flat, at = divmod(flat, extent)
                    place.insert(0, at)
                return packets, tuple(place)
        raise UnknownName(f"there are {plan.layout.packet_count} packets", "from 0 on")
    hint = f"sets are {', '.join(packets.name for packets in sets)}"
    for packets in sets:
        if match is not None and packets.name == match["set"]:
            item = tuple(int(n) for n in match["item"].split(","))
            if len(item) == len(packets.shape) and all(
                n < extent for n, extent in zip(item, packets.shape, strict=True)
            ):
                return packets, item
            hint = (
                f"items are {packets.name}[{', '.join(packets.axes)}] below {list(packets.shape)}"
            )
    raise UnknownName(f"{name!r} is no packet", hint)


def _how(plan: Plan, entry: Entry) -> str:
    behaviour = BEHAVIOUR[entry.kind]
    if behaviour.helps:
        return "helper warps, row by row in turn, beside what the consumer warps do"
    if entry.kind == EntryKind.EMBED:
        return f"warp {entry.warp} alone"
    if behaviour.collects:
        more = ", the next warp for the next task" if entry.kind in SEVERAL_TASKS else ""
        return f"all consumer warps share it; warp {entry.warp} adds up their sums{more}"
    return "all consumer warps share it"


def _more(name: str, count: int) -> list[tuple[str, str]]:
    return [(name, f"... {count - SHOWN} more")] if count > SHOWN else []
