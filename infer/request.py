"""What a scheduler is asked, what it reports, and what it keeps of a request on its way."""

import itertools
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
    """The most likely tokens with their log-probabilities."""

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
    """When the host had it, by `time.perf_counter`: several events may be reported together."""


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
    pinned: bool
    """Whether the session is the caller's, and keeps its row."""
    caller: str
    keys: list[bytes]
    """What the prompt's full pages are known by. The row of a session may be overwritten, so it shares none."""
    done: int = 0
    """Tokens of the prompt that the cache holds."""
    begun: bool = False
    """Whether a chunk of its own was appended."""
    drawn: list[int] = field(default_factory=list)
    scored: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens after the first, where asked for."""

    @property
    def is_read(self) -> bool:
        """Whether the cache holds the whole prompt."""
        return self.done == len(self.prompt)

    @property
    def left(self) -> int:
        """Tokens of the prompt that the cache does not hold yet."""
        return len(self.prompt) - self.done

    def in_session(self) -> int:
        """Tokens that need not be read, since the session's row holds them. The last one is always read: the next is
        drawn from its logits."""
        return min(common_prefix(self.session.tokens, self.prompt), len(self.prompt) - 1)

    def shareable(self, page_tokens: int) -> list[bytes]:
        """The prompt's pages before its last token; none where all tokens are to be scored."""
        return [] if self.config.prompt_logprobs else self.keys[: (len(self.prompt) - 1) // page_tokens]

    def shared_with(self, other: "Request", page_tokens: int) -> int:
        """Tokens that would be done with a copy of the page after the full ones that are, taken from the row of
        another request; 0 where their texts differ before it, or may not be shared."""
        start = self.done
        page = start // page_tokens
        if other is self or other.pinned or self.pinned or other.caller != self.caller or self.config.prompt_logprobs:
            return 0
        if other.keys[:page] != self.keys[:page]:
            return 0
        end = min((page + 1) * page_tokens, len(self.prompt) - 1, other.done)
        return start + common_prefix(self.prompt[start:end], other.prompt[start:end])

    def draw(self, token: int, logprob: TokenLogprob | None) -> Event:
        """Its next token, as an event."""
        self.drawn.append(token)
        reason: FinishReason | None = None
        if token in self.end_ids:
            reason = "stop"
        elif len(self.drawn) == self.budget:
            reason = "length"
        first = self.config.prompt_logprobs and len(self.drawn) == 1
        return Event(self.number, token, reason, logprob, tuple(self.scored) if first else None)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common before they differ."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def least_program(configs: Sequence[RequestConfig]) -> tuple[Kind, int | None]:
    """What `Engine.decode_program` must be able to do for these requests: choice of tokens, and alternatives."""
    sampling = [config.sampling for config in configs]
    kind: Kind = "greedy" if all(one.is_plain and one.temperature == 0 for one in sampling) else "temperature"
    if not all(one.is_plain for one in sampling):
        kind = "full"
    return kind, max((config.logprobs for config in configs if config.logprobs is not None), default=None)
