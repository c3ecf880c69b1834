"""What a scheduler is asked, what it tells, and what it keeps of a request on its way."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treering.configs.sampling import RequestConfig
from treering.infer.sampling import Kind

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class TokenLogprob:
    """Of the raw distribution, before penalties and temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens with their log-probabilities."""

    @staticmethod
    def of(own: Any, values: Any, ids: Any, top: int | None) -> "TokenLogprob":
        """From host arrays `[]`, `[most]` and `[most]`, of which `top` are wanted."""
        pairs = zip(ids[: top or 0].tolist(), values[: top or 0].tolist(), strict=True)
        return TokenLogprob(float(own), tuple(pairs))


@dataclass(frozen=True)
class Event:
    """One token of one request, or its end without one."""

    request: int
    token: int | None
    finish_reason: FinishReason | None
    """Set on a request's last event."""
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the prompt's tokens after the first, with a request's first token, where it asked for them."""
    time: float = field(default_factory=time.perf_counter)
    """When the host had it, by `time.perf_counter`: several events may be told together."""


@dataclass(eq=False)
class Session:
    """A row that outlives its requests, so that a conversation's next turn reads only what is new.

    Only one request at a time may use it; `Scheduler.close` gives its row and pages back.
    """

    row: int | None = None
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """What the row's cache holds."""


@dataclass(eq=False)
class Request:
    """A request on its way."""

    number: int
    prompt: list[int]
    config: RequestConfig
    end_ids: frozenset[int]
    budget: int
    pages: int
    streamed: bool
    session: Session
    kept: bool
    """Whether the session is the caller's, and stays."""
    caller: str
    keys: list[bytes]
    """What the prompt's full pages are known by. A kept session, whose row may be written anew, shares none."""
    done: int = 0
    """Tokens of the prompt that the cache holds."""
    begun: bool = False
    """Whether a chunk of its own was appended."""
    drawn: list[int] = field(default_factory=list)
    scored: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens after the first, where asked for."""


def least_program(configs: Sequence[RequestConfig]) -> tuple[Kind, int | None]:
    """What `Engine.decode_program` must be able to do for these requests: choice of tokens, and alternatives."""
    sampling = [config.sampling for config in configs]
    kind: Kind = "greedy" if all(one.is_plain and one.temperature == 0 for one in sampling) else "temperature"
    if not all(one.is_plain for one in sampling):
        kind = "full"
    return kind, max((config.logprobs for config in configs if config.logprobs is not None), default=None)
