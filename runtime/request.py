"""What is asked of the engine: requests, how their tokens are chosen, how they end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from mkc.compiler.errors import MkcError

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""`stop`: a stop token, which is the last token given; `length`: no room or no more wanted."""


class RequestError(MkcError):
    """A request that the engine refuses (MKC701 to MKC704, MKC706)."""

    exit_status = 2


class TooLong(RequestError):
    """Prompt and tokens wanted exceed what the model or the pages hold (MKC701)."""


class QueueFull(RequestError):
    """As many requests wait as may wait (MKC702); to be tried again later."""


class RequestFailed(RequestError):
    """A request that an error ended (MKC705)."""

    exit_status = 70


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's next token is chosen, one object for each row of a step.

    Steps are greedy today, so every value but these defaults is refused by name.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    def require_greedy(self) -> None:
        """Raises RequestError MKC703 for the first parameter that is not greedy decoding's."""
        greedy = Sampling()
        for place in fields(self):
            value = getattr(self, place.name)
            if value != getattr(greedy, place.name):
                raise RequestError(
                    "MKC703",
                    f"{place.name} = {value!r} is not supported: tokens are chosen greedily",
                    f"leave {place.name} at {getattr(greedy, place.name)!r}",
                )


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what to do with it.

    tokens: at least one. max_tokens: tokens wanted, None for as many as there is room for.
    stop_tokens: end the request, in addition to the model's own, which `ignore_eos` leaves out.
    salt: prefixes are shared among requests of one salt only.
    """

    request_id: str
    tokens: tuple[int, ...]
    max_tokens: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling: Sampling = GREEDY
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Event:
    """One more token of a request, or its end: exactly one event of a request has a reason.

    cached_tokens: of the prompt, found in the prefix cache.
    """

    request_id: str
    token: int | None = None
    reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
