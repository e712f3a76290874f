"""`mkc compile --dump-after PASS`: what one pass returned, as text."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from mkc.compiler import artifact_json
from mkc.compiler.errors import LoweringError
from mkc.compiler.ops import build_ops
from mkc.compiler.pipeline import PASSES
from mkc.compiler.place import place
from mkc.compiler.plan import Options, Plan
from mkc.compiler.schedule import schedule
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import Target
from mkc.compiler.tile import tile


def dump(name: str, spec: ModelSpec, target: Target, options: Options) -> str:
    """The result of pass `name`; later passes do not run.

    Raises LoweringError MKC204 if no pass has that name, or what the passes raise.
    """
    names = [known for known, _ in PASSES]
    if name not in names:
        raise LoweringError("MKC204", f"no pass is called {name!r}", f"passes: {', '.join(names)}")
    if name == "ops":
        return artifact_json.dump_ops(build_ops(spec))
    tiling = tile(spec, target, options.max_batch, options.chunk_fragments)
    if name == "tile":
        return _json(asdict(tiling))
    layout = place(spec, tiling, target, options.ring_slots, options.window_bytes)
    if name == "place":
        return artifact_json.dump_layout(layout)
    plan = Plan(spec, target, options, tiling, layout, schedule(tiling, target))
    if name == "schedule":
        return artifact_json.dump_plan(plan)
    if name == "verify":
        from mkc.compiler.verify import verify

        return _json(asdict(verify(plan)))
    if name == "simulate":
        from mkc.compiler.prediction import predict

        return _json({"points": [asdict(point) for point in predict(plan).points]})
    from mkc.compiler.render import render

    cuda = render(plan)
    if name == "render":
        return cuda
    from mkc.compiler.assemble import assemble

    assembly = assemble(cuda, target.arch)
    kernels = [asdict(kernel) for kernel in assembly.kernels]
    return _json({"compiler": assembly.compiler, "kernels": kernels}) + assembly.ptx + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
