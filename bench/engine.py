"""The engine under load: `python -m bench.engine CHECKPOINT`.

One CPU device, float32. Tokens per second of eight requests together and of one alone, after all prompts are read; time
to the first token of a 4k prompt, ours and that of transformers; the 95th percentile of the time between tokens of a
running request while a 4k prompt is read, compared with a mean chunk of that prompt alone; the host's time per decode
step outside its program. Writes bench/results/engine.md.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import numpy as np

from bench.decode import transformers_model
from bench.report import publish, table, versions
from treering.configs.mesh import MeshConfig
from treering.configs.precision import Precision
from treering.configs.sampling import RequestConfig
from treering.infer.engine import Engine
from treering.infer.scheduler import Scheduler
from treering.layers.parallel.devices import plan_for
from treering.models.checkpoint.model import load_model

NEW_TOKENS = 64
LONG = 4096


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens: the time does not depend on which."""
    return np.random.default_rng(seed).integers(100, 40000, length).tolist()


def throughput(engine: Engine, requests: int, length: int) -> float:
    """Tokens per second of `requests` together: after all prompts are read, and before the first answer ends."""
    scheduler = Scheduler(engine)
    for seed in range(requests):
        scheduler.submit(prompt(length, seed), RequestConfig(max_new_tokens=NEW_TOKENS))
    begun: set[int] = set()
    tokens, started, ended = 0, 0.0, 0.0
    while not ended:
        events = scheduler.step()
        now = time.perf_counter()
        if started:
            tokens += sum(event.token is not None for event in events)
        begun |= {event.request for event in events}
        if any(event.finish_reason for event in events):
            ended = now
        elif len(begun) == requests and not started:
            started = now
    list(scheduler.run())
    return tokens / (ended - started)


def first_token(engine: Engine, length: int) -> float:
    """Seconds from a prompt's submission to its first token."""
    scheduler = Scheduler(engine)
    scheduler.submit(prompt(length), RequestConfig(max_new_tokens=2), streamed=True)
    started = time.perf_counter()
    while not scheduler.step():
        pass
    return time.perf_counter() - started


def waits(engine: Engine, *, beside: bool) -> list[float]:
    """Seconds between tokens of one streamed request, while a long prompt is read at the same time or not."""
    scheduler = Scheduler(engine)
    own = scheduler.submit(prompt(256), RequestConfig(max_new_tokens=40), streamed=True)
    times: list[float] = []
    submitted = not beside
    for event in scheduler.run():
        if event.request == own:
            times.append(time.perf_counter())
        if len(times) == 4 and not submitted:
            scheduler.submit(prompt(LONG, 1), RequestConfig(max_new_tokens=2))
            submitted = True
    return list(np.diff(times[4:]))


def host(engine: Engine) -> tuple[float, float]:
    """Seconds of one step of a streamed request outside its program, and to launch a program that does nothing."""
    scheduler = Scheduler(engine)
    scheduler.submit(prompt(16), RequestConfig(max_new_tokens=120), streamed=True)
    for _ in range(20):
        scheduler.step()
    program: Any = engine.decode_program()
    inside, outside, launches = [], [], []
    compiled = program.compiled

    def timed(*arguments):
        started = time.perf_counter()
        results = jax.block_until_ready(compiled(*arguments))
        inside.append(time.perf_counter() - started)
        return results

    program.compiled = timed
    for _ in range(80):
        started = time.perf_counter()
        scheduler.step()
        outside.append(time.perf_counter() - started - inside[-1])
    none = engine.put(np.int32(0))
    for _ in range(80):
        scheduler.state, _ = program(engine.model, scheduler.state, none)
        launches.append(inside[-1])
    program.compiled = compiled
    return statistics.median(outside), statistics.median(launches)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine")
    parser.add_argument("checkpoint", help="as `treering convert` writes it")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    import torch
    import transformers

    torch.set_num_threads(2)
    plan = plan_for(MeshConfig(), "decode", fill="context")
    model = load_model(arguments.checkpoint, plan, "float32")
    oracle = transformers_model(model, "sdpa")
    single, eight, two = (
        Engine(model.unrolled(rows=rows), plan, Precision(), batch=rows, capacity=capacity)
        for rows, capacity in ((1, LONG + 256), (8, 1024), (2, LONG + 256))
    )

    def theirs() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            oracle(input_ids=torch.tensor([prompt(LONG)]), use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return time.perf_counter() - started

    rounds = [
        (
            throughput(single, 1, 256),
            throughput(eight, 8, 256),
            first_token(single, LONG),
            theirs(),
            float(np.median(waits(two, beside=False))),
            float(np.percentile(waits(two, beside=True), 95)),
            *host(single),
        )
        for _ in range(arguments.rounds + 1)
    ][1:]
    one, together, own, other, idle, busy, outside, launch = (
        statistics.median(column) for column in zip(*rounds, strict=True)
    )
    chunk = own / (LONG / 256)
    figures = {
        "eight_over_one": together / one,
        "first_token_over_transformers": own / other,
        "p95_over_twice_idle_plus_a_chunk": busy / (2 * idle + chunk),
        "host_ms_a_step": 1e3 * outside,
        "launch_ms": 1e3 * launch,
    }
    publish(
        "engine",
        [
            "# The engine under load",
            "",
            f"{model.config.family}, {model.config.layers} layers, embed {model.config.embed}, float32, one CPU device"
            f"; medians of {arguments.rounds} rounds. {versions()}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}.",
            "",
            *table(
                ["what", "ours", "compared with", "ratio"],
                [
                    ["8 requests together, tokens/s", f"{together:.1f}", f"{one:.1f} alone", f"{together / one:.2f}x"],
                    [
                        f"first token of {LONG} tokens, s",
                        f"{own:.2f}",
                        f"{other:.2f} transformers",
                        f"{own / other:.2f}x",
                    ],
                    [
                        "95th percentile between tokens while a long prompt is read, s",
                        f"{busy:.3f}",
                        f"{2 * idle + chunk:.3f} twice idle plus a chunk",
                        f"{busy / (2 * idle + chunk):.2f}x",
                    ],
                    [
                        "host time of a decode step outside its program, ms",
                        f"{1e3 * outside:.2f}",
                        f"{1e3 * launch:.2f} to launch an empty program",
                        "",
                    ],
                ],
            ),
        ],
        figures,
    )


if __name__ == "__main__":
    main()
