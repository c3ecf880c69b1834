"""A run so small that it compiles in seconds, and its recipe as a file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from treering.configs.data import DataConfig, Source
from treering.configs.llama import LlamaConfig
from treering.configs.precision import Precision
from treering.configs.rope import DefaultRope
from treering.configs.run import CheckpointConfig, EvaluateConfig, RunConfig
from treering.configs.train import OptimizerConfig, ScheduleConfig, StepConfig

MODEL = LlamaConfig(
    vocab=300,
    embed=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=48,
    context_length=64,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope=DefaultRope(theta=10_000.0),
)


def write_texts(path: Path, count: int = 24, seed: int = 0) -> None:
    """A jsonl file of documents of unequal length, some longer than a window."""
    rng = np.random.default_rng(seed)
    words = ["ring", "tree", "bark", "leaf", "root", "sap"]
    with open(path, "w") as out:
        for _ in range(count):
            out.write(json.dumps({"text": " ".join(rng.choice(words, int(rng.integers(1, 30))))}) + "\n")


def tiny_run(folder: Path, **changes: Any) -> RunConfig:
    """A run of 20 steps in `folder`/run on `folder`/train.jsonl, which is written where it is missing."""
    for name, seed in (("train", 0), ("test", 1)):
        if not (folder / f"{name}.jsonl").exists():
            write_texts(folder / f"{name}.jsonl", seed=seed)
    run = RunConfig(
        folder=str(folder / "run"),
        model=MODEL,
        data=DataConfig(
            sources=(Source(path=str(folder / "train.jsonl")),),
            held_out=(Source(path=str(folder / "test.jsonl")),),
            tokenizer="bytes",
            window=64,
            batch=8,
            block_windows=8,
            cache=str(folder / "cache"),
        ),
        steps=20,
        optimizer=OptimizerConfig(
            learning_rate=3e-3, weight_decay=0.1, schedule=ScheduleConfig(warmup_steps=4, final_share=0.1)
        ),
        step=StepConfig(precision=Precision()),
        checkpoint=CheckpointConfig(every=50),
        evaluate=EvaluateConfig(every=50),
    )
    return dataclasses.replace(run, **changes)


def recipe_file(folder: Path, **changes: str) -> Path:
    """A file with the recipe `small`: `tiny_run` in `folder`, changed as the sources of `changes` say."""
    tests = Path(__file__).parent
    said = ", ".join(f"{name}={source}" for name, source in changes.items())
    path = folder / "recipes.py"
    path.write_text(
        "import sys\nfrom pathlib import Path\n\n"
        f"sys.path.insert(0, {str(tests)!r})\nfrom treering.configs.run import *\nfrom tiny_run import tiny_run\n\n\n"
        f"def small():\n    return tiny_run(Path({str(folder)!r}), {said})\n"
    )
    return path
