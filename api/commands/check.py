"""`mkc check`: the plan's results against references, on the CPU or on the GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
    from mkc.compiler.plan import Plan
    from mkc.compiler.spec import ModelSpec
    from mkc.runtime.check import CheckReport, MakeExecutor
    from mkc.runtime.check_measure import Choices, Deviation
    from mkc.runtime.oracle import Oracle
    from mkc.runtime.weights import ModelWeights

ORACLES = ("auto", "transformers", "reference")
TRANSFORMERS_BYTES = 2_000_000_000  # of bf16 weights: transformers holds them three times over
BYTES_PER_WEIGHT_BYTE = 5  # on the CPU: the arena, the drawn layers, and float32 copies of them


def check_model(
    model: ModelArgument,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Run the kernel on this machine's GPU.")
    ] = False,
    rows: Annotated[
        str, typer.Option(help="Numbers of rows of a step, as in 1,4,8 or 1-8.")
    ] = "1-8",
    steps: Annotated[int, typer.Option(min=0, help="Greedy steps behind each prompt.")] = 64,
    longest: Annotated[
        int, typer.Option(min=1, help="Tokens of the longest context, the model's at most.")
    ] = 131072,
    runs: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Runs of one step that must give the same bits.  [default: 200, on the CPU 3]",
            show_default=False,
        ),
    ] = None,
    oracle: Annotated[
        str,
        typer.Option(
            help="What decoding is compared with: transformers, reference (our own), or auto for "
            "transformers where it is installed and the model is small."
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of weights, prompts, K and V.")] = 0,
    target: Annotated[
        str | None,
        typer.Option(
            envvar="MKC_TARGET",
            help="The GPU to plan for; a prefix will do.  [default: h200, or the GPU of --gpu]",
            show_default=False,
        ),
    ] = None,
    cache_dir: CacheDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a model's results with references.

    The weights are random. Single steps over random K and V are compared layer by layer, at the
    edges of pages and windows; greedy decoding with transformers. Without --gpu the plan's programs
    run in the interpreter. Errors are judged beside those of a bfloat16 reference; ends with 1 if a
    result is wrong.
    """
    counts = numbers(rows, "--rows", 8)
    if oracle not in ORACLES:
        raise typer.BadParameter(f"{oracle!r} is not one of {', '.join(ORACLES)}")
    from mkc.compiler.parse import load_model

    spec = load_model(model)
    with progress() as hear:
        hear(0, 0, "plan")
        job = _gpu_job(spec, target, max(counts), cache_dir, seed, hear) if gpu else None
        job = job or _cpu_job(spec, target, max(counts), seed, hear)
        witness, note = _choose_oracle(oracle, job)
        report = _run(job, witness, counts, steps, longest, runs, seed, hear)
    if as_json:
        print_json(_as_json(job, witness.name, note, report))
    else:
        _show(job, witness.name, note, report)
    _raise_for(report)


@dataclass(frozen=True)
class Job:
    """What is compared: a plan, weights, and how to make an executor over a state."""

    plan: Plan
    weights: ModelWeights
    make_executor: MakeExecutor
    executor: str
    device: str


def _cpu_job(
    spec: ModelSpec,
    target: str | None,
    max_batch: int,
    seed: int,
    hear: Callable[[int, int, str], None],
) -> Job:
    """The interpreter over the plan. Raises GpuError MKC602 if the model is too large for it."""
    from mkc.compiler.pipeline import plan_model
    from mkc.compiler.plan import Options
    from mkc.compiler.target import load_target

    plan = plan_model(spec, load_target(target or "h200"), Options(max_batch=max_batch))
    _check_memory(spec, plan.layout.arena_bytes)

    from mkc.runtime.check import LOGIT_STD
    from mkc.runtime.interpreter import Interpreter
    from mkc.runtime.packing import pack_weights
    from mkc.runtime.weights import RandomWeights

    weights = RandomWeights(spec, seed, logit_std=LOGIT_STD)
    arena = pack_weights(plan.layout, spec, weights, "cpu", lambda what: hear(0, 0, what))
    return Job(
        plan,
        weights,
        lambda state: Interpreter(plan, arena, state, trace=True),
        "interpreter on the CPU",
        "cpu",
    )


