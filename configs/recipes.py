"""Recipes: functions that return a run's config. `treering train` lists them; write your own next to your data.

A recipe's docstring says what it is for, what to expect, and the command.
"""

import dataclasses
from collections.abc import Callable

from treering.configs.data import DataConfig, Source
from treering.configs.llama import LlamaConfig
from treering.configs.long_recipes import llama_3_1_8b_128k, llama_3_1_8b_256k, llama_3_1_8b_512k, llama_3_1_70b_128k
from treering.configs.model import ModelConfig
from treering.configs.precision import Precision
from treering.configs.rope import DefaultRope
from treering.configs.run import CheckpointConfig, EvaluateConfig, RunConfig
from treering.configs.train import OptimizerConfig, ScheduleConfig, StepConfig

TINY_TEXT_MODEL = LlamaConfig(
    vocab=2048,
    embed=128,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp=384,
    context_length=512,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope=DefaultRope(theta=10_000.0),
)
"""A million parameters, a quarter of them in the embedding table."""


def tiny_from_scratch() -> RunConfig:
    """A first model on a laptop: learns English and Python from Python's own documentation, 330 kB of text.

    The tokenizer is learned from the same text. In 1000 steps (under five minutes on two cores) it reaches fewer bits
    per byte on held-out documents than a back-off n-gram model of order 4, which needs 1.93 (`python -m bench.ngram`).

    treering train tiny_from_scratch
    """
    return RunConfig(
        folder="runs/tiny_from_scratch",
        model=TINY_TEXT_MODEL,
        data=DataConfig(
            sources=(Source(path="python-docs"),),
            held_out=(Source(path="python-docs", split="test"),),
            tokenizer="bpe",
            window=512,
            batch=2,
        ),
        steps=1000,
        optimizer=OptimizerConfig(
            learning_rate=5e-3,
            schedule=ScheduleConfig(kind="cosine", warmup_steps=50, final_share=0.05),
            weight_decay=0.1,
        ),
        step=StepConfig(precision=Precision(), remat="none"),
        checkpoint=CheckpointConfig(every=500),
        evaluate=EvaluateConfig(every=250),
    )


def tiny_longer() -> RunConfig:
    """Extends the model of `tiny_from_scratch` from 512 tokens of context to 2048: run that first.

    The base of the rotary angles rises fourfold, and 300 steps on windows of 2048 tokens follow (four minutes on two
    cores). Held-out text is scored in place, after all the text before it in its document, in overlapping windows, so
    that every position is scored on the same text: loss at positions 1024 to 2048 is then lower than at 256 to 512, as
    `treering plot` shows.

    treering train tiny_longer
    treering plot runs/tiny_longer
    """
    shorter = tiny_from_scratch()
    return dataclasses.replace(
        shorter,
        folder="runs/tiny_longer",
        init_from="runs/tiny_from_scratch",
        model=dataclasses.replace(shorter.model, context_length=2048, rope=DefaultRope(theta=40_000.0)),
        data=dataclasses.replace(
            shorter.data,
            held_out=(Source(path="python-docs", split="test-in-place", trained="held_out"),),
            tokenizer=None,
            window=2048,
            batch=1,
        ),
        steps=300,
        optimizer=dataclasses.replace(
            shorter.optimizer,
            learning_rate=3e-3,
            schedule=ScheduleConfig(kind="cosine", warmup_steps=10, final_share=0.1),
        ),
        checkpoint=CheckpointConfig(every=300),
        evaluate=EvaluateConfig(every=300, stride=256),
    )


def fine_tune(init_from: str, model: ModelConfig) -> RunConfig:
    """Fine-tunes given weights on text of your own, on all devices.

    The weights may be a checkpoint, a Hugging Face folder or a GGUF file; the model is theirs. For a longer context,
    raise model.context-length, model.rope.theta and data.window. Documents are the rows of the column text. For
    held-out loss add --data.held-out.0.path held_out.jsonl.

    treering train fine_tune --init-from path/to/Llama-3.2-1B --data.sources.0.path documents.jsonl
    """
    return RunConfig(
        folder="runs/fine_tune",
        init_from=init_from,
        model=model,
        data=DataConfig(sources=(Source(path="documents.jsonl"),), window=min(model.context_length, 4096), batch=8),
        steps=1000,
        optimizer=OptimizerConfig(
            learning_rate=1e-5,
            schedule=ScheduleConfig(kind="cosine", warmup_steps=20, final_share=0.1),
        ),
        checkpoint=CheckpointConfig(every=200),
    )


RECIPES: dict[str, Callable[..., RunConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        fine_tune,
        tiny_from_scratch,
        tiny_longer,
        llama_3_1_8b_128k,
        llama_3_1_8b_256k,
        llama_3_1_8b_512k,
        llama_3_1_70b_128k,
    )
}
"""The recipes that `treering train` knows by name. One with parameters gets what `--init-from` names, and its model."""
