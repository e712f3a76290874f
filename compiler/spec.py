"""`ModelSpec`: what a model description says, after parsing and before lowering.

Everything here is frozen and plain: the rest of the compiler, the reference and the runtime read
these classes and nothing else of the user's file. Sizes are in elements.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Frozen(BaseModel):
    """Base of all description classes: immutable, unknown keys are errors, no type coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NormSpec(Frozen):
    """Normalisation before each block and before the head; its epsilon is never defaulted."""

    kind: Literal["rms"]
    epsilon: PositiveFloat


class AttentionSpec(Frozen):
    """Grouped-query attention: `query_heads / kv_heads` query heads share one KV head."""

    query_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads


class RopeSpec(Frozen):
    """Rotary position encoding over all of `head_dim`; `interleaved` rotates pairs (2i, 2i+1)."""

    kind: Literal["interleaved"]
    theta: PositiveFloat


class DenseFfn(Frozen):
    """down(silu(gate(h)) * up(h)) of one fixed width."""

    kind: Literal["dense"]
    width: PositiveInt


class ExpertFfn(Frozen):
    """`experts_per_token` of `experts`, chosen by raw router logits (ties: lower id), each weighted
    by `scoring` of its logit, not renormalised."""

    kind: Literal["experts"]
    width: PositiveInt
    experts: PositiveInt
    experts_per_token: PositiveInt
    scoring: Literal["sigmoid"]


Ffn = Annotated[DenseFfn | ExpertFfn, Field(discriminator="kind")]


class LayerSpec(Frozen):
    """One layer: `window` tokens of attention, the query's own included (None: all of them)."""

    window: PositiveInt | None
    rope: bool
    ffn: Ffn


class ModelSpec(Frozen):
    """A decoder-only language model: x = x + attention(h) + ffn(h), h = norm(x), per layer."""

    name: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    max_positions: PositiveInt
    dtype: Literal["bfloat16"]
    block: Literal["parallel"]
    activation: Literal["silu"]
    norm: NormSpec
    attention: AttentionSpec
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    tied_head: bool
    logit_scale: PositiveFloat
    eos_tokens: tuple[int, ...]