def _check_memory(spec: ModelSpec, weight_bytes: int) -> None:
    needed = BYTES_PER_WEIGHT_BYTE * weight_bytes
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        from mkc.runtime.megakernel import GpuError

        raise GpuError(
            "MKC602",
            f"{spec.name} has {size(weight_bytes)} of weights; comparing them on the CPU takes "
            f"{size(needed)}, this machine has {size(present)}",
            "use --gpu on a machine with one",
        )


def _gpu_job(
    spec: ModelSpec,
    target: str | None,
    max_batch: int,
    cache_dir: Path | None,
    seed: int,
    hear: Callable[[int, int, str], None],
) -> Job:
    """The kernel, compiled or from the cache. Raises GpuError MKC602 without a GPU for it."""
    import torch

    from mkc.compiler.plan import Options

    name, chosen = find_gpu(target)
    artifact = compiled_artifact(spec, chosen, Options(max_batch=max_batch), cache_dir, hear)

    from mkc.runtime.check import LOGIT_STD
    from mkc.runtime.megakernel import Megakernel
    from mkc.runtime.packing import pack_weights
    from mkc.runtime.weights import RandomWeights

    torch.set_float32_matmul_precision("highest")
    plan = artifact.plan
    # A model that transformers can hold has its weights on the CPU, where transformers runs.
    is_small = plan.layout.arena_bytes <= TRANSFORMERS_BYTES
    weights = RandomWeights(spec, seed, "cpu" if is_small else "cuda", LOGIT_STD)
    arena = pack_weights(plan.layout, spec, weights, "cuda", lambda what: hear(0, 0, what))
    return Job(
        plan,
        weights,
        lambda state: Megakernel(
            plan, artifact.cubin, arena, state, trace=True, guard_bytes=GUARD_BYTES
        ),
        f"kernel on {name}",
        "cuda",
    )


GUARD_BYTES = 1 << 20


def _choose_oracle(wanted: str, job: Job) -> tuple[Oracle, str]:
    """The oracle, and in words why it is not transformers where nobody asked for another."""
    from mkc.runtime.oracle import (
        OracleError,
        ReferenceOracle,
        TransformersOracle,
        is_transformers_installed,
    )

    spec, weight_bytes = job.plan.spec, job.plan.layout.arena_bytes
    reference = ReferenceOracle(spec, job.weights, job.device)
    if wanted == "reference":
        return reference, ""
    if wanted == "auto":
        if not is_transformers_installed():
            return reference, "transformers is not installed: pip install 'transformers>=5.17'"
        if weight_bytes > TRANSFORMERS_BYTES:
            return reference, f"transformers would hold {size(weight_bytes)} of weights thrice"
    try:
        return TransformersOracle(spec, job.weights), ""
    except OracleError as error:
        if wanted == "transformers":
            raise
        return reference, error.message


def _run(
    job: Job,
    oracle: Oracle,
    counts: list[int],
    steps: int,
    longest: int,
    runs: int | None,
    seed: int,
    hear: Callable[[int, int, str], None],
) -> CheckReport:
    from mkc.runtime.check import make_cases, run_checks

    is_gpu = job.device != "cpu"
    is_small = job.plan.layout.arena_bytes <= TRANSFORMERS_BYTES
    cases = make_cases(
        job.plan,
        counts,
        steps,
        longest,
        (200 if is_gpu else 3) if runs is None else runs,
        counts if is_small else counts[-1:],
    )
    return run_checks(
        job.plan,
        job.make_executor,
        job.weights,
        oracle,
        cases,
        job.device,
        seed,
        lambda done, what: hear(done, len(cases), what),
    )


