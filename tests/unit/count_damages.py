"""Counts damaged plans that the proofs reject: `python tests/unit/count_damages.py [examples]`.

Every kind of damage is drawn many times over each of several plans; distinct damaged plans are
counted by kind, and any that is accepted is named. Valid plans, which must all be accepted, are
counted too; one that is rejected ends the run.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from layout_damage import LAYOUT_DAMAGE
from mkc.compiler.parse import load_model
from mkc.compiler.plan import Options, Plan
from mkc.compiler.verify import VerifyError, verify
from mkc.compiler.verify_ring import check_stream
from mkc.compiler.verify_rules import check_rules
from plan_damage import PROGRAM_DAMAGE, Draw, make_plan, tiny_plan
from rule_damage import RULE_DAMAGE, STREAM_DAMAGE
from test_actors import draw_case

EXAMPLES = 60  # of a kind for each small plan
ALL = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
Damaged = tuple[Any, Callable[[], object]]
"""What tells a damaged plan from others, and the proof that must reject it."""


def kinds() -> dict[str, Callable[[Draw, Plan], Damaged]]:
    """Every kind of damage by its name."""

    def of_plan(damage: Callable[[Draw, Plan], Plan]) -> Callable[[Draw, Plan], Damaged]:
        def damaged(draw: Draw, plan: Plan) -> Damaged:
            changed = damage(draw, plan)
            key = (changed.programs, changed.layout, changed.tiling, changed.options)
            return key, lambda: verify(changed)

        return damaged

    def of_stream(damage: Callable[[Draw, Plan], Any]) -> Callable[[Draw, Plan], Damaged]:
        def damaged(draw: Draw, plan: Plan) -> Damaged:
            stream = damage(draw, plan)
            return stream, lambda: check_stream("a damaged tile", stream)

        return damaged

    def of_rule(damage: Callable[[Draw, Plan], Any]) -> Callable[[Draw, Plan], Damaged]:
        def damaged(draw: Draw, plan: Plan) -> Damaged:
            drawn: list[Any] = []

            def noted(strategy: Any) -> Any:
                drawn.append(draw(strategy))
                return drawn[-1]

            broken = damage(noted, plan)
            return tuple(drawn), lambda: check_rules(plan, broken)

        return damaged

    found = {damage.__name__: of_plan(damage) for damage in (*PROGRAM_DAMAGE, *LAYOUT_DAMAGE)}
    found |= {damage.__name__: of_stream(damage) for damage in STREAM_DAMAGE}
    return found | {damage.__name__: of_rule(damage) for damage in RULE_DAMAGE}


@dataclass
class Tally:
    """Distinct damaged plans by kind, the codes they were rejected with, and those accepted."""

    damaged: dict[str, set[int]] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)


def damage_often(tally: Tally, kind: str, name: str, plan: Plan, examples: int) -> None:
    """One kind of damage to one plan."""
    damage, marks = kinds()[kind], tally.damaged.setdefault(kind, set())

    @settings(ALL, max_examples=examples)
    @given(data=st.data())
    def tried(data: Any) -> None:
        key, proof = damage(data.draw, plan)
        mark = hash((name, key))
        if mark in marks:
            return
        marks.add(mark)
        try:
            proof()
        except VerifyError as error:
            tally.codes[error.code] += 1
        else:
            tally.accepted.append(f"{kind} of {name}")

    with suppress(Unsatisfiable):  # a kind of damage that this plan cannot have
        tried()


def count_valid(examples: int) -> int:
    """Proves plans of small models of every shape; how many there were."""
    valid: set[int] = set()

    @settings(ALL, max_examples=examples)
    @given(data=st.data())
    def is_accepted(data: Any) -> None:
        plan = draw_case(data.draw).plan
        verify(plan)
        valid.add(hash((plan.programs, plan.layout, plan.tiling)))

    is_accepted()
    return len(valid)


def small_plans() -> dict[str, Plan]:
    """Plans that are damaged often: proofs of each take milliseconds."""
    tiny = load_model("tiny")
    odd = Options(max_batch=8, chunk_fragments=8, window_bytes=8 * 8 * 512, ring_slots=11)
    return {
        "tiny on 7 SMs": tiny_plan(),
        "tiny on 4 SMs": make_plan(tiny, 4, Options(max_batch=1, chunk_fragments=4)),
        "tiny on 23 SMs": make_plan(tiny, 23, odd),
    }


def main() -> int:
    examples = int(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES
    start, tally = time.perf_counter(), Tally()
    north = make_plan(load_model("north_mini_code"), 132, Options())
    for kind in kinds():
        for name, plan in small_plans().items():
            damage_often(tally, kind, name, plan, examples)
        damage_often(tally, kind, "north_mini_code", north, examples // EXAMPLES)
        print(f"{kind:28} {len(tally.damaged[kind]):6}")
    verify(north)
    valid = count_valid(10 * examples) + len(small_plans()) + 1
    total = sum(len(marks) for marks in tally.damaged.values())
    print(", ".join(f"{code} {number}" for code, number in sorted(tally.codes.items())))
    print(
        f"{total} damaged plans of {len(tally.damaged)} kinds, {len(tally.accepted)} accepted; "
        f"{valid} valid plans, none rejected; {time.perf_counter() - start:.0f} s"
    )
    for accepted in tally.accepted:
        print(f"ACCEPTED: {accepted}")
    return 1 if tally.accepted else 0


if __name__ == "__main__":
    sys.exit(main())
