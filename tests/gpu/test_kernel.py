"""The kernel on the GPU at hand: `pytest -m gpu`. Needs an H100 or H200 and, for the sanitizer's
tests, compute-sanitizer from a CUDA toolkit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from racecheck import sort_reports

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

FEW_STEPS = Path(__file__).with_name("few_steps.py")


def mkc(*arguments: str) -> str:
    """Runs a verb in a process of its own; its standard output. Its errors are the test's."""
    done = subprocess.run(
        [sys.executable, "-m", "mkc.api.cli", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model compiled for this GPU."""
    from mkc.compiler.target import target_of_gpu

    folder = tmp_path_factory.mktemp("artifact") / "tiny"
    target = target_of_gpu(torch.cuda.get_device_name())
    assert target is not None, "no target file describes this GPU"
    mkc("compile", "tiny", "--target", target, "-o", str(folder))
    return folder


def test_tiny_is_right() -> None:
    found = json.loads(mkc("check", "tiny", "--gpu", "--json"))
    assert found["ok"]
    assert found["repeats"][0]["runs"] == 200


def test_north_mini_code_is_right() -> None:
    found = json.loads(mkc("check", "north_mini_code", "--gpu", "--json"))
    assert found["ok"]
    assert {"kernel on"} == {found["executor"][:9]}


def test_bench_measures_below_the_floor_and_in_order() -> None:
    found = json.loads(mkc("bench", "tiny", "--batch", "1,8", "--context", "600", "--json"))
    for point in found["points"]:
        assert point["correct"]
        assert 0 < point["share_of_floor"] < 1
        assert point["ceiling_ms"] > 0
    assert found["points"][0]["bytes"] < found["points"][1]["bytes"]


needs_sanitizer = pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer"
)


def sanitize(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A few steps of the artifact in `folder` under compute-sanitizer."""
    command = ["compute-sanitizer", "--report-api-errors", "no", "--error-exitcode", "9", *options]
    done = subprocess.run(
        [*command, sys.executable, str(FEW_STEPS), str(folder)], capture_output=True, text=True
    )
    assert "3 steps" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    return done


@needs_sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_sanitizer_finds_nothing(tiny: Path, tool: str) -> None:
    done = sanitize(tiny, "--tool", tool)
    assert done.returncode == 0, done.stdout[-4000:]


@needs_sanitizer
def test_racecheck_finds_nothing_that_no_barrier_explains(tiny: Path) -> None:
    """See racecheck.py: the tool does not know what orders the warps of this kernel."""
    done = sanitize(tiny, "--tool", "racecheck", "--racecheck-report", "analysis")
    known, unknown = sort_reports(done.stdout)
    assert known, "the tool saw no shared memory"
    assert not unknown, unknown.most_common()


def test_a_row_does_not_depend_on_its_neighbours(tiny: Path) -> None:
    """The same bits alone, among all others, and among some of them."""
    from mkc.compiler.artifact import load_artifact
    from mkc.runtime.check import make_state
    from mkc.runtime.check_case import StepCase, start_case
    from mkc.runtime.megakernel import Megakernel
    from mkc.runtime.packing import pack_weights
    from mkc.runtime.weights import RandomWeights

    artifact = load_artifact(tiny)
    plan = artifact.plan
    arena = pack_weights(plan.layout, plan.spec, RandomWeights(plan.spec, 0), "cpu").cuda()
    case = StepCase((1, 63, 64, 65, 129, 300, 7, 200))
    state = make_state(plan, [case.lengths], "cuda")
    kernel = Megakernel(plan, artifact.cubin, arena, state)

    def logits_of(rows: tuple[int, ...]) -> Any:
        start_case(state, case, seed=0)
        state.active.zero_()
        state.active[list(rows)] = 1
        kernel.step(max(rows) + 1)
        kernel.check_fault()
        return state.logits.clone()

    together = logits_of(tuple(range(8)))
    for row in range(8):
        assert torch.equal(logits_of((row,))[row], together[row]), row
        assert torch.equal(logits_of(tuple({row, 3, 5}))[row], together[row]), row
