"""A conversation that keeps its KV cache between turns."""

from collections.abc import Iterator

from treering.configs.sampling import RequestConfig
from treering.infer.request import Session
from treering.infer.scheduler import Scheduler
from treering.infer.text.answer import Answer
from treering.infer.text.progress import run_with_progress
from treering.models.tokenizer import Tokenizer


class Conversation:
    """Messages, and the row of the cache that holds them.

    Each turn encodes the whole conversation, since a chat template may treat earlier messages as it likes; what the
    cache holds of it already is not read again.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        request: RequestConfig,
        system: str | None = None,
        session: Session | None = None,
    ):
        self.scheduler, self.tokenizer, self.request = scheduler, tokenizer, request
        self._session = session or Session()
        self._before = list(self._session.tokens)
        """A text that the conversation continues."""
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._opening)

    def reset(self) -> None:
        """Forgets all but the system's message, and the text before it."""
        if not self._before:
            self.scheduler.close(self._session)
        self.messages = list(self._opening)

    def reply(self, text: str) -> Iterator[str]:
        """The model's answer to `text`, in pieces as they come.

        Raises ValueError, and leaves the conversation as it was, where it would outgrow the engine. An answer that is
        consumed to its end is cancelled, and its beginning is kept.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.encode_chat(messages)
        if self._before:
            prompt = self._before + self.tokenizer.without_bos(prompt)
        capacity = self.scheduler.engine.capacity
        if len(prompt) >= capacity:
            raise ValueError(f"the conversation has {len(prompt)} tokens and {capacity} fit: /reset starts over")
        number = self.scheduler.submit(
            prompt, self.request, end_ids=self.tokenizer.end_ids, streamed=True, session=self._session
        )
        answer = Answer(self.tokenizer, self.request, len(prompt))
        try:
            for event in run_with_progress(self.scheduler, number):
                yield answer.follow(event, self.scheduler)
        finally:
            self.scheduler.cancel(number)
            for _ in self.scheduler.run():
                pass
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
