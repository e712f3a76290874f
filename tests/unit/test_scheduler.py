"""The scheduler over a device that costs nothing: random schedules, and single policies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_device import BAD_TOKEN, VOCABULARY, FakeDevice, expected_tokens
from mkc.runtime.paging import Paging
from mkc.runtime.request import Event, QueueFull, Request, RequestError, Sampling, TooLong
from mkc.runtime.scheduler import Scheduler, SchedulerOptions

EOS = 3
SIZE = 4  # tokens of a page
ROUNDS = 20_000  # of `advance`, within which everything ends


@dataclass
class Run:
    """A scheduler, and what became of each request."""

    scheduler: Scheduler
    device: FakeDevice
    requests: dict[str, Request] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, Event] = field(default_factory=dict)

    def submit(self, request_id: str, tokens: list[int], **options: object) -> None:
        request = Request(request_id, tuple(tokens), **options)  # type: ignore[arg-type]
        self.scheduler.submit(request)
        self.requests[request_id] = request
        self.tokens[request_id] = []

    def advance(self) -> None:
        self.scheduler.advance()
        self.scheduler.check()
        self.collect()

    def collect(self) -> None:
        while self.scheduler.events:
            event = self.scheduler.events.popleft()
            assert event.request_id not in self.ends, "an event behind a request's end"
            if event.token is not None:
                self.tokens[event.request_id].append(event.token)
            if event.reason is not None:
                self.ends[event.request_id] = event

    def finish(self) -> None:
        for _ in range(ROUNDS):
            if self.scheduler.is_idle:
                break
            self.advance()
        assert self.scheduler.is_idle, "requests never end"

    def check_results(self) -> None:
        """Every request ended once, with the tokens that it has when it is alone."""
        windows = self.scheduler.paging.windows
        assert self.ends.keys() == self.requests.keys()
        for name, request in self.requests.items():
            wanted = request.max_tokens
            length = self.scheduler.max_length if wanted is None else len(request.tokens) + wanted
            stops = request.stop_tokens | (set() if request.ignore_eos else {EOS})
            expected = expected_tokens(request.tokens, length, windows, stops)
            found, reason = self.tokens[name], self.ends[name].reason
            assert found == expected[: len(found)], name
            if reason in ("stop", "length"):
                assert found == expected, name
                assert reason == ("stop" if found[-1] in stops else "length")
        for pool in self.scheduler.paging.pools:
            assert pool.available == pool.blocks
        self.scheduler.paging.check([])
        self.scheduler.paging.cache.forget()
        self.scheduler.paging.check([])
        assert all(pool.cached == 0 for pool in self.scheduler.paging.pools)


def make_run(
    blocks: tuple[int, ...] = (40, 40),
    windows: tuple[int | None, ...] = (None, 6),
    rows: int = 3,
    max_length: int = 60,
    prefix_cache: bool = True,
    fail_steps: frozenset[int] = frozenset(),
    **options: int,
) -> Run:
    paging = Paging(blocks, windows, prefix_cache, SIZE)
    device = FakeDevice(paging, rows, fail_steps)
    scheduler = Scheduler(device, paging, max_length, [EOS], SchedulerOptions(**options))
    return Run(scheduler, device)


WINDOWS: tuple[tuple[int | None, ...], ...] = (
    (None,),
    (None, 6),
    (5,),
    (None, 1, 9),
    (8, None),
)


def random_prompt(rng: random.Random, longest: int, previous: list[list[int]]) -> list[int]:
    """New tokens, often behind a part of an earlier prompt."""
    start: list[int] = []
    if previous and rng.random() < 0.7:
        start = rng.choice(previous)
        start = start[: rng.choice([len(start), rng.randint(0, len(start))])]
    rest = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0 if start else 1, longest))]
    return (start + rest)[:longest]


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 4),
    windows=st.sampled_from(WINDOWS),
    spare=st.integers(0, 20),
    prefill_tokens=st.sampled_from([1, 3, 4, 9, 100]),
    steps_ahead=st.integers(1, 3),
    prefix_cache=st.booleans(),
    trouble=st.sampled_from(["", "", "", "steps", "prompts"]),
)
def test_random_schedules(
    seed: int,
    rows: int,
    windows: tuple[int | None, ...],
    spare: int,
    prefill_tokens: int,
    steps_ahead: int,
    prefix_cache: bool,
    trouble: str,
) -> None:
    """Joins, leaves, cancels and preemptions in pools that hold little more than one sequence."""
    rng = random.Random(seed)
    blocks = tuple((7 if w is None else -(-w // SIZE) + 1) + rng.randint(0, spare) for w in windows)
    fail_steps = frozenset(rng.sample(range(1, 60), 3)) if trouble == "steps" else frozenset()
    run = make_run(
        blocks,
        windows,
        rows,
        rng.choice([24, 40]),
        prefix_cache,
        fail_steps,
        max_waiting=6,
        prefill_tokens=prefill_tokens,
        steps_ahead=steps_ahead,
    )
    longest = run.scheduler.max_length - 1
    previous: list[list[int]] = []
    bad: set[str] = set()
    cancelled: set[str] = set()
    for number in range(rng.randint(1, 12)):
        prompt = random_prompt(rng, longest, previous)
        previous.append(prompt)
        name = str(number)
        wanted = rng.choice([None, rng.randint(1, longest + 1 - len(prompt))])
        if trouble == "prompts" and len(prompt) > 1 and rng.random() < 0.3:
            prompt = [*prompt]
            prompt[rng.randrange(len(prompt) - 1)] = BAD_TOKEN
            bad.add(name)
        try:
            run.submit(
                name,
                prompt,
                max_tokens=wanted,
                ignore_eos=rng.random() < 0.6,
                stop_tokens=frozenset([5] if rng.random() < 0.2 else []),
                salt=rng.choice([b"", b"", b"other"]),
            )
        except QueueFull:
            bad.discard(name)
        for _ in range(rng.choice([0, 1, 1, 5])):
            run.advance()
            if rng.random() < 0.1:
                run.scheduler.preempt_youngest()
                run.scheduler.check()
            if rng.random() < 0.1:
                victim = rng.choice(list(run.requests) or ["none"])
                if run.scheduler.cancel(victim):
                    cancelled.add(victim)
                run.collect()
    run.finish()
    for name, end in run.ends.items():
        if end.reason == "cancelled":
            assert name in cancelled
        elif end.reason == "error":
            assert name in bad or fail_steps
        else:
            assert name not in bad
    run.check_results()


def test_errors_end_only_their_own_request() -> None:
    run = make_run(prefill_tokens=100)
    run.submit("good", [1, 2, 4, 1, 2], max_tokens=5, ignore_eos=True)
    run.submit("bad", [1, BAD_TOKEN, 2, 4], max_tokens=5)
    run.submit("late", [6, 6], max_tokens=3, ignore_eos=True)
    run.finish()
    assert {name: end.reason for name, end in run.ends.items()} == {
        "good": "length",
        "bad": "error",
        "late": "length",
    }
    assert "a token that cannot be" in (run.ends["bad"].error or "")
    run.check_results()


def test_a_failed_step_ends_its_rows_and_no_others() -> None:
    run = make_run(rows=1, fail_steps=frozenset({2}), steps_ahead=2)
    run.submit("first", [1, 2], max_tokens=9, ignore_eos=True)
    run.submit("second", [1, 2, 5], max_tokens=9, ignore_eos=True)
    run.finish()
    assert run.ends["first"].reason == "error"
    assert run.ends["first"].error == "ArithmeticError: step 2"
    assert run.ends["second"].reason == "length"
    run.check_results()


def test_short_prompts_pass_a_long_one_that_does_not_fit_but_not_for_ever() -> None:
    run = make_run(blocks=(12, 40), rows=4, max_length=60, prefix_cache=False)
    run.submit("first", [1] * 16, max_tokens=16, ignore_eos=True)
    run.advance()
    run.submit("long", [2] * 40, max_tokens=4, ignore_eos=True)
    order: list[str] = []
    for number in range(60):
        run.submit(f"short {number}", [number % 7, 5], max_tokens=2, ignore_eos=True)
        run.advance()
        order += [name for name in run.ends if name not in order]
    run.finish()
    order += [name for name in run.ends if name not in order]
    place = order.index("long")
    assert 1 < place < 40  # neither first nor last: some passed, then it was its turn
    assert "short 0" in order[:place]
    run.check_results()


def test_the_budget_is_shared_and_rows_go_on_decoding() -> None:
    run = make_run(blocks=(60, 60), rows=3, max_length=200, prefill_tokens=8, prefix_cache=False)
    run.submit("row", [1, 2], max_tokens=50, ignore_eos=True)
    run.advance()
    run.submit("long", [2] * 100, max_tokens=1)
    run.submit("short", [4] * 9, max_tokens=1)
    for _ in range(4):
        before = len(run.tokens["row"])
        prefilled = run.device.prefilled
        run.advance()
        assert len(run.tokens["row"]) == before + 1
        assert run.device.prefilled - prefilled <= 8
    assert "short" in run.ends
    assert "long" not in run.ends
    run.finish()
    run.check_results()


def test_a_shared_beginning_is_stored_once_even_by_requests_that_come_together() -> None:
    shared = [number % 5 for number in range(32)]
    run = make_run(rows=4, prefill_tokens=8)
    for number in range(4):
        run.submit(str(number), [*shared, number, 5], max_tokens=2, ignore_eos=True)
    run.finish()
    assert [run.ends[str(number)].cached_tokens for number in range(4)] == [0, 32, 32, 32]
    assert run.device.prefilled == 32 + 4
    run.check_results()


def test_generated_tokens_are_found_and_a_whole_prompt_is_copied() -> None:
    run = make_run()
    run.submit("first", [1, 2, 4], max_tokens=14, ignore_eos=True)
    run.finish()
    grown = [1, 2, 4, *run.tokens["first"]]
    run.submit("second", grown[:16], max_tokens=3, ignore_eos=True)
    run.finish()
    assert run.ends["second"].cached_tokens == 15  # the last token is fed again
    assert run.device.prefilled == 2
    run.submit("other tenant", grown[:16], max_tokens=3, ignore_eos=True, salt=b"x")
    run.finish()
    assert run.ends["other tenant"].cached_tokens == 0
    run.check_results()


def test_a_lost_window_is_computed_once_more_and_then_kept() -> None:
    """The sliding group's pool is small: windows in mid-prompt go, those at branches stay."""
    shared = [number % 5 for number in range(32)]
    run = make_run(blocks=(60, 9), rows=1, max_length=100)
    hits = []
    for number in range(4):
        tail = [number] * 3 + [6, number, 1] * 9
        run.submit(str(number), [*shared, *tail], max_tokens=2, ignore_eos=True)
        run.finish()
        hits.append(run.ends[str(number)].cached_tokens)
    assert hits == [0, 0, 32, 32]
    run.check_results()


