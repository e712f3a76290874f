"""The pipeline: a model description in, a compiled plan out, one pure pass after another.

    parse -> build ops -> tile -> place -> schedule -> verify -> simulate -> render -> assemble

Each pass is a function of what the ones before it returned; nothing is global and nothing is
mutated, so any of them can be run, dumped or replaced by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import networkx as nx

from mkc.compiler.assemble import Assembly, assemble
from mkc.compiler.ops import build_ops
from mkc.compiler.place import place
from mkc.compiler.plan import Options, Plan
from mkc.compiler.prediction import Prediction, predict
from mkc.compiler.render import render
from mkc.compiler.schedule import schedule
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import Target
from mkc.compiler.tile import tile
from mkc.compiler.verify import Proof, verify

PASSES: tuple[tuple[str, str], ...] = (
    ("ops", "the model's graph, with shapes and bytes, before any decision"),
    ("tile", "ops become tasks that one SM does without interruption"),
    ("place", "every weight, packet, page and shared word gets its address"),
    ("schedule", "tasks become programs, one for each SM"),
    ("verify", "nothing is written if the plan could hang, race or miss a byte"),
    ("simulate", "step time and share of the memory floor, from the target's figures"),
    ("render", "constants and dispatch become CUDA"),
    ("assemble", "NVRTC makes the cubin; registers, spills and shared memory are read back"),
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Everything that a compilation produced. `seconds` has the time of each pass by name."""

    plan: Plan
    graph: nx.DiGraph
    proof: Proof
    prediction: Prediction
    cuda: str
    assembly: Assembly
    seconds: dict[str, float]


def plan_model(spec: ModelSpec, target: Target, options: Options) -> Plan:
    """The plan alone, verified: what an executor needs that compiles nothing.

    Raises LoweringError (does not fit) or VerifyError (plan rejected).
    """
    tiling = tile(spec, target, options.max_batch, options.chunk_fragments)
    layout = place(spec, tiling, target, options.ring_slots, options.window_bytes)
    plan = Plan(spec, target, options, tiling, layout, schedule(tiling, target))
    verify(plan)
    return plan


def compile_model(
    spec: ModelSpec,
    target: Target,
    options: Options,
    progress: Callable[[str], None] = lambda name: None,
) -> Compiled:
    """Runs all passes; `progress` hears the name of each before it starts.

    Raises LoweringError (does not fit), VerifyError (plan rejected) or ToolchainError (NVRTC).
    """
    seconds: dict[str, float] = {}

    def run(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        progress(name)
        start = time.perf_counter()
        result = function(*arguments)
        seconds[name] = time.perf_counter() - start
        return result

    graph = run("ops", build_ops, spec)
    tiling = run("tile", tile, spec, target, options.max_batch, options.chunk_fragments)
    layout = run("place", place, spec, tiling, target, options.ring_slots, options.window_bytes)
    programs = run("schedule", schedule, tiling, target)
    plan = Plan(spec, target, options, tiling, layout, programs)
    proof = run("verify", verify, plan)
    prediction = run("simulate", predict, plan)
    cuda = run("render", render, plan)
    assembly = run("assemble", assemble, cuda, target.arch)
    return Compiled(plan, graph, proof, prediction, cuda, assembly, seconds)
