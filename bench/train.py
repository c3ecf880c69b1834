"""Training speed beside transformers: `python -m bench.train [--tokens 1024 4096] [--rounds 10]`.

One device, float32, AdamW with clipping, one row of one document, the same tiny Llama; two threads each, in turn in one
process. transformers runs with the faster of its sdpa and eager attention, without remat; ours with each remat.
Prints a table and writes it to bench/results/train.md.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

THREADS = 2


def ours(model_config, remat: str, tokens: int) -> Callable[[], float]:
    """A function that runs a step of ours and returns its seconds."""
    import jax
    import numpy as np

    from configs.mesh import MeshConfig
    from configs.precision import Precision
    from configs.train import OptimizerConfig, StepConfig
    from layers.devices import plan_for
    from models.families.registry import families
    from train.batch import Batch, place
    from train.step import init_state, step_program

    plan = plan_for(MeshConfig(), "train", fill="fsdp")
    model = plan.init(lambda: families()["llama"].init(model_config, jax.random.key(0)), "parameters")
    optimizer, step = OptimizerConfig(), StepConfig(precision=Precision(), remat=remat)
    state = init_state(model, optimizer, plan)
    program = step_program(state, step, optimizer, plan, steps=10_000, batch=1, seq=tokens)
    ids = np.random.default_rng(0).integers(0, model_config.vocab, (1, tokens + 1)).astype(np.int32)
    ones = np.ones((1, tokens), np.int32)
    batch = place(Batch(ids[:, :-1], ids[:, 1:], np.arange(tokens, dtype=np.int32)[None], ones), plan)

    def step_seconds() -> float:
        nonlocal state
        started = time.perf_counter()
        state, metrics = program(None, state, batch)
        float(metrics.loss)
        return time.perf_counter() - started

    return step_seconds


def theirs(model_config, attention: str, tokens: int) -> Callable[[], float]:
    """A function that runs a step of a torch loop around transformers and returns its seconds."""
    import numpy as np
    import torch
    import transformers

    from models.families.registry import families

    fields = families()["llama"].to_hf(model_config)
    fields.pop("architectures"), fields.pop("model_type")
    config = transformers.LlamaConfig(**fields)
    config._attn_implementation = attention
    model = transformers.LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    ids = torch.tensor(np.random.default_rng(0).integers(0, model_config.vocab, (1, tokens)))

    def step_seconds() -> float:
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        return time.perf_counter() - started

    return step_seconds


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()

    os.environ.setdefault("XLA_FLAGS", f"--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads={THREADS}")
    import jax
    import torch
    import transformers

    from configs.recipes import TINY_MODEL

    torch.set_num_threads(THREADS)
    config = TINY_MODEL
    lines = [
        f"One training step, {config.family} with {config.layers} layers, embed {config.embed}, {config.heads} heads of "
        f"{config.head_dim}, {config.kv_heads} key heads, mlp {config.mlp}, vocab {config.vocab}; 1 row, float32, AdamW; "
        f"1 CPU device, {THREADS} threads; jax {jax.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; medians of {arguments.rounds} rounds in turn.",
        "",
        "| tokens | ours, remat none, ms | attention | full | transformers sdpa | eager | ours (none) over the faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for tokens in arguments.tokens:
        runs = [ours(config, remat, tokens) for remat in ("none", "attention", "full")]
        runs += [theirs(config, attention, tokens) for attention in ("sdpa", "eager")]
        for run in runs:
            run(), run()
        rounds = [[run() for run in runs] for _ in range(arguments.rounds)]
        cells = [f"{statistics.median(column) * 1e3:.0f}" for column in zip(*rounds, strict=True)]
        ratio = statistics.median(min(row[3:]) / row[0] for row in rounds)
        lines.append(f"| {tokens} | {' | '.join(cells)} | {ratio:.2f}x |")
        print(lines[-1], flush=True)
    print("\n".join(lines))
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "train.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
