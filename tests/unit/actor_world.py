"""What the actors of a modelled step share: barriers with parity, packets on their way, turns.

An actor is a generator. It yields a condition that it waits for, or None where others may take a
turn; all between two yields is one indivisible step. Copies land and packets arrive when the
scheduler chooses so, in any order. A policy decides who goes next:

- `random`: anyone, for a few steps;
- `priority`: always the first in a random order of actors that can move, with a few changes of that
  order (Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs",
  2010), so that one actor may be starved, and another run as far as it can;
- `late`: the same, and copies land and packets arrive only if nobody else can move.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Condition = Callable[[], bool]
Actor = Iterator[Condition | None]
POLICIES = ("random", "priority", "late")


class ModelError(Exception):
    """The model did what the kernel must not do."""


def demand(holds: bool, reason: str) -> None:
    """Raises ModelError with `reason` unless it holds."""
    if not holds:
        raise ModelError(reason)


@dataclass(slots=True)
class Barrier:
    """An mbarrier: a phase ends with its last arrival and the last byte it was told to expect."""

    arrivals: int
    completed: int = 0
    arrived: int = 0
    expected: int = 0

    def arrive(self, count: int = 1) -> None:
        self.arrived += count
        demand(self.arrived <= self.arrivals, "more arrivals than a phase has")
        self._turn()

    def expect(self) -> None:
        self.expected += 1
        self.arrive()

    def land(self) -> None:
        self.expected -= 1
        self._turn()

    def _turn(self) -> None:
        if self.arrived == self.arrivals and not self.expected:
            self.completed, self.arrived = self.completed + 1, 0

    def is_over(self, parity: int) -> bool:
        """What `try_wait.parity` answers: it knows the phase in progress modulo 2 only."""
        return self.completed & 1 != parity


@dataclass(slots=True)
class Meeting:
    """A named barrier of `count` warps."""

    count: int
    here: int = 0
    met: int = 0

    def sync(self) -> Actor:
        met = self.met
        self.here += 1
        if self.here == self.count:
            self.here, self.met = 0, met + 1
        yield lambda: self.met > met


@dataclass(slots=True)
class Fabric:
    """Packets: sent, and seen by all once they arrive. Keys name the packets."""

    chance: random.Random
    on_the_way: list[tuple[object, ...]] = field(default_factory=list)
    seen: set[tuple[object, ...]] = field(default_factory=set)

    def send(self, *key: object) -> None:
        demand(key not in self.seen and key not in self.on_the_way, f"{key} is sent twice")
        self.on_the_way.append(key)

    def wait(self, keys: list[tuple[object, ...]]) -> Condition:
        left = list(keys)

        def are_here() -> bool:
            while left and left[-1] in self.seen:
                left.pop()
            return not left

        return are_here

    def deliver(self) -> Actor:
        while True:
            yield lambda: bool(self.on_the_way)
            self.seen.add(_taken(self.on_the_way, self.chance))


def _taken(items: list[tuple[object, ...]], chance: random.Random) -> tuple[object, ...]:
    at = chance.randrange(len(items))
    items[at], items[-1] = items[-1], items[at]
    return items.pop()


@dataclass(slots=True)
class _Turn:
    name: str
    actor: Actor
    is_memory: bool
    waits: Condition | None = None
    is_over: bool = False

    def run(self, steps: int) -> bool:
        """Up to so many steps; whether there was one."""
        moved = False
        while steps and (self.waits is None or self.waits()):
            try:
                self.waits = next(self.actor)
            except StopIteration:
                self.is_over = True
                return True
            moved, steps = True, steps - 1
        return moved


def run(
    actors: dict[str, Actor], memory: dict[str, Actor], policy: str, chance: random.Random
) -> int:
    """Runs all actors to their ends; the number of turns. Raises ModelError if all are stuck."""
    turns = [_Turn(name, actor, False) for name, actor in actors.items()]
    turns += [_Turn(name, actor, True) for name, actor in memory.items()]
    chance.shuffle(turns)
    if policy == "late":
        turns.sort(key=lambda turn: turn.is_memory)
    working, count = len(actors), 0
    while working:
        if policy == "random":
            chance.shuffle(turns)
        elif chance.random() < 0.02:
            others = [turn for turn in turns if policy != "late" or not turn.is_memory]
            late = chance.choice(others)
            turns.remove(late)
            turns.insert(len(others) - 1, late)
        for turn in turns:
            if turn.run(chance.randint(1, 12) if policy != "late" or not turn.is_memory else 1):
                break
        else:
            stuck = ", ".join(turn.name for turn in turns if not turn.is_memory)
            raise ModelError(f"deadlock of {stuck}")
        count += 1
        if turn.is_over:
            turns.remove(turn)
            working -= 1
    return count
