"""`Engine`: prompts in, streams of token ids out, over any executor.

    engine = Engine(executor, arena)            # the packed weights, once more, for prompts
    for token in engine.generate([5, 17, 3], max_tokens=20):
        ...
    async for token in engine.generate([5, 17, 3], stop_tokens=[9]):
        ...

One thread owns scheduler and device; requests come from any thread or event loop and never wait for
a step. A stream ends with a `finish_reason`; leaving its `with` block, or `cancel`, frees its row
before the next step. Pages are checked whenever nothing is left to do.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from mkc.runtime.device import Device
from mkc.runtime.executor import Executor
from mkc.runtime.executor_device import ExecutorDevice
from mkc.runtime.paging import Paging
from mkc.runtime.prefill import Prefill
from mkc.runtime.request import (
    GREEDY,
    Event,
    FinishReason,
    Request,
    RequestError,
    RequestFailed,
    Sampling,
)
from mkc.runtime.scheduler import Scheduler, SchedulerOptions


@dataclass(frozen=True, slots=True)
class EngineOptions(SchedulerOptions):
    """prefix_cache: whether prompts are looked up in earlier ones. Others: `SchedulerOptions`."""

    prefix_cache: bool = True


class Generation(Iterator[int], AsyncIterator[int]):
    """The stream of one request's token ids, for one reader, as iterator or asynchronous one.

    finish_reason and cached_tokens (of the prompt, found in the prefix cache) are there once the
    stream has ended. Reading a stream that failed raises RequestFailed MKC705 behind its tokens.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self._cancel = cancel
        self._tokens: deque[int] = deque()
        self._end: Event | None = None
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def cancel(self) -> None:
        """Ends the request before the next step; the stream then ends as `cancelled`."""
        self._cancel(self.request_id)

    def __next__(self) -> int:
        with self._changed:
            while not (self._tokens or self._end):
                self._changed.wait()
            token = self._take()
        if token is None:
            raise StopIteration
        return token

    async def __anext__(self) -> int:
        while True:
            with self._changed:
                if self._tokens or self._end:
                    token = self._take()
                    break
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiter = (loop, future)
            await future
        if token is None:
            raise StopAsyncIteration
        return token

    def __iter__(self) -> Generation:
        return self

    def __aiter__(self) -> Generation:
        return self

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def _take(self) -> int | None:
        """The next token, None at the end. Raises RequestFailed at the end of a failed stream."""
        if self._tokens:
            return self._tokens.popleft()
        assert self._end is not None
        if self._end.reason == "error":
            raise RequestFailed("MKC705", f"request {self.request_id}: {self._end.error}")
        return None

    def _put(self, event: Event) -> None:
        with self._changed:
            if event.token is not None:
                self._tokens.append(event.token)
            if event.reason is not None and self._end is None:
                self._end = event
                self.finish_reason, self.cached_tokens = event.reason, event.cached_tokens
            self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter[0].is_closed():
            loop, future = waiter
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))


