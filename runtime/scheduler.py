"""The scheduler: which requests hold pages and rows, and what the device does next.

A request waits, is admitted when pages for its whole prompt are there, has its prompt stored in
pieces, and then decodes as a row of each step until it ends. One call of `advance` does a little of
everything: preempted requests come back, waiting ones are admitted, one pass stores pieces of
prompts within a budget of tokens, one decode step is queued, and the oldest step's tokens are read.
So no row waits longer than one such pass for its next token.

Order. Requests are admitted as they came. One that does not fit is passed by later ones that do,
but only a few times; then the pages that come free are its own. The budget for prompts is shared
equally among them, what short ones leave going to long ones. A prompt whose next block another
request is about to store waits for it rather than computing the same.

Room. Rows take pages as they grow. When there is none, the youngest request is preempted: the
bytes of its pages are saved, its pages given up, and before anything new is admitted it gets them
back, so that it goes on bit for bit where it was. The oldest request can always go on, because any
request that is accepted fits when it is alone.

Steps ahead. A step is queued before the tokens of the one before it are known, up to `steps_ahead`
deep: the device feeds each row its own last token, and stops at its limit. A row that ends for
another reason takes part in the steps already queued, whose tokens are then ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from mkc.runtime.device import Device, Piece
from mkc.runtime.executor import IDLE_ROW, NOT_A_TOKEN
from mkc.runtime.pages import OutOfPages
from mkc.runtime.paging import Paging, Sequence
from mkc.runtime.prefix import NO_BLOCK
from mkc.runtime.request import Event, FinishReason, QueueFull, Request, RequestError, TooLong

MAX_PASSES = 16  # times that later requests pass one that does not fit
MAX_SCANNED = 16  # waiting requests looked at in one go


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """max_waiting: requests that may wait; prefill_tokens: tokens of prompts between two steps;
    steps_ahead: steps queued at a time, 1 to read each step's tokens before the next."""

    max_waiting: int = 256
    prefill_tokens: int = 1024
    steps_ahead: int = 1


