"""`mkc bench`: times decode steps on this machine's GPU, beside a check of the same build."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mkc.api.commands.common import (
    CacheDirOption,
    JsonOption,
    ModelArgument,
    print_json,
    print_lines,
    print_table,
    size,
)
from mkc.api.commands.kernel import compiled_artifact, find_gpu, numbers, progress

if TYPE_CHECKING:
    from mkc.compiler.artifact import Artifact
    from mkc.runtime.bench import BenchPoint
    from mkc.runtime.check_step import StepCheck

ROUTINGS = ("uniform", "correlated")


def bench_model(
    model: ModelArgument,
    batch: Annotated[str, typer.Option(help="Rows of a step, as in 1,4,8 or 1-8.")] = "1,2,4,8",
    context: Annotated[str, typer.Option(help="Tokens that each row sees, as in 1024,8192.")] = (
        "8192"
    ),
    ragged: Annotated[
        str | None,
        typer.Option(help="One more point: the tokens that each of its rows sees, with commas."),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(help="uniform, or correlated: all rows choose the same experts."),
    ] = "uniform",
    steps: Annotated[int, typer.Option(min=10, help="Timed steps of a point.")] = 50,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Folder for a trace of the first point: trace.json.gz for Perfetto, predicted and "
            "measured side by side, and events.json for `mkc explain --measured`.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, K, V and tokens.")] = 0,
    target: Annotated[
        str | None,
        typer.Option(
            envvar="MKC_TARGET",
            help="The GPU to plan for; a prefix will do.  [default: this machine's]",
            show_default=False,
        ),
    ] = None,
    cache_dir: CacheDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time decode steps and set them beside the memory floor.

    The weights are random and every step chooses experts afresh. Before a batch size is timed, one
    of its steps is compared with the float32 reference, layer by layer; ends with 1 if that fails.
    The last line is one JSON object.
    """
    points = [[length] * rows for rows in numbers(batch, "--batch", 8) for length in _list(context)]
    if ragged:
        points.append(_list(ragged, "--ragged"))
    if routing not in ROUTINGS:
        raise typer.BadParameter(f"{routing!r} is not one of {', '.join(ROUTINGS)}")
    from mkc.compiler.parse import load_model
    from mkc.compiler.plan import Options

    spec = load_model(model)
    with progress() as hear:
        gpu, chosen = find_gpu(target)
        options = Options(max_batch=max(map(len, points)))
        artifact = compiled_artifact(spec, chosen, options, cache_dir, hear)
        session = _Session.start(artifact, points, steps, seed, lambda what: hear(0, 0, what))
        checks: dict[int, StepCheck] = {}
        for rows in sorted({len(lengths) for lengths in points}):
            hear(len(checks), len(points), f"check of {rows} rows")
            checks[rows] = session.check(rows)
        results = []
        for done, lengths in enumerate(points):
            hear(done, len(points), f"{len(lengths)} rows at {lengths[0]} tokens")
            results.append(session.bench.measure(lengths, steps, routing))
        if trace is not None:
            hear(len(points), len(points), "trace")
            traced_options = replace(options, trace=True)
            traced = compiled_artifact(spec, chosen, traced_options, cache_dir, hear)
            traced_ms = session.trace(traced, steps, trace)
    report = _as_json(artifact, gpu, results, checks)
    if trace is not None:
        report["trace"] = {"folder": str(trace), "ms_per_step": traced_ms}
    if as_json:
        print_json(report)
    else:
        _show(artifact, gpu, results, checks)
        if trace is not None:
            slowdown = traced_ms / results[0].ms_per_step - 1
            print_lines(f"trace   {trace}, of a step of {traced_ms:.3f} ms: {slowdown:+.1%}")
        print_lines("", json.dumps(report))
    for rows, check in checks.items():
        if not check.ok:
            from mkc.compiler.errors import CheckError

            raise CheckError("MKC601", f"{rows} rows, step {check.case}: {check.problems()[0]}")


