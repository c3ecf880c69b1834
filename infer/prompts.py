"""`treering generate CKPT --prompts FILE --output FILE`: many prompts side by side, resumable."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from configs.infer import GenerateOptions
from infer.answer import Answer
from infer.load import load, say
from infer.scheduler import Scheduler
from models.load import open_model
from models.tokenizer import Tokenizer


def generate_file(options: GenerateOptions) -> None:
    """Answers every prompt of the file, adding a JSON line to the output as each ends.

    A line holds the prompt's number (`index`), a hash of it, and what `Answer.record` tells. Those that the output
    holds already are not made again. Raises ValueError, before anything is loaded or written, for a line that is no
    prompt, and for an output that was made from other prompts.
    """
    assert options.prompts is not None
    if options.output is None:
        raise ValueError("--prompts needs --output FILE for the answers")
    if options.rows < 1:
        raise ValueError(f"rows {options.rows}: answer at least 1 prompt at a time")
    request = options.request()
    opened = open_model(options.checkpoint)
    config = opened.config
    tokenizer = opened.tokenizer()
    prompts = read_prompts(Path(options.prompts), tokenizer, options.chat)
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= config.context_length:
            raise ValueError(
                f"prompt {number} of {options.prompts} has {len(prompt)} tokens: from 1 to {config.context_length} fit"
            )
    output = Path(options.output)
    done = read_done(output, prompts)
    todo = [number for number in range(len(prompts)) if number not in done]
    if not todo:
        say(f"all {len(prompts)} answers are in {output}")
        return
    capacity = min(config.context_length, max(len(prompts[n]) for n in todo) + request.max_new_tokens)
    loaded = load(opened, tokenizer, options)
    scheduler = Scheduler(loaded.engine(rows=min(options.rows, len(todo)), capacity=capacity))
    answers: dict[int, tuple[int, Answer]] = {}
    for number in todo:
        submitted = scheduler.submit(prompts[number], request, end_ids=tokenizer.end_ids)
        answers[submitted] = number, Answer(tokenizer, request, len(prompts[number]))
    columns = TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    started, tokens = time.perf_counter(), 0
    with output.open("a") as file, Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(todo), rate="")
        for event in scheduler.run():
            number, answer = answers[event.request]
            ended = answer.finish_reason is not None
            answer.follow(event, scheduler)
            tokens += event.token is not None
            if answer.finish_reason is not None and not ended:
                line = {"index": number, "prompt_hash": hash_of(prompts[number]), **answer.record()}
                file.write(json.dumps(line) + "\n")
                file.flush()
                bar.update(task, advance=1, rate=f"{tokens / (time.perf_counter() - started):.1f} tokens/s")


def hash_of(prompt: list[int]) -> str:
    """Tells whether an answer belongs to a prompt."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


def read_prompts(path: Path, tokenizer: Tokenizer, chat: bool) -> list[list[int]]:
    """The tokens of each line; raises ValueError naming a line that is neither form."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a file of JSON lines")
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is no JSON: {error}") from None
        if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            prompts.append(tokenizer.encode_chat(entry["messages"]))
        elif isinstance(entry, dict) and isinstance(entry.get("prompt"), str) and entry["prompt"]:
            message = {"role": "user", "content": entry["prompt"]}
            prompts.append(tokenizer.encode_chat([message]) if chat else tokenizer.encode(entry["prompt"]))
        else:
            raise ValueError(f'{path} line {number} is neither {{"prompt": TEXT}} nor {{"messages": [...]}}')
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def read_done(output: Path, prompts: list[list[int]]) -> set[int]:
    """Numbers of the prompts that `output` answers; a last line that was cut off is removed from the file."""
    if not output.exists():
        return set()
    text = output.read_text()
    whole, _, cut = text.rpartition("\n")
    done = set()
    for line in whole.splitlines():
        try:
            entry = json.loads(line)
            number, said = entry["index"], entry["prompt_hash"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{output} is not a file of answers: choose another --output") from None
        if not 0 <= number < len(prompts) or said != hash_of(prompts[number]):
            raise ValueError(f"{output} answers other prompts: choose another --output")
        done.add(number)
    if cut:
        output.write_text(whole + "\n" if whole else "")
    return done
