"""`mkc generate`: greedy continuation of a prompt of token ids, by the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mkc.api.commands.common import (
    CacheDirOption,
    JsonOption,
    ModelArgument,
    console,
    print_json,
)
from mkc.api.commands.kernel import compiled_artifact, find_gpu, progress

if TYPE_CHECKING:
    from torch import Tensor

    from mkc.compiler.plan import Plan
    from mkc.compiler.spec import ModelSpec
    from mkc.runtime.executor import Executor
    from mkc.runtime.state import StepState

BACKENDS = ("auto", "megakernel", "interpreter")


def generate_tokens(
    model: ModelArgument,
    prompt_ids: Annotated[
        str, typer.Option(help="Token ids of the prompt, with commas between them.")
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 32,
    packed: Annotated[
        Path | None,
        typer.Option(help="The weights, as `mkc pack` wrote them.", show_default=False),
    ] = None,
    random_seed: Annotated[
        int | None,
        typer.Option(help="Random weights of that seed instead.", show_default=False),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on behind tokens that end a text.")
    ] = False,
    backend: Annotated[
        str,
        typer.Option(
            help="megakernel (GPU), interpreter (CPU), or auto for the first where torch finds a "
            "GPU and the second elsewhere."
        ),
    ] = "auto",
    cache_dir: CacheDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt, token by token.

    Prompts are token ids and decoding is greedy; what runs is said on standard error.
    """
    prompt = _ids(prompt_ids)
    if (packed is None) == (random_seed is None):
        raise typer.BadParameter("name either the weights or a seed", param_hint="--packed")
    if backend not in BACKENDS:
        raise typer.BadParameter(f"{backend!r} is not one of {', '.join(BACKENDS)}")
    from mkc.compiler.parse import load_model

    spec = load_model(model)
    with progress() as hear:
        hear(0, 0, "plan")
        plan, device, make_executor = _backend(backend, spec, cache_dir)
        hear(0, 0, "weights")
        arena = _weights(plan, device, packed, random_seed)

    from mkc.runtime import Engine
    from mkc.runtime.state import StepState

    name = "the kernel on the GPU" if device == "cuda" else "the interpreter on the CPU"
    console(stderr=True).print(f"{spec.name} by {name}", style="dim")
    state = StepState(plan, len(prompt) + max_tokens, device)
    with Engine(make_executor(arena, state), arena) as engine:
        stream = engine.generate(prompt, max_tokens=max_tokens, ignore_eos=ignore_eos)
        tokens = []
        for token in stream:
            tokens.append(token)
            if not as_json:
                sys.stdout.write(f"{token} ")
                sys.stdout.flush()
    if as_json:
        print_json({"tokens": tokens, "finish_reason": stream.finish_reason})
    else:
        sys.stdout.write("\n")


def _ids(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise typer.BadParameter(
            f"{text!r} has to be token ids with commas between; text is not supported yet",
            param_hint="--prompt-ids",
        )
    return found


def _backend(
    wanted: str, spec: ModelSpec, cache_dir: Path | None
) -> tuple[Plan, str, Callable[[Tensor, StepState], Executor]]:
    """The plan for one row, the device, and what makes an executor of weights and state."""
    import torch

    from mkc.compiler.plan import Options

    options = Options(max_batch=1)
    if wanted == "megakernel" or (wanted == "auto" and torch.cuda.is_available()):
        from mkc.runtime.megakernel import Megakernel

        _, target = find_gpu(None)
        artifact = compiled_artifact(spec, target, options, cache_dir, lambda *progress: None)
        plan, cubin = artifact.plan, artifact.cubin
        return plan, "cuda", lambda arena, state: Megakernel(plan, cubin, arena, state)

    from mkc.compiler.pipeline import plan_model
    from mkc.compiler.target import load_target
    from mkc.runtime.interpreter import Interpreter

    plan = plan_model(spec, load_target("h200"), options)
    return plan, "cpu", lambda arena, state: Interpreter(plan, arena, state)


def _weights(plan: Plan, device: str, packed: Path | None, seed: int | None) -> Tensor:
    if packed is not None:
        from mkc.runtime.packed import open_packed

        return open_packed(packed, plan.layout, plan.spec, device)
    assert seed is not None
    from mkc.runtime.packing import pack_weights
    from mkc.runtime.weights import RandomWeights

    return pack_weights(plan.layout, plan.spec, RandomWeights(plan.spec, seed, device), device)
