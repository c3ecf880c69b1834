"""`treering generate CKPT --prompt TEXT`, and `--prompts FILE` for many."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treering.configs.cli import parse
from treering.configs.errors import UserError
from treering.configs.infer import GenerateOptions

if TYPE_CHECKING:
    from treering.infer.engine import Engine
    from treering.infer.saved_cache.record import SavedCache
    from treering.infer.text.answer import Answer
    from treering.infer.text.generator import TextGenerator
    from treering.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reading:
    """What was read of a prompt before it was answered, and how long it took."""

    tokens: int
    seconds: float


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(GenerateOptions, arguments, program="treering generate")
    check_together(options)
    if options.prompts is not None:
        from treering.infer.text.prompts import generate_file

        generate_file(options)
        return 0
    generate(options)
    return 0


def check_together(options: GenerateOptions) -> None:
    """Raises ValueError for options that are missing, or would have no effect with the others."""
    one, many, several = options.prompt is not None, options.prompts is not None, options.n > 1
    caches = options.save_cache is not None or options.load_cache is not None
    if one == many:
        raise ValueError("give --prompt TEXT or --prompts FILE, and not both")
    if options.rows < 1:
        raise UserError("it must be at least 1", field="rows", value=options.rows)
    refused = (
        (many and options.save_cache is not None, "--save-cache requires --prompt"),
        (many and options.json, "--json requires --prompt: answers to --prompts are always JSON lines"),
        (many and options.output is None, "--prompts requires --output FILE for the answers"),
        (one and options.output is not None, "--output requires --prompts: the answer to --prompt is printed"),
        (one and not several and options.rows != GenerateOptions.rows, "--rows requires --prompts, or --n above 1"),
        (
            options.prompt_logprobs and caches,
            "--prompt-logprobs cannot be used with --save-cache or --load-cache: what a cache holds is not read again",
        ),
        (one and several and not options.json, "--n above 1 requires --json"),
        (one and options.prompt_logprobs and not options.json, "--prompt-logprobs requires --json"),
        (one and options.logprobs is not None and not options.json, "--logprobs requires --json or --prompts"),
    )
    for wrong, message in refused:
        if wrong:
            raise ValueError(message)


def generate(options: GenerateOptions) -> dict[str, object]:
    """Loads, reads the prompt, and answers it; streams the text, or prints one JSON object. Returns what it holds.

    Raises ValueError for options, prompts and checkpoints that do not fit together.
    """
    from treering.infer.saved_cache.record import read_saved_cache
    from treering.infer.text.answer import Answer

    requests = options.request().samples(options.n)
    saved = None if options.load_cache is None else read_saved_cache(options.load_cache)
    generator, prompt = prepare(options, saved)
    session = None if saved is None else generator.restore(saved)
    reading = None
    if options.save_cache is not None:
        held, started = len(session.tokens) if session else 0, time.perf_counter()
        session = generator.read(prompt, session)
        reading = Reading(len(prompt) - held, time.perf_counter() - started)
        generator.save(options.save_cache, session)
    if session is not None and (options.n > 1 or generator.engine.capacity == len(prompt)):
        # One answer continues in the session's row; several share its full pages, and where none fits nothing is read.
        generator.scheduler.release(session)
        session = None
    started = time.perf_counter() - (reading.seconds if reading else 0)
    answers = [Answer(generator.tokenizer, one, len(prompt), started=started) for one in requests]
    for piece in generator.answer(prompt, answers, streamed=not options.json, session=session):
        if not options.json:
            print(piece, end="", flush=True)
    return report(options, answers, generator.engine, reading)


def prepare(options: GenerateOptions, saved: "SavedCache | None") -> "tuple[TextGenerator, list[int]]":
    """The model, ready to answer, and the prompt's tokens; what does not fit is refused before weights are loaded."""
    from treering.infer.load import load
    from treering.infer.saved_cache.folder import check_new_folder, check_room
    from treering.infer.text.generator import TextGenerator
    from treering.models.conversion.load import open_model

    if options.save_cache is not None:
        check_new_folder(options.save_cache)
    opened = open_model(options.checkpoint)
    tokenizer, context = opened.tokenizer(), opened.config.context_length
    prompt = encode_prompt(options, tokenizer, saved, context)
    rows = min(options.n, options.rows)
    loaded = load(opened, tokenizer, options, rows=rows, saved=saved, fingerprinted=options.save_cache is not None)
    if options.save_cache is not None:
        check_room(options.save_cache, loaded.cache_bytes(len(prompt)))
    engine = loaded.engine(rows=rows, capacity=min(context, len(prompt) + options.max_new_tokens))
    compile_ahead(engine, options, len(prompt), held=0 if saved is None else len(saved.tokens))
    return TextGenerator(loaded, engine), prompt


