"""Targets: what a GPU can hold and how fast it streams. One YAML file each under `targets/`."""

from __future__ import annotations

from importlib import resources
from typing import Annotated

from pydantic import Field, ValidationError
from ruamel.yaml import YAML

from mkc.compiler.errors import LoweringError
from mkc.compiler.spec import Frozen, PositiveInt

PositiveFloat = Annotated[float, Field(gt=0)]


class Measured(Frozen):
    """Figures read off a running GPU, for the simulator. Each is one loop that can be timed.

    stream_share: of the datasheet's bandwidth, what all SMs together reach; sm_bytes_per_second:
    what one SM takes at most; latency_seconds: from a request for a chunk to its first bytes while
    memory is idle; load_seconds: a small load while memory is busy; hand_off_seconds: from a
    packet's store to its sight in another SM, likewise; warp_bytes_per_second: what a consumer warp
    multiplies; attention_bytes_per_second: K and V that it attends to; join_seconds: all consumer
    warps meet and one adds up their sums; routing_seconds: from a row's logits to its experts;
    launch_seconds: from a step's launch to its first request, plus its last packet's way out.
    """

    stream_share: PositiveFloat
    sm_bytes_per_second: PositiveFloat
    latency_seconds: PositiveFloat
    load_seconds: PositiveFloat
    hand_off_seconds: PositiveFloat
    warp_bytes_per_second: PositiveFloat
    attention_bytes_per_second: PositiveFloat
    join_seconds: PositiveFloat
    routing_seconds: PositiveFloat
    launch_seconds: PositiveFloat


class Target(Frozen):
    """One GPU model. Bytes, seconds and counts; `sms` blocks run at once, one per SM."""

    name: str
    gpu: str
    arch: str
    sms: PositiveInt
    shared_bytes_per_block: PositiveInt
    registers_per_sm: PositiveInt
    hbm_bytes_per_second: PositiveFloat
    measured: Measured


def target_names() -> list[str]:
    """Names of the targets that ship with the compiler."""
    folder = resources.files("mkc.compiler") / "targets"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir())


def load_target(name: str) -> Target:
    """The target called `name`; a unique prefix such as `h200` is enough.

    Raises LoweringError MKC202 if no target, or more than one, has that name.
    """
    matches = [known for known in target_names() if known == name] or [
        known for known in target_names() if known.startswith(name)
    ]
    if len(matches) != 1 or not name:
        raise LoweringError("MKC202", f"no target is called {name!r}", hint=_known())
    text = (resources.files("mkc.compiler") / "targets" / f"{matches[0]}.yaml").read_text("utf-8")
    try:
        return Target.model_validate(YAML(typ="safe", pure=True).load(text))
    except ValidationError as error:
        raise LoweringError("MKC202", f"target {name!r} is not well formed: {error}") from error


def target_of_gpu(gpu: str) -> str | None:
    """The name of the target for a GPU that the driver calls `gpu`."""
    return next((name for name in target_names() if load_target(name).gpu == gpu), None)


def _known() -> str:
    return "known targets: " + ", ".join(target_names())
