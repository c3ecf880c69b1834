"""`treering generate CKPT --prompts FILE --output FILE`: many prompts in a running batch, resumable."""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, get_type_hints

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from treering.configs.cli import from_json
from treering.configs.errors import UserError
from treering.configs.infer import AnswerOptions, GenerateOptions
from treering.configs.sampling import RequestConfig
from treering.infer.load import load
from treering.infer.saved_cache.record import SavedCache, read_saved_cache
from treering.infer.text.answer import Answer, joint_record
from treering.infer.text.generator import TextGenerator
from treering.infer.text.progress import count, say
from treering.models.checkpoint.atomic_folder import exclusive_lock
from treering.models.conversion.load import open_model
from treering.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """What one line of a file of prompts asks for."""

    tokens: list[int]
    """Behind those of a saved cache, where there is one."""
    requests: list[RequestConfig]
    """One per answer."""
    name: dict[str, Any]
    """The `id` that the line gives itself, any JSON value, if it does; its answer has the same."""

    def hash(self, model: list[Any], saved: SavedCache | None) -> str:
        """Identifies the prompt, its options, and the model by what JSON distinguishes it by from others."""
        before = None if saved is None else saved.fingerprint
        asked = [model, before, self.tokens, [dataclasses.asdict(one) for one in self.requests], self.name]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def generate_file(options: GenerateOptions) -> None:
    """Answers every prompt of the file, adding a JSON line to the output as each ends.

    A line holds the prompt's number (`index`), its `id` if it has one, a hash of it, of the model and of the options
    that decide its answer, and what `Answer.record` reports. Prompts that the output answers already are skipped.
    Raises ValueError, before anything is loaded or written, for a line that is not a prompt or cannot be answered, and
    for an output that holds anything else, or answers to other prompts, by another model or by other options.
    """
    assert options.prompts is not None and options.output is not None
    options.request().samples(options.n)
    opened = open_model(options.checkpoint)
    tokenizer, context = opened.tokenizer(), opened.config.context_length
    saved = None if options.load_cache is None else read_saved_cache(options.load_cache)
    before = [] if saved is None else saved.tokens
    prompts = read_prompts(Path(options.prompts), tokenizer, options, context - len(before))
    output, model = Path(options.output), [opened.identity, options.dtype]
    headers = [output_header(number, asked.hash(model, saved), asked) for number, asked in enumerate(prompts)]
    check_writable(output)
    done, _ = read_done(output, headers)
    todo = [number for number in range(len(prompts)) if number not in done]
    if not todo:
        say(f"{output} answers {'the prompt' if len(prompts) == 1 else f'all {len(prompts)} prompts'} already")
        return
    longest = max(len(prompts[number].tokens) + prompts[number].requests[0].max_new_tokens for number in todo)
    rows = min(options.rows, sum(len(prompts[number].requests) for number in todo))
    loaded = load(opened, tokenizer, options, rows=rows, saved=saved)
    generator = TextGenerator(loaded, loaded.engine(rows=rows, capacity=min(context, len(before) + longest)))
    if saved is not None:
        generator.scheduler.release(generator.restore(saved))
    with _locked_output(output, headers, done) as file:
        for number, answers in _answers(generator, before, {number: prompts[number] for number in todo}):
            file.write(json.dumps(headers[number] | joint_record(answers)) + "\n")
            file.flush()


def _answers(
    generator: TextGenerator, before: list[int], prompts: dict[int, PromptLine]
) -> Iterator[tuple[int, list[Answer]]]:
    """The answers to each prompt behind the tokens `before`, by its number, in the order in which they end."""
    scheduler, tokenizer = generator.scheduler, generator.tokenizer
    active: dict[int, tuple[int, Answer]] = {}
    answers: dict[int, list[Answer]] = {}
    waiting = deque(prompts)
    columns = TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    started, tokens = time.perf_counter(), 0
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(prompts), rate="")
        while waiting or active:
            # Few at a time, since each holds all of its prompt.
            while waiting and len(active) < 2 * generator.engine.batch:
                number = waiting.popleft()
                prompt = before + prompts[number].tokens
                answers[number] = [Answer(tokenizer, one, len(prompt)) for one in prompts[number].requests]
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
                yield number, answers.pop(number)
                bar.update(task, advance=1, rate=f"{tokens / (time.perf_counter() - started):.1f} tokens/s")