def test_cancelled_requests_leave_at_once_wherever_they_are() -> None:
    run = make_run(rows=2, prefill_tokens=4, steps_ahead=2)
    run.submit("row", [1], max_tokens=40, ignore_eos=True)
    run.advance()
    run.submit("prompt", [2] * 30, max_tokens=4)
    run.submit("waiting", [4] * 3, max_tokens=4)
    run.advance()
    for name in ("row", "prompt", "waiting"):
        assert run.scheduler.cancel(name)
        assert not run.scheduler.cancel(name)
        run.scheduler.check()
    run.collect()
    assert Counter(end.reason for end in run.ends.values()) == {"cancelled": 3}
    run.finish()
    run.check_results()


def test_what_cannot_be_is_refused_by_name() -> None:
    run = make_run(blocks=(5, 40), max_waiting=1)
    assert run.scheduler.max_length == 21
    with pytest.raises(TooLong, match=r"MKC701.*18 tokens of prompt and 4 more are 22, .* 21"):
        run.submit("long", [1] * 18, max_tokens=4)
    with pytest.raises(RequestError, match="MKC704"):
        run.submit("empty", [])
    with pytest.raises(RequestError, match=r"MKC704.*max_tokens = 0"):
        run.submit("none", [1], max_tokens=0)
    with pytest.raises(RequestError, match=r"MKC703.*top_p = 0\.9"):
        run.submit("sampled", [1], sampling=Sampling(top_p=0.9))
    run.submit("first", [1, 2], max_tokens=3)
    with pytest.raises(QueueFull, match="MKC702"):
        run.submit("second", [1, 2], max_tokens=3)
    run.finish()
    run.check_results()
