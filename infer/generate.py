"""`treering generate CKPT --prompt TEXT`."""

import json
import sys
import time

from configs.cli import parse
from configs.infer import GenerateOptions
from configs.precision import Precision


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(GenerateOptions, arguments, program="treering generate")
    generate(options)
    return 0


def generate(options: GenerateOptions) -> dict[str, object]:
    """Loads, prefills, decodes; streams the text, or prints one JSON object. Returns what that object holds.

    Raises ValueError for options, prompts and checkpoints that do not fit together.
    """
    import jax

    from infer.engine import Engine
    from infer.scheduler import Scheduler
    from infer.text import TextStream
    from layers.devices import describe, plan_for, simulate_cpu_devices
    from models.checkpoint import load_model, read_config
    from models.tokenizer import Tokenizer
    from models.transformer import check_mesh

    request = options.request()
    config = read_config(options.checkpoint)
    tokenizer = Tokenizer.load(options.checkpoint)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text:
        raise ValueError("the prompt is empty: give at least one character to continue from")
    prompt = tokenizer.encode_chat([{"role": "user", "content": text}]) if options.chat else tokenizer.encode(text)
    if len(prompt) > config.context_length:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and the model's context holds {config.context_length}: shorten it"
        )
    if options.cpu_devices is not None:
        simulate_cpu_devices(options.cpu_devices)
    plan = plan_for(options.mesh, "decode", fill="context")
    check_mesh(config, plan)
    on_cpu = jax.default_backend() == "cpu"
    dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    precision = Precision(params=dtype, compute=dtype, cache=dtype)

    def say(*words: object) -> None:
        print(*words, file=sys.stderr, flush=True)

    say("mesh", describe(plan))
    started = time.perf_counter()
    model = load_model(options.checkpoint, plan, dtype)
    if options.layers == "unrolled" or (options.layers == "auto" and on_cpu and plan.mesh.size == 1):
        model = model.unrolled()
    say(f"weights loaded in {time.perf_counter() - started:.1f} s, {dtype}")
    capacity = min(config.context_length, len(prompt) + options.max_new_tokens)
    engine = Engine(model, plan, precision, batch=plan.size("data", "fsdp"), capacity=capacity)
    cache_bytes = engine.cache_bytes_per_device()
    say(f"cache {cache_bytes:,} bytes a device, for {capacity} tokens; prompt {len(prompt)} tokens")
    started = time.perf_counter()
    sampling = request.sampling
    kind = "full" if not sampling.is_plain else "temperature" if sampling.temperature else "greedy"
    engine.compile(len(prompt), kind, request.logprobs)
    scheduler = Scheduler(engine)
    say(f"compiled in {time.perf_counter() - started:.1f} s")

    stream, pieces, tokens, logprobs, reason = TextStream(tokenizer.stream(), request.stop), [], [], [], "length"

    def emit(piece: str) -> None:
        pieces.append(piece)
        if not options.json:
            print(piece, end="", flush=True)

    started = first = last = time.perf_counter()
    number = scheduler.submit(prompt, request, end_ids=tokenizer.end_ids, streamed=not options.json)
    for event in scheduler.run():
        if event.token is not None and not stream.stopped:
            last = time.perf_counter()
            if not tokens:
                first = last
            tokens.append(event.token)
            logprobs.append(event.logprob)
            if event.finish_reason != "stop":
                emit(stream.push(event.token))
        if stream.stopped:
            scheduler.cancel(number)
            reason = "stop"
        elif event.finish_reason is not None:
            reason = event.finish_reason
    emit(stream.finish())
    decode_rate = (len(tokens) - 1) / (last - first) if len(tokens) > 1 else 0.0
    result = {
        "text": "".join(pieces),
        "tokens": tokens,
        "prompt_tokens": len(prompt),
        "finish_reason": reason,
        "prefill_seconds": first - started,
        "decode_tokens_per_second": decode_rate,
        "cache_bytes_per_device": cache_bytes,
    }
    if request.logprobs is not None:
        result["logprobs"] = [{"logprob": one.logprob, "top": one.top} for one in logprobs]
    print(json.dumps(result) if options.json else "", flush=True)
    say(f"prefill {first - started:.2f} s; {len(tokens)} tokens at {decode_rate:.1f} tokens/s; {reason}")
    return result
