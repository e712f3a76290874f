"""The rows of a compared step: how they start, what a step may change, and what must follow.

What is demanded here is exact: tokens, positions and the stop test follow from the executor's own
logits, and of the pages a step writes nothing but its tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from mkc.compiler.rules import first_token
from mkc.compiler.tile import PAGE_TOKENS
from mkc.runtime.executor import IDLE_ROW, NOT_A_TOKEN
from mkc.runtime.packing import unpack_k_pages, unpack_v_pages
from mkc.runtime.state import NAN_BYTE, StepState
from mkc.runtime.weights import SCORE_STD

IDLE_TOKEN = 3  # what idle rows hold and must keep


@dataclass(frozen=True, slots=True)
class StepCase:
    """Rows of one step: the tokens that each sees, the fed one included; None is an idle row.

    edges: keys at the edges of pages and window are drawn larger, so that attention hangs on every
    one of them: a token too many or too few changes all that follows. Without it one key of
    thousands weighs too little to be missed.
    """

    lengths: tuple[int | None, ...]
    edges: bool = False

    @property
    def live(self) -> list[int]:
        """Rows that take part."""
        return [row for row, length in enumerate(self.lengths) if length is not None]

    def __str__(self) -> str:
        lengths = ", ".join("idle" if n is None else str(n) for n in self.lengths)
        return f"[{lengths}]{' with large keys at edges' if self.edges else ''}"


def start_case(state: StepState, case: StepCase, seed: int, room: int = 1) -> None:
    """Fills the rows of a case: random K, V and tokens; NaN wherever no token lies.

    room: tokens that each row may be fed. The last live row stops after so many steps, the others
    go on. Raises ValueError where the state has no room.
    """
    rng = random.Random(seed)
    for row in range(state.max_rows):
        state.release_row(row)
    for pool in state.pools:
        pool.fill_(NAN_BYTE)
    for row in range(state.max_rows):
        length = case.lengths[row] if row < len(case.lengths) else None
        if length is None:
            state.tokens[row] = IDLE_TOKEN
            continue
        state.allocate_row(row, length - 1 + room)
        state.fill_random_kv(row, length - 1, seed)
        if case.edges:
            _enlarge_edges(state, row, length - 1, seed)
        token = rng.randrange(state.plan.spec.vocab_size)
        is_last = row == case.live[-1]
        state.start_row(row, token, length - 1, length - 1 + room + (not is_last))


def edge_tokens(position: int, window: int | None) -> list[int]:
    """Tokens before `position` that lie at an edge of the window or of its first and last page,
    the youngest outside of the window first among them."""
    first = first_token(position, window)
    first_page, last_page = (
        first // PAGE_TOKENS * PAGE_TOKENS,
        position // PAGE_TOKENS * PAGE_TOKENS,
    )
    near = {first - 1, first, first + 1, position - 1, position - 2}
    near |= {first_page + PAGE_TOKENS - 1, first_page + PAGE_TOKENS, last_page - 1, last_page}
    return sorted(token for token in near if first_page <= token < position)


def _enlarge_edges(state: StepState, row: int, position: int, seed: int) -> None:
    """Draws the K of all edge tokens anew, as large as it takes to stand out from the others."""
    spec = state.plan.spec
    generator = torch.Generator(state.device)
    for layer, layer_spec in enumerate(spec.layers):
        generator.manual_seed((seed * 4096 + row) * 4096 + layer + 1)
        seen = position - first_token(position, layer_spec.window) + 1
        # The other scores add up to exp(log(seen) + SCORE_STD^2 / 2), as normal scores do.
        size = (math.log(seen) + SCORE_STD**2 / 2) / SCORE_STD
        for start, end in _runs(edge_tokens(position, layer_spec.window)):
            shape = (end - start, spec.attention.kv_heads, spec.attention.head_dim)
            keys, values = (
                torch.empty(shape, device=state.device).normal_(generator=generator)
                for _ in range(2)
            )
            state.load_kv(row, layer, (size * keys).bfloat16(), values.bfloat16(), start)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges [start, end)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """What a step may change, as it was, and a sum over each block of the pools."""

    tokens: Tensor
    positions: Tensor
    active: Tensor
    keys: Tensor
    values: Tensor
    sums: list[Tensor]

    @classmethod
    def of(cls, state: StepState, case: StepCase) -> Before:
        keys, values = new_tokens(state, case)
        fields = (state.tokens.clone(), state.positions.clone(), state.active.clone())
        return cls(*fields, keys, values, _block_sums(state))

    def restore(self, state: StepState, case: StepCase) -> list[str]:
        """Puts the state back; says if the step wrote more of the pages than its tokens."""
        layers, head_dim = len(state.plan.spec.layers), state.plan.spec.attention.head_dim
        for place, row in enumerate(case.live):
            position = int(self.positions[row])
            for layer in range(layers):
                for head in range(state.plan.spec.attention.kv_heads):
                    key, value = (x[layer, place, head] for x in (self.keys, self.values))
                    state.store_token(
                        layer, row, head, position, key.view(head_dim), value.view(head_dim)
                    )
        state.tokens.copy_(self.tokens)
        state.positions.copy_(self.positions)
        state.active.copy_(self.active)
        return [
            f"KV group {group}: {int((a != b).sum())} blocks changed beyond the new tokens"
            for group, (a, b) in enumerate(zip(self.sums, _block_sums(state), strict=True))
            if not torch.equal(a, b)
        ]


def _block_sums(state: StepState) -> list[Tensor]:
    """Per KV group int64 [blocks], equal before and after unless a block changed."""
    return [pool.view(torch.int64).sum(dim=1) for pool in state.pools]


def new_tokens(state: StepState, case: StepCase) -> tuple[Tensor, Tensor]:
    """K and V, bf16 [layers, live rows, kv_heads, head_dim], in the place of each fed token."""
    attention, layers = state.plan.spec.attention, len(state.plan.spec.layers)
    keys, values = [], []
    for row in case.live:
        length = case.lengths[row]
        assert length is not None
        page, slot = divmod(length - 1, PAGE_TOKENS)
        pages = [
            state.pages(layer, row, head, page)
            for layer in range(layers)
            for head in range(attention.kv_heads)
        ]
        k_pages, v_pages = (torch.stack(part) for part in zip(*pages, strict=True))
        shape = (layers, attention.kv_heads, attention.head_dim)
        keys.append(unpack_k_pages(k_pages, attention.head_dim)[:, slot].reshape(shape))
        values.append(unpack_v_pages(v_pages, attention.head_dim)[:, slot].reshape(shape))
    return torch.stack(keys, dim=1), torch.stack(values, dim=1)


def closing_faults(
    state: StepState, case: StepCase, before: Before, logits: Tensor, emitted: Tensor
) -> list[str]:
    """Whether tokens, positions and the stop test follow from a step's own logits.

    logits: [live rows, vocab]; emitted: [max_rows]. The state is as the step left it.
    """
    faults = []
    stop_tokens = {NOT_A_TOKEN, *state.eos_tokens.tolist()}
    best = largest_tokens(logits)
    for place, row in enumerate(case.live):
        token = int(best[place])
        if count := int(logits[place].isnan().sum()):
            faults.append(f"row {row}: {count} logits are not a number, or were never written")
        if int(emitted[row]) != token:
            faults.append(f"row {row}: token {int(emitted[row])}, its largest logit is {token}'s")
        position = int(before.positions[row]) + 1
        active = int(token not in stop_tokens and position < int(state.limits[row]))
        wanted = (max(token, 0), position, active)
        got = tuple(int(x[row]) for x in (state.tokens, state.positions, state.active))
        if got != wanted:
            faults.append(f"row {row}: token, position and activity are {got}, not {wanted}")
    for row in set(range(len(case.lengths))) - set(case.live):
        kept = (int(before.tokens[row]), int(before.positions[row]), 0, IDLE_ROW)
        now = (state.tokens, state.positions, state.active, emitted)
        if tuple(int(x[row]) for x in now) != kept:
            faults.append(f"row {row} is idle but did not stay as it was")
    return faults


def largest_tokens(logits: Tensor) -> Tensor:
    """The token of the largest of `logits` [..., vocab], the lowest of equals; NOT_A_TOKEN where
    none is a number."""
    numbers = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    return numbers.argmax(-1).where(~logits.isnan().all(-1), NOT_A_TOKEN)
