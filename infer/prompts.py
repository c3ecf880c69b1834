"""`treering generate CKPT --prompts FILE --output FILE`: many prompts side by side, resumable."""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, get_type_hints

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from treering.configs.infer import AnswerOptions, GenerateOptions
from treering.configs.sampling import RequestConfig
from treering.infer.answer import Answer, joint_record
from treering.infer.load import load, restore, say
from treering.infer.saved_cache import SavedCache, read_saved_cache
from treering.infer.scheduler import Scheduler
from treering.models.checkpoint.atomic_folder import exclusive_lock
from treering.models.conversion.load import open_model
from treering.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """What one line of a file of prompts asks for."""

    tokens: list[int]
    """Behind those of a saved cache, where there is one."""
    requests: list[RequestConfig]
    """One an answer."""
    name: dict[str, Any]
    """The `id` that the line gives itself, any JSON value, if it does; its answer gets it."""

    def hash(self, model: list[Any], saved: SavedCache | None) -> str:
        """Tells whether an answer belongs to it, by a model that JSON tells from others."""
        before = None if saved is None else saved.fingerprint
        asked = [model, before, self.tokens, [dataclasses.asdict(one) for one in self.requests], self.name]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def generate_file(options: GenerateOptions) -> None:
    """Answers every prompt of the file, adding a JSON line to the output as each ends.

    A line holds the prompt's number (`index`), its `id` if it has one, a hash of it, of the model and of the options
    that decide its answer, and what `Answer.record` tells. Those that the output holds already are not made again.
    Raises ValueError, before anything is loaded or written, for a line that is no prompt or cannot be answered, and for
    an output that holds anything else, or answers to other prompts, by another model or by other options.
    """
    assert options.prompts is not None
    if options.output is None:
        raise ValueError("--prompts needs --output FILE for the answers")
    options.request().samples(options.n)
    opened = open_model(options.checkpoint)
    config = opened.config
    tokenizer = opened.tokenizer()
    saved = None if options.load_cache is None else read_saved_cache(options.load_cache)
    before = [] if saved is None else saved.tokens
    prompts = read_prompts(Path(options.prompts), tokenizer, options, config.context_length - len(before))
    output = Path(options.output)
    model = [opened.identity, options.dtype]
    headers = [output_header(number, asked.hash(model, saved), asked) for number, asked in enumerate(prompts)]
    check_writable(output)
    done, _ = read_done(output, headers)
    todo = [number for number in range(len(prompts)) if number not in done]
    if not todo:
        say(f"all {len(prompts)} answers are in {output}")
        return
    longest = max(len(prompts[number].tokens) + prompts[number].requests[0].max_new_tokens for number in todo)
    capacity = min(config.context_length, len(before) + longest)
    rows = min(options.rows, sum(len(prompts[number].requests) for number in todo))
    loaded = load(opened, tokenizer, options, rows=rows, saved=saved)
    scheduler = Scheduler(loaded.engine(rows=rows, capacity=capacity))
    if saved is not None:
        scheduler.release(restore(saved, scheduler))
    active: dict[int, tuple[int, Answer]] = {}
    answers: dict[int, list[Answer]] = {}
    waiting = deque(todo)
    columns = TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    started, tokens = time.perf_counter(), 0
    with (
        _locked_output(output, headers, done) as file,
        Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task("", total=len(todo), rate="")
        while waiting or active:
            # Few at a time, since each holds all of its prompt.
            while waiting and len(active) < 2 * rows:
                number = waiting.popleft()
                asked = prompts[number]
                prompt = before + asked.tokens
                answers[number] = [Answer(tokenizer, one, len(prompt)) for one in asked.requests]
                for answer in answers[number]:
                    submitted = scheduler.submit(prompt, answer.config, end_ids=tokenizer.end_ids)
                    active[submitted] = number, answer
            for event in scheduler.step():
                number, answer = active[event.request]
                ended = answer.finish_reason is not None
                answer.follow(event, scheduler)
                tokens += event.token is not None
                if event.finish_reason is not None:
                    del active[event.request]
                if ended or any(one.finish_reason is None for one in answers[number]):
                    continue
                file.write(json.dumps(headers[number] | joint_record(answers.pop(number))) + "\n")
                file.flush()
                bar.update(task, advance=1, rate=f"{tokens / (time.perf_counter() - started):.1f} tokens/s")


def read_prompts(path: Path, tokenizer: Tokenizer, options: GenerateOptions, room: int) -> list[PromptLine]:
    """What each line of the file asks for; `options` hold where it does not say.

    Raises ValueError naming a line that is no prompt, or one of more than `room` tokens.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a file of JSON lines")
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            asked = _read_prompt(line.decode(), tokenizer, options)
            if not 0 < len(asked.tokens) <= room:
                behind = f" behind {options.load_cache}" if options.load_cache else ""
                raise ValueError(f"it has {len(asked.tokens)} tokens: from 1 to {room} fit{behind}")
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
        prompts.append(asked)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


_FORMS = 'a line is {"prompt": TEXT} or {"messages": [{"role": ROLE, "content": TEXT}, ...]}'
_OWN = (*(one.name for one in dataclasses.fields(AnswerOptions)), "n", "logprobs", "prompt_logprobs")
"""Options that a line may have of its own."""
_KINDS: dict[Any, tuple[str, Callable[[Any], bool], Callable[[Any], Any]]] = {
    int: ("a whole number", lambda value: type(value) is int, int),
    int | None: ("a whole number, or null", lambda value: value is None or type(value) is int, lambda value: value),
    float: ("a number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max, float),
    bool: ("true or false", lambda value: type(value) is bool, bool),
    tuple[str, ...]: (
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
        tuple,
    ),
}
"""For the kinds of those options: how it is called, whether a JSON value is one, and what makes it one."""


def _read_prompt(line: str, tokenizer: Tokenizer, options: GenerateOptions) -> PromptLine:
    try:
        entry: Any = json.loads(line, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON ({error})") from None
    except RecursionError:
        raise ValueError("its lists and objects stand too deep in one another") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError(f"it has not one of prompt and messages: {_FORMS}")
    try:
        json.dumps(entry.get("id"), allow_nan=False)
    except ValueError:
        raise ValueError('its "id" holds a number that JSON cannot write, as NaN is: give it as a text') from None
    own = {name: value for name, value in entry.items() if name not in ("prompt", "messages", "id")}
    options = dataclasses.replace(options, **{name: _own_option(name, value) for name, value in own.items()})
    if options.prompt_logprobs and options.load_cache is not None:
        raise ValueError("prompt_logprobs goes without --load-cache: what it holds is not read again")
    tokens = _encode(entry, tokenizer, options.chat)
    return PromptLine(
        tokens=tokens if options.load_cache is None else tokenizer.without_bos(tokens),
        requests=options.request().samples(options.n),
        name={"id": entry["id"]} if "id" in entry else {},
    )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    for name in entry:
        if (times := sum(one == name for one, _ in pairs)) > 1:
            raise ValueError(f"it says {json.dumps(name):.80} {times} times: say it once")
    return entry


def _own_option(name: str, value: Any) -> Any:
    if name not in _OWN:
        names = '", "'.join(_OWN)
        raise ValueError(f'its "{name}" would change nothing: beside its text it may hold "id", "{names}"')
    message, fits, make = _KINDS[get_type_hints(GenerateOptions)[name]]
    if not fits(value):
        raise ValueError(f'its "{name}" is {json.dumps(value):.80}: it must be {message}')
    return make(value)


def _encode(entry: dict[str, Any], tokenizer: Tokenizer, chat: bool) -> list[int]:
    if "prompt" in entry:
        text = entry["prompt"]
        if not isinstance(text, str) or not text:
            raise ValueError(f"its prompt is {text!r}: {_FORMS}, and a text has at least one character")
        return tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    messages = entry["messages"]
    proper = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    )
    if not messages or not proper:
        raise ValueError(f"its messages are {messages!r:.80}: {_FORMS}")
    return tokenizer.encode_chat(messages)


def output_header(number: int, request_hash: str, asked: PromptLine) -> dict[str, Any]:
    """What a line of the output says of its question, before the answer."""
    return {"index": number, **asked.name, "request_hash": request_hash}


def check_writable(output: Path) -> None:
    """Raises ValueError where `output` is no file that can be made or added to: before anything is loaded."""
    if not output.parent.is_dir():
        raise ValueError(f"{output} cannot be written: {output.parent} is no folder")
    if output.exists() and not output.is_file():
        raise ValueError(f"{output} is no file: choose another --output")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ValueError(f"{output} cannot be written: it is not yours to write to")


def read_done(output: Path, headers: list[dict[str, Any]]) -> tuple[set[int], int]:
    """Numbers of the questions that `output` answers, and the bytes of those answers: a line that was broken off may
    follow. Raises ValueError for a file that holds anything else."""
    if not output.exists():
        return set(), 0
    whole, newline, cut = output.read_bytes().rpartition(b"\n")
    done = set()
    for line in whole.splitlines():
        try:
            entry = json.loads(line)
            number, said = entry["index"], entry["request_hash"]
            if type(number) is not int:
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{output} is not a file of answers: choose another --output") from None
        if not 0 <= number < len(headers) or said != headers[number]["request_hash"]:
            raise ValueError(
                f"{output} answers other prompts, or by another model or other options: choose another --output"
            )
        done.add(number)
    expected = [json.dumps(one).removesuffix("}").encode() for one in headers]
    if cut and not any(cut.startswith(one) or one.startswith(cut) for one in expected):
        raise ValueError(f"{output} is not a file of answers: choose another --output, or end its last line")
    return done, len(whole + newline)


@contextlib.contextmanager
def _locked_output(output: Path, headers: list[dict[str, Any]], done: set[int]) -> Iterator[TextIO]:
    """`output`, to add answers behind those of `done`, while no other process does; what was broken off is removed.

    Raises ValueError where another process does, or did since `done` was read.
    """
    with (
        output.open("a") as file,
        exclusive_lock(output, f"another process writes {output}: wait for it, or choose another --output"),
    ):
        now, length = read_done(output, headers)
        if now != done:
            raise ValueError(f"another process has written {output} meanwhile: the same command goes on from there")
        file.truncate(length)
        yield file
