"""`treering chat CKPT`: a conversation in the terminal that keeps its KV cache between turns."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from treering.configs.cli import parse
from treering.configs.infer import ChatOptions
from treering.configs.sampling import RequestConfig
from treering.infer.answer import Answer
from treering.infer.load import load, restore, say
from treering.infer.request import Session
from treering.infer.saved_cache import read_saved_cache
from treering.infer.scheduler import Scheduler
from treering.models.load import open_model
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
        """A text that the conversation goes on from."""
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
        not read to its end is cancelled, and what came of it is kept.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.encode_chat(messages)
        if self._before:
            prompt = self._before + self.tokenizer.going_on(prompt)
        capacity = self.scheduler.engine.capacity
        if len(prompt) >= capacity:
            raise ValueError(f"the conversation has {len(prompt)} tokens and {capacity} fit: /reset begins anew")
        number = self.scheduler.submit(
            prompt, self.request, end_ids=self.tokenizer.end_ids, streamed=True, session=self._session
        )
        answer = Answer(self.tokenizer, self.request, len(prompt))
        try:
            for event in self.scheduler.run():
                yield answer.follow(event, self.scheduler)
        finally:
            self.scheduler.cancel(number)
            for _ in self.scheduler.run():
                pass
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(ChatOptions, arguments, program="treering chat")
    request = options.request()
    if options.capacity < 1:
        raise ValueError(f"capacity {options.capacity}: the conversation holds at least 1 token")
    opened = open_model(options.checkpoint)
    config = opened.config
    tokenizer = opened.tokenizer()
    tokenizer.encode_chat([{"role": "user", "content": "-"}])
    saved = None if options.load_cache is None else read_saved_cache(options.load_cache)
    held = 0 if saved is None else len(saved.tokens)
    if held >= config.context_length:
        raise ValueError(
            f"{options.load_cache} holds {held} tokens and the model's context {config.context_length}: none are left"
        )
    loaded = load(opened, tokenizer, options, saved=saved)
    scheduler = Scheduler(loaded.engine(rows=1, capacity=min(options.capacity + held, config.context_length)))
    session = None if saved is None else restore(saved, scheduler)
    conversation = Conversation(scheduler, tokenizer, request, options.system, session)
    say("/reset begins anew, /save FILE writes the conversation, /exit leaves")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return 0
        if line == "/exit":
            return 0
        if line:
            obey_or_reply(conversation, line)


def obey_or_reply(conversation: Conversation, line: str) -> None:
    """One line of the user's; a mistake is told, and the conversation goes on."""
    command, _, argument = line.partition(" ")
    try:
        if command == "/reset":
            conversation.reset()
        elif command == "/save":
            save(conversation, argument.strip())
        elif command.startswith("/"):
            raise ValueError(f"unknown command {command}: /reset, /save FILE and /exit are known")
        else:
            for piece in conversation.reply(line):
                print(piece, end="", flush=True)
            print()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        print()


def save(conversation: Conversation, name: str) -> None:
    """Writes the messages as JSON; raises ValueError where the file exists or has no name."""
    if not name:
        raise ValueError("/save needs the name of a file")
    path = Path(name)
    if path.exists():
        raise ValueError(f"{path} exists: choose another name")
    path.write_text(json.dumps(conversation.messages, indent=2, ensure_ascii=False) + "\n")
    say(f"{len(conversation.messages)} messages in {path}")