class Scheduler:
    """All requests of one device. Not for several threads at once.

    `events` receives every token and every end; whoever calls takes them from there.
    """

    def __init__(
        self,
        device: Device,
        paging: Paging,
        max_length: int,
        eos_tokens: Seq[int],
        options: SchedulerOptions = SchedulerOptions(),
    ) -> None:
        """max_length: tokens of a sequence, prompt included, that the device has room for."""
        self.device, self.paging, self.options = device, paging, options
        self.max_length = min(max_length, paging.longest())
        self.eos_tokens = frozenset(eos_tokens)
        self.events: deque[Event] = deque()
        self._waiting: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._running: list[Sequence] = []  # admitted, oldest first
        self._rows: list[Sequence] = []
        self._steps: deque[tuple[list[Sequence], Callable[[], list[int]]]] = deque()
        self._order = 0
        self._may_admit = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._waiting or self._preempted or self._running or self._steps)

    @property
    def counts(self) -> dict[str, int]:
        """Requests that wait, run (prompts under way included) and are preempted."""
        return {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "preempted": len(self._preempted),
        }

    def submit(self, request: Request) -> None:
        """Lets a request wait. Raises what `validate` and `require_room` raise."""
        length = self.validate(request)
        self.require_room()
        self._waiting.append(self.paging.open(request, length, self._order))
        self._order += 1
        self._may_admit = True

    def require_room(self, coming: int = 0) -> None:
        """Raises QueueFull MKC702 if no request may wait behind those that do and `coming` more."""
        waiting = len(self._waiting) + coming
        if waiting >= self.options.max_waiting:
            raise QueueFull("MKC702", f"{waiting} requests wait already")

    def validate(self, request: Request) -> int:
        """Tokens at which a request ends at the latest.

        Raises TooLong MKC701, RequestError MKC703 for sampling that is not greedy, MKC704 for a
        request that makes no sense.
        """
        request.sampling.require_greedy()
        if not request.tokens:
            raise RequestError("MKC704", "the prompt has no tokens")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise RequestError("MKC704", f"max_tokens = {request.max_tokens} is not positive")
        length = len(request.tokens) + (request.max_tokens or 1)
        if length > self.max_length:
            raise TooLong(
                "MKC701",
                f"{len(request.tokens)} tokens of prompt and {request.max_tokens or 1} more are "
                f"{length}, there is room for {self.max_length}",
            )
        return self.max_length if request.max_tokens is None else length

    def cancel(self, request_id: str) -> bool:
        """Ends a request before the next step; False if there is none of that name."""
        for sequence in [*self._running, *self._preempted, *self._waiting]:
            if sequence.request.request_id == request_id:
                self._finish(sequence, "cancelled")
                return True
        return False

    def fail_all(self, error: str) -> None:
        """Ends all requests with an error."""
        self._steps.clear()
        for sequence in [*self._running, *self._preempted, *self._waiting]:
            self._finish(sequence, "error", error)

    def advance(self) -> None:
        """Does a little of everything; returns after at most one pass over prompts and one step."""
        before = len(self.events)
        self._restore()
        self._admit()
        has_pieces = self._prefill()
        self._start_rows()
        has_step = self._decode()
        if not (has_pieces or has_step or self.is_idle or len(self.events) > before):
            raise RuntimeError(f"the scheduler is stuck: {self.counts}")

    def preempt_youngest(self) -> bool:
        """Preempts the youngest request, as a lack of pages does; False if none runs."""
        self._drain()
        if self._running:
            self._preempt(self._running[-1])
        return bool(self._preempted)

    def check(self) -> None:
        """Raises PageLeak or RuntimeError if pages and rows are not exactly those in use."""
        self.paging.check(self._running)
        if [sequence.row for sequence in self._rows] != list(range(len(self._rows))):
            raise RuntimeError("rows and sequences disagree")
        for sequence in self._running:
            if sequence.row is not None and self._rows[sequence.row] is not sequence:
                raise RuntimeError("a sequence is not in its row")
        if any(sequence.row is not None for sequence in [*self._waiting, *self._preempted]):
            raise RuntimeError("a sequence that does not run has a row")

    # Pages for whoever comes back or is new.

    def _restore(self) -> None:
        """Brings preempted requests back, oldest first."""
        while self._preempted and len(self._running) < self.device.max_rows:
            sequence = min(self._preempted, key=lambda s: s.order)
            first_pages, counts, saved = sequence.saved
            if not self.paging.can_take(counts, len(self._running)):
                return
            sequence.tables = self.paging.take(first_pages, counts)
            self.device.load(saved, self.paging.held(sequence))
            sequence.saved = None
            self._preempted.remove(sequence)
            self._run(sequence)

    def _admit(self) -> None:
        if self._preempted or not self._may_admit:
            return
        self._may_admit = False
        passed: list[Sequence] = []
        for sequence in self._waiting[:MAX_SCANNED]:
            if len(self._running) >= self.device.max_rows:
                break
            if self._try_admit(sequence):
                self._waiting.remove(sequence)
                for other in passed:
                    other.passed += 1
                self._may_admit = True  # those beyond the scanned ones
            elif sequence.passed >= MAX_PASSES:
                break
            else:
                passed.append(sequence)

    def _try_admit(self, sequence: Sequence) -> bool:
        hit = self.paging.match(sequence)
        if self._is_about_to_be_stored(sequence, hit.blocks):
            return False
        # Idle blocks of a prefix can be what is missing: alone, a request goes without them.
        for blocks in [hit.blocks] if self._running else [hit.blocks, 0]:
            if self.paging.can_take(self.paging.needed(sequence, blocks), len(self._running)):
                for group, source, target in self.paging.start(sequence, hit, blocks):
                    self.device.copy_block(group, source, target)
                self._run(sequence)
                return True
        return False

    def _is_about_to_be_stored(self, sequence: Sequence, blocks: int) -> bool:
        """Whether a running prompt has the next block still before it."""
        if blocks >= len(sequence.keys) or not self.paging.prefix_cache:
            return False
        key = sequence.keys[blocks]
        return any(
            other.is_registering
            and other.known <= blocks < len(other.keys)
            and other.keys[blocks] == key
            and (blocks + 1) * self.paging.page_tokens < other.prompt_length
            for other in self._running
        )

    def _run(self, sequence: Sequence) -> None:
        self._running.append(sequence)
        self._running.sort(key=lambda s: s.order)

    # Prompts.

    def _prefill(self) -> bool:
        """One pass over pieces of all prompts under way; whether there was anything to do."""
        pieces: list[tuple[Sequence, int]] = []
        for sequence, end in self._shares():
            if sequence in self._running:
                end = self._room(sequence, end)
                if end > sequence.stored:
                    pieces.append((sequence, end))
        if not pieces:
            return False
        for sequence, end, error in self._store(pieces):
            if error is not None:
                self._finish(sequence, "error", error)
                continue
            self._may_admit = True  # what was stored may be what another waits for
            self.paging.advance(sequence, end)
        return True

    def _shares(self) -> list[tuple[Sequence, int]]:
        """Prompts under way, oldest first, and how far each may get: equal shares of the budget,
        what short ones leave going to the others."""
        ends: dict[int, int] = {}
        prompts = [s for s in self._running if s.row is None and not s.is_ready]
        left = self.options.prefill_tokens
        by_rest = sorted(prompts, key=lambda s: len(s.tokens) - 1 - s.stored)
        for place, sequence in enumerate(by_rest):
            rest = len(sequence.tokens) - 1 - sequence.stored
            share = min(rest, max(1, left // (len(by_rest) - place)))
            ends[sequence.order] = sequence.stored + share
            left = max(0, left - share)
        return [(sequence, ends[sequence.order]) for sequence in prompts]

    def _room(self, sequence: Sequence, end: int) -> int:
        """Gives a prompt pages up to `end`, or as far as they go; preempts for the first one."""
        while (fits := self.paging.fit(sequence, end)) == sequence.stored:
            if not self._make_room(sequence):
                return sequence.stored
        self.paging.extend(sequence, fits)
        return fits

    def _store(self, pieces: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int, str | None]]:
        """Runs pieces together, and if that fails each by itself: only its own error ends it."""
        try:
            self.device.prefill([self._piece(sequence, end) for sequence, end in pieces])
        except Exception as error:
            if len(pieces) > 1:
                return [found for piece in pieces for found in self._store([piece])]
            return [(*pieces[0], f"{type(error).__name__}: {error}")]
        return [(sequence, end, None) for sequence, end in pieces]

    def _piece(self, sequence: Sequence, end: int) -> Piece:
        start = sequence.stored
        return Piece(sequence.tokens[start:end], start, sequence.tables)

    # Rows and steps.

    def _start_rows(self) -> None:
        """Makes rows of prompts that are stored but for their last token."""
        for sequence in self._running:
            if sequence.row is None and sequence.is_ready:
                sequence.row = len(self._rows)
                self._rows.append(sequence)
                self.device.start_row(
                    sequence.row,
                    sequence.tokens[-1],
                    sequence.stored,
                    sequence.length - 1,
                    sequence.tables,
                    sequence.request.sampling,
                )

    def _decode(self) -> bool:
        """Queues a step if a row needs one, and reads the oldest if enough are queued."""
        has_step = bool(self._steps)
        self._grow()
        is_needed = any(self._next_position(s) < s.length - 1 for s in self._rows)
        if is_needed:
            has_step = True
            rows = list(self._rows)
            try:
                result = self.device.step(len(rows))
            except Exception as error:
                self._fail_rows(rows, error)
                return True
            for sequence in rows:
                sequence.queued += 1
            self._steps.append((rows, result))
        if self._steps and (len(self._steps) >= self.options.steps_ahead or not is_needed):
            self._read_step()
        return has_step

    def _next_position(self, sequence: Sequence) -> int:
        """The position that the next step to be queued feeds."""
        return len(sequence.tokens) - 1 + sequence.queued

    def _grow(self) -> None:
        """Gives every row the page of the token that the next step feeds."""
        for sequence in sorted(self._rows, key=lambda s: s.order):
            position = self._next_position(sequence)
            while sequence.row is not None and position < sequence.length - 1:
                try:
                    added = self.paging.extend(sequence, position + 1)
                except OutOfPages:
                    if not self._make_room(sequence):
                        break
                    position = self._next_position(sequence)
                    continue
                for group, page, block in added:
                    self.device.set_block(sequence.row, group, page, block)
                break

    def _make_room(self, sequence: Sequence) -> bool:
        """Frees pages for a sequence: reads what is queued, as rows may end by it, or preempts the
        youngest. False if the sequence itself was preempted or has ended."""
        if self._steps:
            self._drain()
            return not sequence.is_finished
        youngest = self._running[-1]
        if youngest is sequence and len(self._running) == 1:
            raise RuntimeError("a sequence that is alone lacks pages")
        self._preempt(youngest)
        return youngest is not sequence

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_row(sequence)
        blocks = self.paging.held(sequence)
        first_pages = [sum(b == NO_BLOCK for b in table) for table in sequence.tables]
        saved = self.device.save(blocks)
        sequence.was_preempted = True
        sequence.saved = (first_pages, [len(group) for group in blocks], saved)
        self.paging.release(sequence)
        self._running.remove(sequence)
        self._preempted.append(sequence)

    def _drain(self) -> None:
        while self._steps:
            self._read_step()

    def _read_step(self) -> None:
        """Waits for the oldest queued step and gives its tokens out."""
        rows, result = self._steps.popleft()
        try:
            tokens = result()
        except Exception as error:
            # What was queued behind it started from its results.
            self._fail_rows([s for step, _ in [(rows, 0), *self._steps] for s in step], error)
            self._steps.clear()
            return
        for sequence, token in zip(rows, tokens, strict=True):
            sequence.queued -= 1
            if not sequence.is_finished:
                self._take_token(sequence, token)

    def _fail_rows(self, rows: list[Sequence], error: Exception) -> None:
        for sequence in rows:
            sequence.queued = 0
            if not sequence.is_finished:
                self._finish(sequence, "error", f"{type(error).__name__}: {error}")

    def _take_token(self, sequence: Sequence, token: int) -> None:
        request = sequence.request
        if token in (IDLE_ROW, NOT_A_TOKEN):
            words = "no logit is a number" if token == NOT_A_TOKEN else "its row was idle"
            self._finish(sequence, "error", words)
            return
        sequence.tokens.append(token)
        self.events.append(Event(request.request_id, token))
        if self.paging.advance(sequence, len(sequence.tokens) - 1):
            self._may_admit = True
        is_eos = token in self.eos_tokens and not request.ignore_eos
        if is_eos or token in request.stop_tokens:
            self._finish(sequence, "stop")
        elif len(sequence.tokens) == sequence.length:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self._leave_row(sequence)
        self.paging.release(sequence)
        for holders in (self._running, self._preempted, self._waiting):
            if sequence in holders:
                holders.remove(sequence)
        sequence.is_finished, sequence.saved = True, None
        self._may_admit = True
        self.events.append(
            Event(
                sequence.request.request_id,
                reason=reason,
                error=error,
                cached_tokens=sequence.cached_tokens,
            )
        )

    def _leave_row(self, sequence: Sequence) -> None:
        """Makes a sequence's row idle; the last row takes its place, so that rows stay dense."""
        row = sequence.row
        if row is None:
            return
        last = self._rows.pop()
        if last is not sequence:
            self.device.move_row(len(self._rows), row)
            self._rows[row], last.row = last, row
        self.device.stop_row(len(self._rows))
        sequence.row = None
