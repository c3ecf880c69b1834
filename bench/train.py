"""Training speed compared with transformers: `python -m bench.train [--tokens 1024 4096] [--rounds 10] [--threads 2]`.

One device, float32, AdamW with clipping, one row of one document, the same tiny Llama; the same number of threads, in
turn in one process. transformers runs with sdpa and with eager attention and keeps all activations; ours runs with each
remat. The speedup is that of our default, attention, over the faster of theirs. Prints a table and writes it to
bench/results/train.md.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REMATS = ("attention", "none", "full")
ATTENTIONS = ("sdpa", "eager")


def ours(model_config, remat: Any, tokens: int) -> Callable[[], None]:
    """A step of ours, ready to run."""
    import jax
    import numpy as np

    from treering.configs.mesh import MeshConfig
    from treering.configs.precision import Precision
    from treering.configs.train import OptimizerConfig, StepConfig
    from treering.layers.parallel.devices import plan_for
    from treering.models.families.registry import families
    from treering.train.data.batch import Batch, shard_batch
    from treering.train.step import init_state, step_program

    plan = plan_for(MeshConfig(), "train", fill="fsdp")
    model = plan.init(lambda: families()["llama"].init(model_config, jax.random.key(0)), "parameters")
    optimizer, step = OptimizerConfig(), StepConfig(precision=Precision(), remat=remat)
    state = init_state(model, optimizer, plan)
    program = step_program(state, step, optimizer, plan, steps=10_000, batch=1, seq=tokens)
    ids = np.random.default_rng(0).integers(0, model_config.vocab, (1, tokens + 1)).astype(np.int32)
    ones = np.ones((1, tokens), np.int32)
    batch = shard_batch(Batch(ids[:, :-1], ids[:, 1:], np.arange(tokens, dtype=np.int32)[None], ones), plan)

    def run() -> None:
        nonlocal state
        state, metrics = program(None, state, batch)
        float(metrics.loss)

    return run


def theirs(model_config, attention: str, tokens: int) -> Callable[[], None]:
    """A step of a torch loop around transformers, ready to run."""
    import numpy as np
    import torch
    import transformers

    from treering.models.families.registry import families

    fields = families()["llama"].to_hf(model_config)
    del fields["architectures"], fields["model_type"]
    config = transformers.LlamaConfig(**fields)
    config._attn_implementation = attention
    model = transformers.LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    ids = torch.tensor(np.random.default_rng(0).integers(0, model_config.vocab, (1, tokens)))

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return run


def seconds(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds of wall time, and of CPU time of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2, help="for both; bind the process to the same number of cores")
    arguments = parser.parse_args()
    threads = arguments.threads

    os.environ.setdefault("XLA_FLAGS", f"--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads={threads}")
    import jax
    import torch
    import transformers

    from treering.configs.recipes import TINY_TEXT_MODEL as model

    torch.set_num_threads(threads)
    lines = [
        f"One training step: {model.family}, {model.layers} layers, embed {model.embed}, {model.heads} heads of "
        f"{model.head_dim} and {model.kv_heads} key heads, mlp {model.mlp}, vocab {model.vocab}; 1 row, float32, "
        f"AdamW, clipped; 1 CPU device ({processor()}), {threads} threads; Python {platform.python_version()}, jax "
        f"{jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}; medians of "
        f"{arguments.rounds} rounds in turn; compiling is not included.",
        "",
        "| tokens | ours ms: remat attention | none | full | transformers sdpa | eager | speedup over the faster |",
        "|---|---|---|---|---|---|---|",
    ]
    found = []
    for tokens in arguments.tokens:
        runs = [ours(model, remat, tokens) for remat in REMATS]
        runs += [theirs(model, attention, tokens) for attention in ATTENTIONS]
        for run in runs * 2:
            run()
        rounds = [[seconds(run) for run in runs] for _ in range(arguments.rounds)]
        for kind, clock in enumerate(("passed", "CPU time")):
            times = [[pair[kind] for pair in row] for row in rounds]
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            ratio = statistics.median(min(row[len(REMATS) :]) / row[0] for row in times)
            cells = " | ".join(f"{x * 1e3:.0f}" for x in medians)
            lines.append(f"| {tokens}, {clock} | {cells} | {ratio:.2f}x |")
            names = dict(zip(REMATS + ATTENTIONS, medians, strict=True))
            found.append({"tokens": tokens, "clock": clock, "threads": threads, **names, "speedup": ratio})
            print(lines[-1], flush=True)
    print("\n".join(lines))
    print(json.dumps(found))
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    name = "train.md" if threads != 1 else "train_one_thread.md"
    (results / name).write_text(
        "\n".join(lines) + f"\n\n`{' '.join(['python', '-m', 'bench.train', *sys.argv[1:]])}`\n"
    )


def processor() -> str:
    """The CPU's name, if the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
