"""`treering generate CKPT --prompts FILE --output FILE`: many prompts side by side, resumable."""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from configs.infer import GenerateOptions
from configs.sampling import RequestConfig
from infer.answer import Answer, joint_record
from infer.load import load, say
from infer.scheduler import Scheduler
from models.load import open_model
from models.tokenizer import Tokenizer

_BEGIN = '{"index": '


def generate_file(options: GenerateOptions) -> None:
    """Answers every prompt of the file, adding a JSON line to the output as each ends.

    A line holds the prompt's number (`index`), a hash of it and of the options that decide its answer, and what
    `Answer.record` tells. Those that the output holds already are not made again. Raises ValueError, before anything is
    loaded or written, for a line that is no prompt, and for an output that holds anything else, or answers to other
    prompts or by other options.
    """
    assert options.prompts is not None
    if options.output is None:
        raise ValueError("--prompts needs --output FILE for the answers")
    request = options.request()
    opened = open_model(options.checkpoint)
    config = opened.config
    tokenizer = opened.tokenizer()
    prompts = read_prompts(Path(options.prompts), tokenizer, options.chat, options.n)
    requests = []
    for number, (prompt, n) in enumerate(prompts):
        try:
            requests.append(request.samples(n))
        except ValueError as error:
            raise ValueError(f"prompt {number} of {options.prompts}: {error}") from None
        if not 0 < len(prompt) <= config.context_length:
            raise ValueError(
                f"prompt {number} of {options.prompts} has {len(prompt)} tokens: from 1 to {config.context_length} fit"
            )
    output = Path(options.output)
    hashes = [hash_of(prompt, request, n) for prompt, n in prompts]
    done = read_done(output, hashes)
    todo = [number for number in range(len(prompts)) if number not in done]
    if not todo:
        say(f"all {len(prompts)} answers are in {output}")
        return
    capacity = min(config.context_length, max(len(prompts[n][0]) for n in todo) + request.max_new_tokens)
    rows = min(options.rows, sum(len(requests[number]) for number in todo))
    loaded = load(opened, tokenizer, options, rows=rows)
    scheduler = Scheduler(loaded.engine(rows=rows, capacity=capacity))
    following: dict[int, tuple[int, Answer]] = {}
    answers: dict[int, list[Answer]] = {}
    for number in todo:
        prompt, _ = prompts[number]
        answers[number] = [Answer(tokenizer, one, len(prompt)) for one in requests[number]]
        for answer in answers[number]:
            submitted = scheduler.submit(prompt, answer.config, end_ids=tokenizer.end_ids)
            following[submitted] = number, answer
    columns = TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    started, tokens = time.perf_counter(), 0
    with output.open("a") as file, Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(todo), rate="")
        for event in scheduler.run():
            number, answer = following[event.request]
            ended = answer.finish_reason is not None
            answer.follow(event, scheduler)
            tokens += event.token is not None
            if not ended and all(one.finish_reason is not None for one in answers[number]):
                line = {"index": number, "request_hash": hashes[number], **joint_record(answers[number])}
                file.write(json.dumps(line) + "\n")
                file.flush()
                bar.update(task, advance=1, rate=f"{tokens / (time.perf_counter() - started):.1f} tokens/s")


def hash_of(prompt: list[int], request: RequestConfig, n: int) -> str:
    """Tells whether `n` answers belong to a prompt and the options that it is answered by."""
    asked = json.dumps([prompt, dataclasses.asdict(request), *([n] if n > 1 else [])], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def read_prompts(path: Path, tokenizer: Tokenizer, chat: bool, n: int) -> list[tuple[list[int], int]]:
    """The tokens of each line, and how many answers it asks for: `n`, where it does not say.

    Raises ValueError naming a line that is neither form.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a file of JSON lines")
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_read_prompt(line.decode(), tokenizer, chat, n))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def _read_prompt(line: str, tokenizer: Tokenizer, chat: bool, n: int) -> tuple[list[int], int]:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON ({error})") from None
    forms = 'a line is {"prompt": TEXT} or {"messages": [{"role": ROLE, "content": TEXT}, ...]}'
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError(f"it has not one of prompt and messages: {forms}")
    n = entry.get("n", n)
    if type(n) is not int or n < 1:
        raise ValueError(f"its n is {n!r}: a number of answers, at least 1")
    if "prompt" in entry:
        text = entry["prompt"]
        if not isinstance(text, str) or not text:
            raise ValueError(f"its prompt is {text!r}: {forms}, and a text has at least one character")
        return tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text), n
    messages = entry["messages"]
    proper = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    )
    if not messages or not proper:
        raise ValueError(f"its messages are {messages!r:.80}: {forms}")
    return tokenizer.encode_chat(messages), n


def read_done(output: Path, hashes: list[str]) -> set[int]:
    """Numbers of the requests that `output` answers; a last line that was cut off is removed from the file."""
    if not output.parent.is_dir():
        raise ValueError(f"{output} cannot be written: {output.parent} is no folder")
    if not output.exists():
        return set()
    if not output.is_file():
        raise ValueError(f"{output} is no file: choose another --output")
    text = output.read_text(errors="replace")
    whole, _, cut = text.rpartition("\n")
    done = set()
    for line in whole.splitlines():
        try:
            entry = json.loads(line)
            number, said = entry["index"], entry["request_hash"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{output} is not a file of answers: choose another --output") from None
        if not 0 <= number < len(hashes) or said != hashes[number]:
            raise ValueError(f"{output} answers other prompts, or by other options: choose another --output")
        done.add(number)
    if cut:
        # Only what an answer begins with is taken for one that was broken off.
        if not cut.startswith(_BEGIN) and not _BEGIN.startswith(cut):
            raise ValueError(f"{output} is not a file of answers: choose another --output")
        output.write_text(whole + "\n" if whole else "")
    return done
