"""Runs a few steps of the tiny model on the GPU: what compute-sanitizer looks at.

A process of its own, since the sanitizer instruments all of it: `python few_steps.py ARTIFACT`.
"""

import sys
from pathlib import Path

from mkc.compiler.artifact import load_artifact
from mkc.runtime.check import make_state
from mkc.runtime.check_case import StepCase, start_case
from mkc.runtime.megakernel import Megakernel
from mkc.runtime.packing import pack_weights
from mkc.runtime.weights import RandomWeights

CASES = (StepCase((130,)), StepCase((64, None, 1)), StepCase((1, 63, 64, 65, 129, 300, 7, 200)))


def main(folder: Path) -> None:
    """One step of each case; ends with a traceback if a wait gave up or a guard was touched."""
    artifact = load_artifact(folder)
    plan = artifact.plan
    arena = pack_weights(plan.layout, plan.spec, RandomWeights(plan.spec, 0), "cpu").cuda()
    state = make_state(plan, [case.lengths for case in CASES], "cuda")
    # Under a sanitizer everything is a hundred times slower, waits too.
    kernel = Megakernel(
        plan, artifact.cubin, arena, state, trace=True, poll_limit=2**32 - 2, guard_bytes=4096
    )
    for case in CASES:
        start_case(state, case, seed=0)
        kernel.step(len(case.lengths))
        kernel.check_fault()
        kernel.check_guards()
    print(f"{len(CASES)} steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
