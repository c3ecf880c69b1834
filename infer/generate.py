"""`treering generate CKPT --prompt TEXT`, and `--prompts FILE` for many."""

import json
import sys
import time

from configs.cli import parse
from configs.infer import GenerateOptions


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(GenerateOptions, arguments, program="treering generate")
    if (options.prompt is None) == (options.prompts is None):
        raise ValueError("give --prompt TEXT, or --prompts FILE")
    check_together(options)
    if options.prompts is not None:
        from infer.prompts import generate_file

        generate_file(options)
        return 0
    generate(options)
    return 0


def check_together(options: GenerateOptions) -> None:
    """Raises ValueError for an option that would have no effect beside the others."""
    if options.prompts is not None:
        if options.json:
            raise ValueError("--json goes with --prompt; answers to --prompts are JSON lines as they are")
        return
    if options.output is not None:
        raise ValueError("--output goes with --prompts; the answer to --prompt goes to standard output")
    if options.rows != GenerateOptions.rows:
        raise ValueError("--rows goes with --prompts; --prompt is answered by itself")
    if options.logprobs is not None and not options.json:
        raise ValueError("--logprobs goes with --json, or with --prompts; a text has no place for them")


def generate(options: GenerateOptions) -> dict[str, object]:
    """Loads, prefills, decodes; streams the text, or prints one JSON object. Returns what that object holds.

    Raises ValueError for options, prompts and checkpoints that do not fit together.
    """
    from infer.answer import Answer
    from infer.load import load, say
    from infer.request import least_program
    from infer.scheduler import Scheduler
    from models.load import open_model

    request = options.request()
    opened = open_model(options.checkpoint)
    config = opened.config
    tokenizer = opened.tokenizer()
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text:
        raise ValueError("the prompt is empty: give at least one character to continue from")
    prompt = tokenizer.encode_chat([{"role": "user", "content": text}]) if options.chat else tokenizer.encode(text)
    if len(prompt) > config.context_length:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and the model's context holds {config.context_length}: shorten it"
        )
    loaded = load(opened, tokenizer, options)
    capacity = min(config.context_length, len(prompt) + request.max_new_tokens)
    engine = loaded.engine(rows=1, capacity=capacity)
    started = time.perf_counter()
    engine.compile(len(prompt), *least_program([request]))
    scheduler = Scheduler(engine)
    say(f"prompt {len(prompt)} tokens; compiled in {time.perf_counter() - started:.1f} s")

    answer = Answer(tokenizer, request, len(prompt))
    scheduler.submit(prompt, request, end_ids=tokenizer.end_ids, streamed=not options.json)
    for event in scheduler.run():
        piece = answer.follow(event, scheduler)
        if not options.json:
            print(piece, end="", flush=True)
    result = {
        **answer.record(),
        "prefill_seconds": answer.prefill_seconds,
        "decode_tokens_per_second": answer.tokens_per_second,
        "cache_bytes_per_device": engine.cache_bytes_per_device(),
    }
    print(json.dumps(result) if options.json else "", flush=True)
    say(
        f"prefill {answer.prefill_seconds:.2f} s; {len(answer.tokens)} tokens at {answer.tokens_per_second:.1f} "
        f"tokens/s; {answer.finish_reason}"
    )
    return result
