"""One answer as it grows: tokens, text, and how it ended."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treering.configs.sampling import RequestConfig
from treering.infer.request import Event, TokenLogprob
from treering.infer.scheduler import Scheduler
from treering.infer.text.stream import TextStream
from treering.models.tokenizer import Tokenizer


@dataclass
class Answer:
    """Follows the events of one request. Text stops before end tokens and stop strings."""

    tokenizer: Tokenizer
    config: RequestConfig
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None

    def __post_init__(self):
        self._stream = TextStream(self.tokenizer.stream(), self.config.stop)

    def follow(self, event: Event, scheduler: Scheduler) -> str:
        """Takes one event in; returns the text that is new. Cancels the request where a stop string has come."""
        if self.finish_reason is not None:
            return ""
        piece = ""
        if event.token is not None:
            self.last = event.time
            self.first = self.last if self.first is None else self.first
            self.tokens.append(event.token)
            self.logprobs.append(event.logprob)
            self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
            if event.finish_reason != "stop":
                piece = self._stream.push(event.token)
        if self._stream.stopped:
            scheduler.cancel(event.request)
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            piece += self._stream.finish()
            # A stop string may be completed by the very last piece.
            if self._stream.stopped:
                self.finish_reason = "stop"
        self.text += piece
        return piece

    @property
    def prefill_seconds(self) -> float:
        """From submission to the first token."""
        return 0.0 if self.first is None else self.first - self.started

    @property
    def tokens_per_second(self) -> float:
        """After the first token; 0 where there is no second one."""
        if self.first is None or self.last is None or self.last == self.first:
            return 0.0
        return (len(self.tokens) - 1) / (self.last - self.first)

    def record(self) -> dict[str, Any]:
        """What is reported of an answer, as JSON."""
        record: dict[str, Any] = {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
        }
        if self.config.logprobs is not None:
            record["logprobs"] = [{"logprob": one.logprob, "top": one.top} for one in self.logprobs if one]
        if self.config.prompt_logprobs:
            record["prompt_logprobs"] = [{"logprob": one.logprob, "top": one.top} for one in self.prompt_logprobs]
        return record


def joint_record(answers: Sequence[Answer]) -> dict[str, Any]:
    """What is reported of the answers to one prompt: of one its record, of several their list as `answers`, next to
    what they have in common."""
    first, *others = [answer.record() for answer in answers]
    if not others:
        return first
    common = {name: first.pop(name) for name in ("prompt_tokens", "prompt_logprobs") if name in first}
    return common | {"answers": [first, *({k: v for k, v in one.items() if k not in common} for one in others)]}