def _show(job: Job, oracle: str, note: str, report: CheckReport) -> None:
    plan = job.plan
    print_lines(
        f"model     {plan.spec.name}, random weights",
        f"executor  {job.executor}, planned for {plan.target.name}",
        f"oracle    {oracle} for decoding, mkc's float32 and bfloat16 reference for single steps",
    )
    if note:
        print_lines(f"          ({note})")
    if report.steps:
        print_lines("", "single steps; RMS errors as multiples of the bfloat16 reference's")
        print_table(
            (
                "",
                "tokens that rows see",
                "worst layer",
                "chained",
                "stored K, V",
                "logits",
                "experts",
                "tokens",
            ),
            [
                (
                    _verdict(check.ok),
                    str(check.case),
                    _worst([(str(layer.layer), layer.alone) for layer in check.layers]),
                    _worst([(str(x.layer), x.chained) for x in check.layers if x.chained]),
                    _worst([(str(x.layer), d) for x in check.layers for d in (x.keys, x.values)]),
                    f"{check.logits.rms_ratio:.2f}",
                    _choices(check.experts),
                    _choices(check.tokens),
                )
                for check in report.steps
            ],
            left=(0, 1),
        )
    if report.sequences:
        print_lines("", f"greedy decoding, {report.sequences[0].steps} steps")
        print_table(
            ("", "tokens of prompts", "logits", "router", "experts", "tokens", "own routing"),
            [
                (
                    _verdict(check.ok),
                    str(list(check.lengths)),
                    f"{check.logits.rms_ratio:.2f}",
                    "-" if check.router is None else f"{check.router.rms_ratio:.2f}",
                    _choices(check.experts),
                    _choices(check.tokens),
                    f"{check.own_tokens}/{check.tokens.made}",
                )
                for check in report.sequences
            ],
            left=(0, 1),
        )
    for check in report.repeats:
        print_lines(
            "",
            f"{_verdict(check.ok)}  {check.runs} runs of {check.case}: "
            + ("the same bits" if check.ok else f"{check.differing} differ from the first"),
        )
    print_lines(
        "",
        "experts and tokens: equal to float32's / compared; those that differ are near ties unless "
        "marked wrong",
    )


def _verdict(ok: bool) -> str:
    return "ok" if ok else "FAILED"


def _worst(named: list[tuple[str, Deviation]]) -> str:
    """The largest RMS ratio and whose it is."""
    if not named:
        return "-"
    name, found = max(named, key=lambda pair: pair[1].rank)
    return f"{found.rms_ratio:.2f} ({name})"


def _choices(choices: Choices | None) -> str:
    if choices is None:
        return "-"
    equal = f"{choices.made - choices.differing}/{choices.made}"
    return f"{equal}, {choices.wrong} wrong" if choices.wrong else equal


def _as_json(job: Job, oracle: str, note: str, report: CheckReport) -> dict[str, Any]:
    from mkc.runtime.check_measure import MAX_RATIO, NEAR_TIE

    shown = {
        "ok": report.ok,
        "model": job.plan.spec.name,
        "target": job.plan.target.name,
        "executor": job.executor,
        "oracle": oracle,
        "oracle_note": note,
        "max_ratio": MAX_RATIO,
        "near_tie_rms_errors": NEAR_TIE,
        "problems": [{"case": case, "problem": text} for case, text in report.problems()],
        "steps": [asdict(check) | {"ok": check.ok} for check in report.steps],
        "sequences": [asdict(check) | {"ok": check.ok} for check in report.sequences],
        "repeats": [asdict(check) | {"ok": check.ok} for check in report.repeats],
    }
    return {key: _finite(value) for key, value in shown.items()}


def _finite(value: Any) -> Any:
    """The same with null in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _raise_for(report: CheckReport) -> None:
    """Raises CheckError MKC601 that names the first failing case and counts the others."""
    problems = report.problems()
    if not problems:
        return
    from mkc.compiler.errors import CheckError

    case, problem = problems[0]
    others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise CheckError("MKC601", f"{case}: {problem}{others}")
