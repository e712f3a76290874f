"""How far results lie from float32, always beside how far a bfloat16 reference lies from it.

No bound here is a fixed number: an executor is held to what rounding every operation to bfloat16
costs on the same inputs, measured in the same run. A NaN anywhere fails every bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_RATIO = 1.5
"""Largest RMS error of an executor, as a multiple of the bfloat16 reference's."""

NEAR_TIE = 3 * math.sqrt(2)
"""A choice between two logits is a near tie where they differ by less than this many RMS errors of
the bfloat16 reference: three standard deviations of the difference of two such errors."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Errors against float32, relative to the RMS of the row's float32 values.

    rms, bf16_rms: of the executor and of the bfloat16 reference, in the row where their ratio is
    largest (`row`) or over all rows; max, bf16_max: largest errors of any row.
    """

    rms: float
    bf16_rms: float
    max: float
    bf16_max: float
    row: int

    @property
    def rms_ratio(self) -> float:
        """Executor's RMS error over the bfloat16 reference's."""
        return _ratio(self.rms, self.bf16_rms)

    @property
    def max_ratio(self) -> float:
        """Executor's largest error over the bfloat16 reference's."""
        return _ratio(self.max, self.bf16_max)

    @property
    def rank(self) -> float:
        """Orders deviations by their RMS ratio, what is not a number above all."""
        return rank(self.rms_ratio)

    @property
    def ok(self) -> bool:
        """Whether the RMS ratio is a number and within MAX_RATIO."""
        return self.rms_ratio <= MAX_RATIO


