"""`treering chat CKPT`."""

import json
import sys
from pathlib import Path

from treering.configs.cli import parse
from treering.configs.errors import UserError
from treering.configs.infer import ChatOptions
from treering.infer.load import load
from treering.infer.saved_cache.record import read_saved_cache
from treering.infer.text.chat import Conversation
from treering.infer.text.generator import TextGenerator
from treering.infer.text.progress import count, say
from treering.models.conversion.load import open_model


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(ChatOptions, arguments, program="treering chat")
    request = options.request()
    if options.capacity < 1:
        raise UserError("it must be at least 1", field="capacity", value=options.capacity)
    opened = open_model(options.checkpoint)
    config = opened.config
    tokenizer = opened.tokenizer()
    tokenizer.encode_chat([{"role": "user", "content": "-"}])
    saved = None if options.load_cache is None else read_saved_cache(options.load_cache)
    held = 0 if saved is None else len(saved.tokens)
    if held >= config.context_length:
        raise ValueError(
            f"{options.load_cache} holds {held} tokens, which leaves none of the model's context of "
            f"{config.context_length}"
        )
    loaded = load(opened, tokenizer, options, saved=saved)
    capacity = min(options.capacity + held, config.context_length)
    generator = TextGenerator(loaded, loaded.engine(rows=1, capacity=capacity))
    session = None if saved is None else generator.restore(saved)
    conversation = Conversation(generator.scheduler, tokenizer, request, options.system, session)
    say("/reset starts over, /save FILE writes the conversation, /exit leaves")
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
    """One line of the user's; a mistake is one line on standard error, and the conversation continues."""
    command, _, argument = line.partition(" ")
    try:
        if command == "/reset":
            conversation.reset()
        elif command == "/save":
            save(conversation, argument.strip())
        elif command.startswith("/"):
            raise ValueError(f"unknown command {command}: the commands are /reset, /save FILE and /exit")
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
    say(f"{count(len(conversation.messages), 'message')} in {path}")
