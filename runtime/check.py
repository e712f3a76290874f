"""All comparisons of one model and executor: which cases there are, how they run, what they found.

    steps       one step over random K and V, layer by layer, at every kind of edge
    sequences   greedy decoding against the oracle
    repeats     the same step over and over, bit by bit

The executor is the interpreter or the kernel; nothing here knows which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mkc.compiler.plan import Plan
from mkc.compiler.tile import PAGE_TOKENS
from mkc.runtime.check_case import StepCase
from mkc.runtime.check_repeat import RepeatCheck, check_repeats
from mkc.runtime.check_sequence import SequenceCheck, check_sequences
from mkc.runtime.check_step import StepCheck, check_step
from mkc.runtime.executor import Executor
from mkc.runtime.oracle import Oracle
from mkc.runtime.state import StepState, row_blocks
from mkc.runtime.weights import ModelWeights

LOGIT_STD = 0.5
"""Of the random weights that are compared with: greedy decoding soon repeats one token for ever
where the head, tied to the embedding, answers a token with itself."""

LONG_CONTEXTS = (8192, 32768, 131072)

MakeExecutor = Callable[[StepState], Executor]


@dataclass(frozen=True, slots=True)
class CheckCases:
    """What to compare. sequences: lengths of the prompts of each run of greedy decoding, which then
    takes `decode_steps` steps; a repeated case runs `runs` times."""

    steps: tuple[StepCase, ...]
    sequences: tuple[tuple[int, ...], ...]
    decode_steps: int
    repeats: tuple[StepCase, ...]
    runs: int

    def __len__(self) -> int:
        return len(self.steps) + len(self.sequences) + len(self.repeats)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All that was compared, in order."""

    steps: tuple[StepCheck, ...]
    sequences: tuple[SequenceCheck, ...]
    repeats: tuple[RepeatCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.problems()

    def problems(self) -> list[tuple[str, str]]:
        """(case, what fails) of everything that fails; the first of each case is its worst."""
        named: list[tuple[str, list[str]]] = []
        named += [(f"step {check.case}", check.problems()) for check in self.steps]
        named += [(f"decoding behind {list(c.lengths)}", c.problems()) for c in self.sequences]
        named += [(f"repeats of {check.case}", check.problems()) for check in self.repeats]
        return [(case, problem) for case, problems in named for problem in problems]


def make_cases(
    plan: Plan,
    rows: Sequence[int],
    decode_steps: int = 64,
    longest: int = LONG_CONTEXTS[-1],
    runs: int = 3,
    sequence_rows: Sequence[int] | None = None,
) -> CheckCases:
    """For each number of `rows` the contexts that lie at edges of pages and windows, in turn, until
    every context has occurred.

    longest: tokens of the longest context, at most those that the model has. sequence_rows: numbers
    of rows that decode (default: `rows`).
    """
    longest = min(longest, plan.spec.max_positions)
    turn = _Turn(edge_contexts(plan, longest))
    steps = []
    for count in rows:
        lengths = turn.take(count)
        steps += [StepCase(lengths), StepCase(lengths, edges=True)]
    most = max(rows)
    while not turn.is_over:
        steps.append(StepCase(turn.take(most)))
    if most > 2:
        gap = turn.take(most - 2)
        steps.append(StepCase((None, gap[0], None, *gap[1:])))
    # Prompts end where decoding is about to cross an edge: three tokens early.
    room = max(0, min(longest, plan.spec.max_positions) - decode_steps)
    starts = _Turn(sorted({min(max(0, n - 3), room) for n in edge_contexts(plan, PROMPT_LIMIT)}))
    return CheckCases(
        steps=tuple(steps),
        sequences=tuple(starts.take(n) for n in (rows if sequence_rows is None else sequence_rows))
        if decode_steps
        else (),
        decode_steps=decode_steps,
        repeats=(StepCase(turn.take(most)),) if runs > 1 else (),
        runs=runs,
    )


PROMPT_LIMIT = 4200


def edge_contexts(plan: Plan, longest: int) -> list[int]:
    """Numbers of tokens that a row may see, on both sides of each edge, and some long ones."""
    contexts = {1, 2, longest} | set(LONG_CONTEXTS)
    edges = {PAGE_TOKENS, 2 * PAGE_TOKENS}
    for window in {layer.window for layer in plan.spec.layers} - {None}:
        assert window is not None
        # Where the window is full, and where its first page and the row's last one move on.
        edges |= {window, window + PAGE_TOKENS, -(-window // PAGE_TOKENS) * PAGE_TOKENS}
    contexts |= {edge + side for edge in edges for side in (-1, 0, 1)}
    return sorted(n for n in contexts if 1 <= n <= longest)


class _Turn:
    """Hands out values in turn, every other one first, so that the first few are far apart."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values, self._next = [*values[::2], *values[1::2]], 0

    @property
    def is_over(self) -> bool:
        """Whether all have been handed out."""
        return self._next >= len(self._values)

    def take(self, count: int) -> tuple[int, ...]:
        taken = tuple(self._values[(self._next + i) % len(self._values)] for i in range(count))
        self._next += count
        return taken


def make_state(
    plan: Plan, batches: Sequence[Sequence[int | None]], device: torch.device | str
) -> StepState:
    """A state with room for each of `batches`, the tokens of each row, and for no more."""
    pages = [[-(-(n or 0) // PAGE_TOKENS) for n in batch] for batch in batches]
    blocks = [
        max(sum(row_blocks(group, count) for count in counts) for counts in pages)
        for group in plan.layout.kv_groups
    ]
    longest = max(n or 0 for batch in batches for n in batch)
    return StepState(plan, longest, device, blocks=blocks, poison=True)


def run_checks(
    plan: Plan,
    make_executor: MakeExecutor,
    weights: ModelWeights,
    oracle: Oracle,
    cases: CheckCases,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Callable[[int, str], None] = lambda done, what: None,
) -> CheckReport:
    """Runs all cases, each with an executor over a fresh state on `device`, traced.

    progress hears how many of len(cases) are done, and what runs now. Raises what executors raise.
    """
    done = 0

    def hear(name: str) -> Callable[[str], None]:
        now = done
        return lambda what: progress(now, f"{name}: {what}")

    steps, sequences, repeats = [], [], []
    single = [case.lengths for case in (*cases.steps, *cases.repeats)]
    if single:
        executor = make_executor(make_state(plan, single, device))
        for case in cases.steps:
            name = hear(f"step {case}")
            steps.append(check_step(executor, weights, case, seed + done, name))
            done += 1
        for case in cases.repeats:
            name = hear(f"repeats of {case}")
            repeats.append(check_repeats(executor, case, cases.runs, 1, seed + done, name))
            done += 1
        del executor
    for lengths in cases.sequences:
        state = make_state(plan, [[n + cases.decode_steps for n in lengths]], device)
        executor = make_executor(state)
        name = hear(f"decoding behind {list(lengths)}")
        sequences.append(
            check_sequences(
                executor, weights, oracle, lengths, cases.decode_steps, seed + done, name
            )
        )
        done += 1
    return CheckReport(tuple(steps), tuple(sequences), tuple(repeats))
