"""`treering generate CKPT --prompt TEXT`, and `--prompts FILE` for many."""

import json
import sys
import time

from treering.configs.cli import parse
from treering.configs.infer import GenerateOptions
from treering.configs.sampling import RequestConfig


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(GenerateOptions, arguments, program="treering generate")
    if (options.prompt is None) == (options.prompts is None):
        raise ValueError("give --prompt TEXT or --prompts FILE, one of the two")
    if options.rows < 1:
        raise ValueError(f"rows {options.rows}: at least 1 answer is made at a time")
    check_together(options)
    if options.prompts is not None:
        from treering.infer.prompts import generate_file

        generate_file(options)
        return 0
    generate(options)
    return 0


def check_together(options: GenerateOptions) -> None:
    """Raises ValueError for an option that would have no effect beside the others."""
    caches = options.save_cache is not None or options.load_cache is not None
    if options.prompts is not None:
        if options.save_cache is not None:
            raise ValueError("--save-cache goes with --prompt, not with --prompts")
        if options.prompt_logprobs and caches:
            raise ValueError("--prompt-logprobs goes without --load-cache: what it holds is not read again")
        if options.json:
            raise ValueError("--json goes with --prompt; answers to --prompts are JSON lines as they are")
        return
    if options.output is not None:
        raise ValueError("--output goes with --prompts; the answer to --prompt goes to standard output")
    if options.rows != GenerateOptions.rows and options.n == 1:
        raise ValueError("--rows goes with --prompts, or with --n; one answer is made by itself")
    if options.prompt_logprobs and caches:
        raise ValueError("--prompt-logprobs goes without --save-cache and --load-cache")
    for name, asked in (("--n", options.n > 1), ("--prompt-logprobs", options.prompt_logprobs)):
        if asked and not options.json:
            raise ValueError(f"{name} goes with --json")
    if options.logprobs is not None and not options.json:
        raise ValueError("--logprobs goes with --json, or with --prompts; a text has no place for them")


def generate(options: GenerateOptions) -> dict[str, object]:
    """Loads, prefills, decodes; streams the text, or prints one JSON object. Returns what that object holds.

    Raises ValueError for options, prompts and checkpoints that do not fit together.
    """
    import jax
    import numpy as np

    from treering.infer.answer import Answer, joint_record
    from treering.infer.load import keep, load, restore, say
    from treering.infer.request import Session, least_program
    from treering.infer.saved_cache import check_new_folder, check_room, read_saved_cache
    from treering.infer.scheduler import Scheduler
    from treering.models.conversion.load import open_model

    request = options.request()
    requests = request.samples(options.n)
    saved = None if options.load_cache is None else read_saved_cache(options.load_cache)
    if options.save_cache is not None:
        check_new_folder(options.save_cache)
    opened = open_model(options.checkpoint)
    config = opened.config
    tokenizer = opened.tokenizer()
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text:
        raise ValueError("the prompt is empty: give at least one character to continue from")
    prompt = tokenizer.encode_chat([{"role": "user", "content": text}]) if options.chat else tokenizer.encode(text)
    held = 0 if saved is None else len(saved.tokens)
    if saved is not None:
        prompt = saved.tokens + tokenizer.without_bos(prompt)
    if len(prompt) > config.context_length:
        message = f", {held} of them in {options.load_cache}," if held else ""
        raise ValueError(
            f"the prompt has {len(prompt)} tokens{message} and the model's context holds {config.context_length}: "
            "shorten it"
        )
    rows = min(options.n, options.rows)
    loaded = load(opened, tokenizer, options, rows=rows, saved=saved, fingerprinted=options.save_cache is not None)
    if options.save_cache is not None:
        itemsize = np.dtype(loaded.precision.cache).itemsize
        check_room(options.save_cache, len(prompt) * config.kv_bytes_per_token(itemsize))
    capacity = min(config.context_length, len(prompt) + request.max_new_tokens)
    engine = loaded.engine(rows=rows, capacity=capacity)
    started = time.perf_counter()
    scored = request.logprobs or 0 if request.prompt_logprobs else None
    known = held
    if options.save_cache is not None:
        engine.compile(len(prompt), *least_program([request]), held=held)
        known = len(prompt) - 1
    if options.n > 1:
        known = known // engine.page_tokens * engine.page_tokens
    engine.compile(len(prompt), *least_program([request]), held=known, scored=scored)
    scheduler = Scheduler(engine)
    say(f"prompt {len(prompt)} tokens; compiled in {time.perf_counter() - started:.1f} s")
    session = None if saved is None else restore(saved, scheduler)

    answers = [Answer(tokenizer, one, len(prompt)) for one in requests]
    if options.save_cache is not None:
        # Read by a request of its own, so that it is on disk before the answer begins.
        session, started = session or Session(), time.perf_counter()
        scheduler.submit(prompt, RequestConfig(max_new_tokens=0), session=session)
        list(scheduler.run())
        jax.block_until_ready(scheduler.state)
        say(f"{len(prompt) - held} tokens read in {time.perf_counter() - started:.2f} s")
        started = time.perf_counter()
        keep(options.save_cache, scheduler, session, loaded.identity)
        answers[0].started += time.perf_counter() - started  # What is told of the answer's times is without it.
    if session is not None and options.n > 1:
        scheduler.release(session)  # One answer goes on in its row; several share its full pages.
        session = None
    asked = {"end_ids": tokenizer.end_ids, "streamed": not options.json, "session": session}
    active = {scheduler.submit(prompt, one.config, **asked): one for one in answers}
    for event in scheduler.run():
        piece = active[event.request].follow(event, scheduler)
        if not options.json:
            print(piece, end="", flush=True)
    rate = sum(answer.tokens_per_second for answer in answers)
    result = {
        **joint_record(answers),
        "prefill_seconds": answers[0].prefill_seconds,
        "decode_tokens_per_second": rate,
        "cache_bytes_per_device": engine.cache_bytes_per_device(),
    }
    print(json.dumps(result) if options.json else "", flush=True)
    count = sum(len(answer.tokens) for answer in answers)
    reasons = ", ".join(answer.finish_reason or "" for answer in answers)
    say(f"prefill {answers[0].prefill_seconds:.2f} s; {count} tokens at {rate:.1f} tokens/s; {reasons}")
    return result