def encode_prompt(
    options: GenerateOptions, tokenizer: "Tokenizer", saved: "SavedCache | None", context: int
) -> list[int]:
    """The prompt's tokens, after those of a saved cache; raises ValueError where there is none, or they do not fit."""
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text:
        raise ValueError("the prompt is empty: give at least one character to continue from")
    prompt = tokenizer.encode_chat([{"role": "user", "content": text}]) if options.chat else tokenizer.encode(text)
    among = ""
    if saved is not None:
        prompt = saved.tokens + tokenizer.without_bos(prompt)
        among = f", {len(saved.tokens)} of them in {saved.folder},"
    if len(prompt) > context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens{among} and the model's context holds {context}: shorten it"
        )
    return prompt


def compile_ahead(engine: "Engine", options: GenerateOptions, prompt_tokens: int, *, held: int) -> None:
    """Compiles what reading and answering the prompt run, where the cache holds the first `held` tokens of it; says how
    long it took."""
    from treering.infer.request import least_program
    from treering.infer.text.progress import count, say

    started = time.perf_counter()
    kind, top = least_program([options.request()])
    if options.save_cache is not None:
        # Read by a request of its own; the one that answers reads the last token again.
        engine.compile(prompt_tokens, kind, top, held=held)
        held = prompt_tokens - 1
    if options.n > 1:
        # Several answers share full pages only.
        held = held // engine.page_tokens * engine.page_tokens
    scored = options.logprobs or 0 if options.prompt_logprobs else None
    engine.compile(prompt_tokens, kind, top, held=held, scored=scored)
    say(f"prompt {count(prompt_tokens, 'token')}; compiled in {time.perf_counter() - started:.1f} s")


def report(
    options: GenerateOptions, answers: "Sequence[Answer]", engine: "Engine", reading: "Reading | None"
) -> dict[str, object]:
    """Ends the text, or prints the JSON object, and says how fast it was; returns the object."""
    from treering.infer.text.answer import joint_record
    from treering.infer.text.progress import count, say

    rate, new_tokens = sum(one.tokens_per_second for one in answers), sum(len(one.tokens) for one in answers)
    prefill = answers[0].prefill_seconds if new_tokens or reading is None else reading.seconds
    result = {
        **joint_record(answers),
        "prefill_seconds": prefill,
        "decode_tokens_per_second": rate,
        "cache_bytes_per_device": engine.cache_bytes_per_device(),
    }
    if options.json:
        print(json.dumps(result), flush=True)
    elif new_tokens:
        print(flush=True)
    if new_tokens:
        made = count(new_tokens, "token") + (f" at {rate:.1f} tokens/s" if rate else "")
        say(f"prefill {prefill:.2f} s; {made}; {', '.join(one.finish_reason or '' for one in answers)}")
    else:
        done = "prompt not read" if reading is None else f"{count(reading.tokens, 'token')} read in {prefill:.2f} s"
        why = "the prompt fills the model's context" if options.max_new_tokens else "--max-new-tokens is 0"
        say(f"{done}; nothing generated: {why}")
    return result
