"""Decode speed compared with transformers: `python -m bench.decode CHECKPOINT`.

One stream, one CPU device, float32, two threads each, in turn in one process. transformers runs under inference_mode,
with the faster of its sdpa and eager attention. Then time per token by the number of tokens in the cache at a fixed
capacity, and by the capacity at a fixed number. Prints tables and writes them to bench/results/decode.md.
"""

import argparse
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np

from bench.report import publish, table, versions
from treering.configs.mesh import MeshConfig
from treering.configs.precision import Precision
from treering.infer.engine import Engine
from treering.infer.sequence_state import EngineState
from treering.layers.parallel.devices import plan_for
from treering.models.checkpoint.model import load_model, named_leaves
from treering.models.families import families

THREADS = 2
FILLS = (1024, 2048, 4096, 8064)


class Ours:
    """A row that holds `fill` tokens, decoded greedily. Only its length is set, since time depends on nothing else."""

    def __init__(self, engine: Engine, fill: int):
        self.engine = engine
        self.program = engine.decode_program()
        self.one = engine.put(np.int32(1))
        state = engine.empty_state()
        live = engine.put(np.ones(engine.batch, bool))
        budget = engine.put(np.full(engine.batch, 2**30, np.int32))
        rows = dataclasses.replace(state.rows, live=live, budget=budget)
        self.lengths = engine.put(np.full(engine.batch, fill, np.int32))
        self.state = EngineState(state.cache, rows)

    def __call__(self) -> None:
        """One token; the row is set back to its length first, so that every round reads the same number."""
        cache = dataclasses.replace(self.state.cache, lengths=self.lengths + 0)
        state = EngineState(cache, self.state.rows)
        self.state, drawn = self.program(self.engine.model, state, self.one)
        np.asarray(drawn.tokens)


class Transformers:
    """The same with the forward of transformers and its cache."""

    def __init__(self, model, fill: int):
        import torch

        self.model, self.torch = model, torch
        self.token = torch.ones((1, 1), dtype=torch.long)
        with torch.inference_mode():
            prompt = torch.ones((1, fill), dtype=torch.long)
            self.cache = model(input_ids=prompt, use_cache=True, logits_to_keep=1).past_key_values

    def __call__(self) -> None:
        """One token; a real loop would not crop the cache, which costs only a view."""
        with self.torch.inference_mode():
            self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits.argmax(-1)
            self.cache.crop(-1)


def transformers_model(model, attention: str):
    """The float32 weights of `model` (stacked) in transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = families()[model.config.family]
    fields = family.to_hf(model.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, attn_implementation=attention)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parameters = dict(theirs.named_parameters())
    ours = named_leaves(model)
    with torch.no_grad():
        for path, name in family.names(model.config).items():
            stacked = np.asarray(ours[path])
            layers = range(len(stacked)) if "{layer}" in name else [None]
            for layer in layers:
                tensor = parameters[name.format(layer=layer)]
                array = copy.copy(stacked if layer is None else stacked[layer])
                tensor.copy_(torch.from_numpy(array).reshape(tensor.shape))
    return theirs


def in_turn(runs: dict[str, Callable[[], None]], rounds: int, tokens: int) -> dict[str, float]:
    """Median seconds per token of each run, all in turn in each round.

    The first two tokens of a run in each round are not counted: the other library's threads are still spinning.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            for token in range(tokens + 2):
                started = time.perf_counter()
                run()
                if token >= 2:
                    times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def line_fit(x: tuple[int, ...], y: list[float]) -> tuple[float, float]:
    """Slope and r2 of the least-squares line."""
    slope, _ = statistics.linear_regression(x, y)
    return slope, statistics.correlation(x, y) ** 2


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode")
    parser.add_argument("checkpoint", help="as `treering convert` writes it")
    parser.add_argument("--fill", type=int, nargs="+", default=[1024, 4096], help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=5, help="tokens per round")
    arguments = parser.parse_args()

    import torch
    import transformers

    torch.set_num_threads(THREADS)
    plan = plan_for(MeshConfig(), "decode", fill="context")
    model = load_model(arguments.checkpoint, plan, "float32")
    oracle = {attention: transformers_model(model, attention) for attention in ("sdpa", "eager")}
    model = model.unrolled()
    engines = {n: Engine(model, plan, Precision(), batch=1, capacity=n) for n in (8192, 16384)}
    rounds, tokens = arguments.rounds, arguments.tokens

    figures, rows = {}, []
    for fill in arguments.fill:
        runs = {"ours": Ours(engines[8192], fill)} | {name: Transformers(m, fill) for name, m in oracle.items()}
        seconds = in_turn(runs, rounds, tokens)
        ratio = min(seconds["sdpa"], seconds["eager"]) / seconds["ours"]
        figures[f"speedup_at_{fill}"] = ratio
        rows.append([fill, *(f"{seconds[name] * 1e3:.1f}" for name in runs), f"{ratio:.2f}x"])
    seconds = in_turn({str(fill): Ours(engines[8192], fill) for fill in FILLS}, rounds, tokens)
    slope, figures["r2"] = line_fit(FILLS, [seconds[str(fill)] for fill in FILLS])
    doubled = in_turn({str(n): Ours(engine, 4096) for n, engine in engines.items()}, rounds, tokens)
    figures["doubled_capacity"] = doubled["16384"] / doubled["8192"]
    publish(
        "decode",
        [
            "# Decode, one stream",
            "",
            f"{model.config.family}, {model.config.layers} layers, embed {model.config.embed}, batch 1, float32, one "
            f"CPU device, {THREADS} threads; medians of {rounds} rounds of {tokens} tokens in turn. "
            f"{versions()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}.",
            "",
            *table(
                ["filled", "ours, ms per token", "transformers sdpa", "transformers eager", "faster by"],
                rows,
            ),
            "",
            f"At capacity 8192, filled {', '.join(seconds)}: "
            f"{', '.join(f'{value * 1e3:.1f}' for value in seconds.values())} ms per token; a line fit gives "
            f"{slope * 1e6:.2f} us per token of context, r2 {figures['r2']:.4f}.",
            f"Capacity 16384 over 8192 at 4096 filled: {figures['doubled_capacity'] - 1:+.1%}.",
        ],
        figures,
    )


if __name__ == "__main__":
    main()
