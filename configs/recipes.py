"""Recipes: functions that return a whole run. `treering train` lists them; write your own beside your data.

A recipe's docstring says what it is for, what to expect, and the command.
"""

from collections.abc import Callable

from configs.data import DataConfig, Source
from configs.llama import LlamaConfig
from configs.long_recipes import llama_3_1_8b_128k, llama_3_1_8b_256k, llama_3_1_8b_512k, llama_3_1_70b_128k
from configs.precision import Precision
from configs.rope import DefaultRope
from configs.run import CheckpointConfig, EvaluateConfig, RunConfig, WatchConfig
from configs.train import OptimizerConfig, ScheduleConfig, StepConfig

TINY_MODEL = LlamaConfig(
    vocab=768,
    embed=192,
    layers=4,
    heads=6,
    kv_heads=2,
    head_dim=32,
    mlp=512,
    context_length=512,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope=DefaultRope(theta=10_000.0),
)


def tiny_from_scratch() -> RunConfig:
    """Learns English and Python from Python's own documentation, with a tokenizer of its own.

    treering train tiny_from_scratch
    """
    return RunConfig(
        folder="runs/tiny_from_scratch",
        model=TINY_MODEL,
        data=DataConfig(
            sources=(Source(path="python-docs"),),
            held_out=(Source(path="python-docs", split="test"),),
            tokenizer="bpe",
            window=512,
            batch=8,
        ),
        steps=400,
        optimizer=OptimizerConfig(
            learning_rate=3e-3,
            schedule=ScheduleConfig(kind="cosine", warmup_steps=20, final_share=0.05),
            weight_decay=0.1,
        ),
        step=StepConfig(precision=Precision(), remat="none"),
        checkpoint=CheckpointConfig(every=200),
        evaluate=EvaluateConfig(every=100),
        watch=WatchConfig(),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        tiny_from_scratch,
        llama_3_1_8b_128k,
        llama_3_1_8b_256k,
        llama_3_1_8b_512k,
        llama_3_1_70b_128k,
    )
}