def _list(text: str, option: str = "--context") -> list[int]:
    """Numbers with commas between, in the order given."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{text!r} has to be lengths of at least 1", param_hint=option)
    return found


@dataclass(frozen=True)
class _Session:
    """One packed model on the GPU, and what measures and checks it."""

    artifact: Artifact
    weights: Any
    arena: Any
    bench: Any
    points: list[list[int]]
    seed: int

    @staticmethod
    def start(
        artifact: Artifact, points: list[list[int]], steps: int, seed: int, hear: Any
    ) -> _Session:
        import torch

        from mkc.runtime.bench import Bench
        from mkc.runtime.check import LOGIT_STD, make_state
        from mkc.runtime.megakernel import Megakernel
        from mkc.runtime.packing import pack_weights
        from mkc.runtime.weights import RandomWeights

        torch.set_float32_matmul_precision("highest")
        plan = artifact.plan
        weights = RandomWeights(plan.spec, seed, "cuda", LOGIT_STD)
        arena = pack_weights(plan.layout, plan.spec, weights, "cuda", hear)
        batches = [[length + Bench.room(steps) for length in lengths] for lengths in points]
        state = make_state(plan, batches, "cuda")
        bench = Bench(Megakernel(plan, artifact.cubin, arena, state), seed)
        return _Session(artifact, weights, arena, bench, points, seed)

    def check(self, rows: int) -> StepCheck:
        """One step of the first point with that many rows, compared layer by layer."""
        from mkc.runtime.check import make_state
        from mkc.runtime.check_case import StepCase
        from mkc.runtime.check_step import check_step
        from mkc.runtime.megakernel import Megakernel

        plan = self.artifact.plan
        lengths = next(lengths for lengths in self.points if len(lengths) == rows)
        state = make_state(plan, [lengths], "cuda")
        kernel = Megakernel(plan, self.artifact.cubin, self.arena, state, trace=True)
        return check_step(kernel, self.weights, StepCase(tuple(lengths)), self.seed)

    def trace(self, traced: Artifact, steps: int, folder: Path) -> float:
        """Times a kernel that traces at the first point, and writes one step's trace.

        Returns its milliseconds a step.
        """
        from mkc.compiler.simulate import simulate_step
        from mkc.compiler.trace import TRACE_FILE, dump_trace
        from mkc.runtime.bench import Bench
        from mkc.runtime.megakernel import Megakernel

        plan, lengths = traced.plan, self.points[0]
        kernel = Megakernel(plan, traced.cubin, self.arena, self.bench.state)
        point = Bench(kernel, self.seed).measure(lengths, steps)
        kernel.step(len(lengths))
        events = kernel.events()
        kernel.check_fault()
        folder.mkdir(parents=True, exist_ok=True)
        predicted = simulate_step(plan, lengths, self.seed)
        (folder / TRACE_FILE).write_bytes(dump_trace(predicted, events, plan.spec.name))
        (folder / "events.json").write_text(json.dumps({"events": events}), "utf-8")
        return point.ms_per_step


def _show(
    artifact: Artifact, gpu: str, results: Sequence[BenchPoint], checks: dict[int, StepCheck]
) -> None:
    plan = artifact.plan
    print_lines(
        f"model   {plan.spec.name}, random weights, {size(plan.layout.arena_bytes)}",
        f"GPU     {gpu}, driver {_driver()}, planned for {plan.target.name}",
        f"floor   bytes of a step over {plan.target.hbm_bytes_per_second / 1e12:.3g} TB/s; the "
        "ceiling is this card's time with every wait for another SM answered at once",
        "",
    )
    print_table(
        (
            "batch", "context", "experts", "a step", "floor ms", "ms", "p10", "p90", "of floor",
            "of ceiling", "queued ms", "tokens/s", "correct",
        ),
        [
            (
                str(point.batch),
                _context(point.context),
                f"{point.active_experts:.1f}",
                size(point.bytes),
                f"{point.floor_ms:.3f}",
                f"{point.ms_per_step:.3f}",
                f"{point.ms_p10:.3f}",
                f"{point.ms_p90:.3f}",
                f"{point.share_of_floor:.1%}",
                f"{point.share_of_ceiling:.1%}",
                f"{point.ms_queued:.3f}",
                f"{point.tokens_per_second:.0f}",
                "yes" if checks[point.batch].ok else "NO",
            )
            for point in results
        ],
        left=(),
    )  # fmt: skip
    for rows, check in checks.items():
        name, worst = check.worst()
        print_lines(
            f"checked at {rows} rows: RMS errors at most {worst.rms_ratio:.2f} of the bfloat16 "
            f"reference's ({name})"
        )


def _context(context: int | tuple[int, ...]) -> str:
    return str(context) if isinstance(context, int) else f"{min(context)}-{max(context)}"


def _as_json(
    artifact: Artifact, gpu: str, results: Sequence[BenchPoint], checks: dict[int, StepCheck]
) -> dict[str, Any]:
    points = [
        {
            "batch": point.batch,
            "context": point.context,
            "routing": point.routing,
            "steps": point.steps,
            "ms_per_step": point.ms_per_step,
            "ms_p10": point.ms_p10,
            "ms_p90": point.ms_p90,
            "ms_queued": point.ms_queued,
            "tokens_per_second": point.tokens_per_second,
            "active_experts": point.active_experts,
            "bytes": point.bytes,
            "floor_ms": point.floor_ms,
            "share_of_floor": point.share_of_floor,
            "ceiling_ms": point.ceiling_ms,
            "share_of_ceiling": point.share_of_ceiling,
            "correct": checks[point.batch].ok,
        }
        for point in results
    ]
    return {
        "gpu": gpu,
        "driver": _driver(),
        "commit": _commit(),
        "model": artifact.plan.spec.name,
        "target": artifact.plan.target.name,
        "points": points,
    }


def _driver() -> str:
    """The driver's version as nvidia-smi has it, or an empty text."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.splitlines()[0].strip() if found.stdout else ""


def _commit() -> str:
    """The commit that this code is a checkout of, or an empty text."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    if shutil.which("git") is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