def read_prompts(path: Path, tokenizer: Tokenizer, options: GenerateOptions, room: int) -> list[PromptLine]:
    """What each line of the file asks for; `options` hold where it does not say.

    Raises UserError with the line's number for one that is not a prompt, or has more than `room` tokens.
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
                raise ValueError(f"the prompt has {count(len(asked.tokens), 'token')}: from 1 to {room} fit{behind}")
        except UserError as error:
            # A value as the line has it.
            shown = {"value": f"{json.dumps(error.value):.80}"} if error.has_value else {}
            place = {"file": path, "line": number}
            raise UserError(error.rule, field=error.field, works=error.works, **shown, **place) from None
        except ValueError as error:
            raise UserError(str(error), file=path, line=number) from None
        prompts.append(asked)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


_FORMS = 'a line is {"prompt": TEXT} or {"messages": [{"role": ROLE, "content": TEXT}, ...]}'
_OWN = (*(one.name for one in dataclasses.fields(AnswerOptions)), "n", "logprobs", "prompt_logprobs")
"""Options that a line may have of its own."""


def _read_prompt(line: str, tokenizer: Tokenizer, options: GenerateOptions) -> PromptLine:
    try:
        entry: Any = json.loads(line, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError(f"it must have either prompt or messages: {_FORMS}")
    try:
        json.dumps(entry.get("id"), allow_nan=False)
    except ValueError:
        raise UserError("JSON has no NaN and no infinity: give it as a string", field="id") from None
    own = {name: value for name, value in entry.items() if name not in ("prompt", "messages", "id")}
    options = dataclasses.replace(options, **{name: _own_option(name, value) for name, value in own.items()})
    if options.prompt_logprobs and options.load_cache is not None:
        raise UserError("it cannot be used with --load-cache, whose text is not read again", field="prompt_logprobs")
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
            raise UserError(f"it is given {times} times", field=name)
    return entry


def _own_option(name: str, value: Any) -> Any:
    if name not in _OWN:
        raise UserError("it would have no effect", field=name, works=("id", *_OWN))
    try:
        return from_json(value, get_type_hints(GenerateOptions)[name])
    except UserError as error:
        raise UserError(error.rule, field=name, value=value) from None


def _encode(entry: dict[str, Any], tokenizer: Tokenizer, chat: bool) -> list[int]:
    if "prompt" in entry:
        text = entry["prompt"]
        if not isinstance(text, str) or not text:
            raise UserError(f"it must be a string of at least one character: {_FORMS}", field="prompt", value=text)
        return tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    messages = entry["messages"]
    proper = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    )
    if not messages or not proper:
        raise UserError(f"it must be a list of at least one message: {_FORMS}", field="messages", value=messages)
    return tokenizer.encode_chat(messages)


def output_header(number: int, request_hash: str, asked: PromptLine) -> dict[str, Any]:
    """What a line of the output says of its prompt, before the answer."""
    return {"index": number, **asked.name, "request_hash": request_hash}


def check_writable(output: Path) -> None:
    """Raises ValueError where `output` cannot be created or appended to: before anything is loaded."""
    if not output.parent.is_dir():
        raise ValueError(f"{output} cannot be written: {output.parent} is not a folder")
    if output.exists() and not output.is_file():
        raise ValueError(f"{output} is not a file: choose another --output")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ValueError(f"{output} cannot be written: you have no permission")


def read_done(output: Path, headers: list[dict[str, Any]]) -> tuple[set[int], int]:
    """Numbers of the prompts that `output` answers, and the bytes of those answers: an incomplete line may follow.
    Raises ValueError for a file that holds anything else."""
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
    """`output`, to append answers to those of `done`, while no other process does; an incomplete last line is removed.

    Raises ValueError where another process does, or did since `done` was read.
    """
    with (
        output.open("a") as file,
        exclusive_lock(output, f"another process is writing {output}: wait for it, or choose another --output"),
    ):
        now, length = read_done(output, headers)
        if now != done:
            raise ValueError(
                f"another process has written to {output} meanwhile: the same command continues from there"
            )
        file.truncate(length)
        yield file
