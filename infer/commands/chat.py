"""`treering chat CKPT`."""

import json
import sys
from pathlib import Path

from treering.configs.cli import parse
from treering.configs.infer import ChatOptions
from treering.infer.chat import Conversation
from treering.infer.load import load, restore, say
from treering.infer.saved_cache import read_saved_cache
from treering.infer.scheduler import Scheduler
from treering.models.conversion.load import open_model


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