class Engine:
    """Serves one model's requests in continuous batches. Close it, or use it in a `with` block."""

    def __init__(
        self,
        executor: Executor,
        arena: Tensor,
        options: EngineOptions = EngineOptions(),
        prefill_dtype: torch.dtype | None = None,
    ) -> None:
        """Takes over the executor's state: its rows, its pages and all that they hold.

        arena: the packed weights, on the state's device. prefill_dtype: see `Prefill`.
        """
        plan, state = executor.plan, executor.state
        groups = plan.layout.kv_groups
        device = ExecutorDevice(executor, Prefill(plan, arena, state, prefill_dtype))
        self._start(
            device,
            Paging(
                [pool.shape[0] for pool in state.pools],
                [group.window for group in groups],
                options.prefix_cache,
            ),
            min(plan.spec.max_positions, state.max_tokens + 1),
            plan.spec.vocab_size,
            plan.spec.eos_tokens,
            options,
            state.device,
        )

    def _start(
        self,
        device: Device,
        paging: Paging,
        max_length: int,
        vocab_size: int,
        eos_tokens: Iterable[int],
        options: EngineOptions,
        torch_device: torch.device,
    ) -> None:
        self.options, self.vocab_size = options, vocab_size
        self._scheduler = Scheduler(device, paging, max_length, tuple(eos_tokens), options)
        self._torch_device = torch_device
        self._generations: dict[str, Generation] = {}
        self._inbox: list[Request | str] = []  # a text cancels the request of that name
        self._wake = threading.Condition()
        self._stopped: str | None = None
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="mkc-engine", daemon=True)
        self._thread.start()

    @property
    def max_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._scheduler.max_length

    @property
    def counts(self) -> dict[str, int]:
        """Requests that wait, run and are preempted."""
        with self._wake:
            counts = self._scheduler.counts
            counts["waiting"] += sum(isinstance(item, Request) for item in self._inbox)
            return counts

    def generate(
        self,
        tokens: Iterable[int],
        max_tokens: int | None = None,
        stop_tokens: Iterable[int] = (),
        ignore_eos: bool = False,
        sampling: Sampling = GREEDY,
        salt: bytes = b"",
        request_id: str | None = None,
    ) -> Generation:
        """Queues a request; its tokens come from what is returned, see `Request` for the rest.

        Raises TooLong MKC701, QueueFull MKC702, RequestError MKC703 for sampling that is not
        supported, MKC704 for a request that makes no sense, MKC706 once the engine has stopped.
        """
        prompt, stops = tuple(tokens), frozenset(stop_tokens)
        for token in (*prompt, *stops):
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    "MKC704", f"token {token} is outside of the vocabulary of {self.vocab_size}"
                )
        with self._wake:
            if self._stopped is not None:
                raise RequestError("MKC706", f"the engine has stopped: {self._stopped}")
            if request_id is None:
                self._number += 1
                request_id = f"request-{self._number}"
            if request_id in self._generations:
                raise RequestError("MKC704", f"request {request_id} is under way already")
            request = Request(request_id, prompt, max_tokens, stops, ignore_eos, sampling, salt)
            self._scheduler.validate(request)
            waiting = sum(isinstance(item, Request) for item in self._inbox)
            self._scheduler.require_room(waiting)
            generation = Generation(request_id, self._cancel)
            self._generations[request_id] = generation
            self._inbox.append(request)
            self._wake.notify_all()
        return generation

    def close(self) -> None:
        """Ends all requests with an error and the engine's thread; waits for it."""
        with self._wake:
            if self._stopped is None:
                self._stopped = "it was closed"
            self._wake.notify_all()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _cancel(self, request_id: str) -> None:
        with self._wake:
            if request_id in self._generations:
                self._inbox.append(request_id)
                self._wake.notify_all()

    def _run(self) -> None:
        """The thread: takes what came in, advances, gives out what came of it."""
        try:
            if self._torch_device.type == "cuda":
                torch.cuda.set_device(self._torch_device)
            while self._take_inbox():
                if not self._scheduler.is_idle:
                    self._scheduler.advance()
                self._deliver()
                if self._scheduler.is_idle:
                    self._scheduler.check()
        except Exception as error:
            with self._wake:
                self._stopped = f"{type(error).__name__}: {error}"
        finally:
            self._end_all()

    def _take_inbox(self) -> bool:
        """Hands requests and cancellations on, waiting for some if nothing is left to do; False
        once the engine is to stop."""
        with self._wake:
            while not self._inbox and self._scheduler.is_idle and self._stopped is None:
                self._wake.wait()
            if self._stopped is not None:
                return False
            for item in self._inbox:
                if isinstance(item, str):
                    self._scheduler.cancel(item)
                else:
                    self._scheduler.submit(item)
            self._inbox.clear()
        return True

    def _deliver(self) -> None:
        events = self._scheduler.events
        while events:
            event = events.popleft()
            with self._wake:
                generation = self._generations[event.request_id]
                if event.reason is not None:
                    del self._generations[event.request_id]
            generation._put(event)

    def _end_all(self) -> None:
        """Gives out what is left, and ends every request that has not ended."""
        self._deliver()
        with self._wake:
            self._stopped = self._stopped or "its thread ended"
            left, self._generations = self._generations, {}
        for name, generation in left.items():
            error = f"the engine has stopped: {self._stopped}"
            generation._put(Event(name, reason="error", error=error))