def deviation(
    values: Tensor,
    bf16_values: Tensor,
    exact: Tensor,
    rows: Sequence[int] | None = None,
    pooled: bool = False,
) -> Deviation:
    """Compares values [n, m] with those of two references, row by row.

    rows: what the n rows are called (default: their places). With `pooled` the RMS is that of all
    rows together, for where a row has few values or few events decide its error.
    """
    scale = exact.double().square().mean(-1).sqrt()
    error, bf16_error = (
        (x.double() - exact.double()) / scale[:, None] for x in (values, bf16_values)
    )
    rms, bf16_rms = (e.square().mean(-1).sqrt().tolist() for e in (error, bf16_error))
    ratios = [_ratio(a, b) for a, b in zip(rms, bf16_rms, strict=True)]
    worst = max(range(len(ratios)), key=lambda row: rank(ratios[row]))
    if pooled:
        rms[worst], bf16_rms[worst] = (float(e.square().mean().sqrt()) for e in (error, bf16_error))
    return Deviation(
        rms=rms[worst],
        bf16_rms=bf16_rms[worst],
        max=float(error.abs().max()),
        bf16_max=float(bf16_error.abs().max()),
        row=worst if rows is None else rows[worst],
    )


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices by the largest logits, of experts or tokens, against float32's.

    made: how many were compared. near_ties: those that noise may decide; differing: those that
    differ from float32's; wrong: those that differ although they are not near ties.
    noise: difference of two logits up to which a choice is a near tie, the largest of all choices.
    worst: the largest difference of float32 logits that a differing choice went against; 0 if none
    differs, NaN if a choice was no choice at all. row: the row of `worst`.
    """

    made: int
    near_ties: int
    differing: int
    wrong: int
    noise: float
    worst: float
    row: int

    @property
    def ok(self) -> bool:
        """Whether all that differ are near ties."""
        return self.wrong == 0


def near_tie(bf16_logits: Tensor, exact: Tensor) -> Tensor:
    """Largest difference [...] of two logits that is a near tie; logits are [..., n]."""
    return NEAR_TIE * (bf16_logits - exact).double().square().mean(-1).sqrt()


def compare_experts(
    experts: Tensor, exact: Tensor, noise: float, rows: Sequence[int] | None = None
) -> Choices:
    """Sets of `experts` [n, k] against the k largest of `exact` [n, experts] router logits."""
    count, total = experts.shape[-1], exact.shape[-1]
    order = exact.sort(dim=-1, descending=True).values
    margin = order[:, count - 1] - order[:, count] if count < total else exact.new_full((), 1e9)
    chosen = torch.zeros_like(exact, dtype=torch.bool).scatter(-1, experts, True)
    best_left = exact.masked_fill(chosen, -math.inf).amax(-1)
    worst_taken = exact.masked_fill(~chosen, math.inf).amin(-1)
    against = (best_left - worst_taken).clamp_min(0)
    return _choices(margin.expand(len(experts)), against, ~(against <= 0), noise, rows)


def compare_routing(
    values: dict[int, Tensor],
    bf16_values: dict[int, Tensor],
    exact: dict[int, Tensor],
    experts: dict[int, Tensor],
    rows: Sequence[int],
    noise_by_layer: bool,
) -> tuple[Deviation | None, dict[int, Choices]]:
    """Router logits [n, experts of the layer] and chosen `experts` [n, k] of every routed layer.

    The deviation is that of all layers together, since a layer of few experts and rows has too few
    values to measure by; its `row` is the worst layer. None without a routed layer. noise_by_layer:
    whether a layer's near ties are judged by that layer's noise or by that of all together.
    """
    if not values:
        return None, {}
    width = max(logits.numel() for logits in exact.values())
    ours, theirs, wanted = (
        torch.stack([F.pad(logits.flatten(), (0, width - logits.numel())) for logits in x.values()])
        for x in (values, bf16_values, exact)
    )
    noise = float(near_tie(theirs.flatten(), wanted.flatten()))
    choices = {}
    for layer, ids in experts.items():
        if noise_by_layer:
            noise = float(near_tie(bf16_values[layer].flatten(), exact[layer].flatten()))
        choices[layer] = compare_experts(ids, exact[layer], noise, rows)
    return deviation(ours, theirs, wanted, list(exact), pooled=True), choices


def compare_tokens(
    tokens: Tensor, exact: Tensor, bf16_logits: Tensor, rows: Sequence[int] | None = None
) -> Choices:
    """Greedy `tokens` [n] (int64) against the largest of `exact` [n, vocab] logits.

    The noise is each row's own. A token outside of the vocabulary is always wrong.
    """
    noise = near_tie(bf16_logits, exact)
    best = exact.topk(2, dim=-1).values
    is_token = (tokens >= 0) & (tokens < exact.shape[-1])
    taken = exact.gather(-1, tokens.where(is_token, 0)[:, None])[:, 0]
    against = (best[:, 0] - taken).masked_fill(~is_token, math.nan)
    return _choices(best[:, 0] - best[:, 1], against, against != 0, noise, rows)


def join_choices(parts: Sequence[Choices]) -> Choices:
    """Several comparisons as one; its row is that of the worst."""
    worst = max(parts, key=lambda part: (part.wrong > 0, rank(part.worst)))
    return Choices(
        made=sum(part.made for part in parts),
        near_ties=sum(part.near_ties for part in parts),
        differing=sum(part.differing for part in parts),
        wrong=sum(part.wrong for part in parts),
        noise=max(part.noise for part in parts),
        worst=worst.worst,
        row=worst.row,
    )


def _choices(
    margin: Tensor,
    against: Tensor,
    differs: Tensor,
    noise: Tensor | float,
    rows: Sequence[int] | None,
) -> Choices:
    """margin: by which float32 chooses [n]; against: what a choice lost by float32's logits [n]."""
    wrong = differs & ~(against < noise)
    ranks = against.masked_fill(~differs, 0).nan_to_num(nan=math.inf)
    worst = int(ranks.argmax())
    return Choices(
        made=len(against),
        near_ties=int((margin < noise).sum()),
        differing=int(differs.sum()),
        wrong=int(wrong.sum()),
        noise=float(torch.as_tensor(noise).max()),
        worst=float(against[worst]) if bool(differs[worst]) else 0.0,
        row=worst if rows is None else rows[worst],
    )


def _ratio(error: float, bf16_error: float) -> float:
    """Their quotient; without error it is 0, with an error where bfloat16 has none infinite."""
    if error == 0:
        return 0.0
    return error / bf16_error if bf16_error > 0 else error * math.inf


def rank(value: float) -> float:
    """Orders numbers with NaN above all."""
    return math.inf if math.isnan(value) else value
