"""Recipes that lengthen the context of published models, on many accelerators of 80 GB.

Each is checked by compiling its step for as many simulated devices; none was run at its size. Times are estimated at
40 % of 989 TFLOP/s per device, not measured. Change `data.sources` to long documents of your own.
"""

import dataclasses

from treering.configs.data import DataConfig, Source
from treering.configs.llama import LLAMA_3_1_8B, LLAMA_3_1_70B, LlamaConfig
from treering.configs.mesh import MeshConfig
from treering.configs.run import CheckpointConfig, EvaluateConfig, RunConfig
from treering.configs.train import OptimizerConfig, ScheduleConfig, StepConfig

BOOKS = "emozilla/pg19"
"""Books of Project Gutenberg on the Hugging Face hub: about 100,000 tokens each."""


def llama_3_1_8b_128k() -> RunConfig:
    """Fine-tunes Llama 3.1 8B on whole windows of 128k tokens: 8 devices, one sequence over all of them.

    Before it: treering convert path/to/Llama-3.1-8B checkpoints/llama-3.1-8b. About 50 s per step of 1M tokens.

    treering train llama_3_1_8b_128k
    """
    return _run(
        "llama_3_1_8b_128k", LLAMA_3_1_8B, "checkpoints/llama-3.1-8b", 131072, MeshConfig(fsdp=1, context=8), parts=8
    )


def llama_3_1_8b_256k() -> RunConfig:
    """The first of two stages to 512k tokens: Llama 3.1 8B at 256k, on 16 devices. See llama_3_1_8b_512k.

    treering train llama_3_1_8b_256k
    """
    init_from = "checkpoints/llama-3.1-8b"
    return _run("llama_3_1_8b_256k", _longer(2), init_from, 262144, MeshConfig(fsdp=1, context=16), parts=4)


def llama_3_1_8b_512k() -> RunConfig:
    """The second stage: from the run of llama_3_1_8b_256k to windows of 512k tokens, on 32 devices.

    Theta rises with the context, in two stages, so that the slowest rotary pairs turn as far over the longer context as
    they did over the shorter (theta times growth ** (head_dim / (head_dim - 2)), the rule known as NTK-aware scaling);
    staged as in arXiv 2402.08268. About 40 s per step of 1M tokens.

    treering train llama_3_1_8b_512k
    """
    init_from = "runs/llama_3_1_8b_256k"
    return _run("llama_3_1_8b_512k", _longer(4), init_from, 524288, MeshConfig(fsdp=1, context=32), parts=2)


def llama_3_1_70b_128k() -> RunConfig:
    """Fine-tunes Llama 3.1 70B on whole windows of 128k tokens: 64 devices, two sequences over 32 each.

    Before it: treering convert path/to/Llama-3.1-70B checkpoints/llama-3.1-70b. About 45 s per step of 1M tokens.

    treering train llama_3_1_70b_128k
    """
    return _run(
        "llama_3_1_70b_128k",
        LLAMA_3_1_70B,
        "checkpoints/llama-3.1-70b",
        131072,
        MeshConfig(fsdp=2, context=32),
        parts=4,
    )


def _longer(growth: int) -> LlamaConfig:
    """Llama 3.1 8B for a context `growth` times its own."""
    model = LLAMA_3_1_8B
    theta = model.rope.theta * growth ** (model.head_dim / (model.head_dim - 2))
    rope = dataclasses.replace(model.rope, theta=theta)
    return dataclasses.replace(model, context_length=growth * model.context_length, rope=rope)


def _run(name: str, model: LlamaConfig, init_from: str, window: int, mesh: MeshConfig, *, parts: int) -> RunConfig:
    """A run of 400 steps of about a million tokens; each part of a batch has one row on each of fsdp's devices."""
    return RunConfig(
        folder=f"runs/{name}",
        model=model,
        init_from=init_from,
        data=DataConfig(
            sources=(Source(path=BOOKS),),
            held_out=(Source(path=BOOKS, split="validation"),),
            window=window,
            batch=parts * (mesh.fsdp or 1),
        ),
        steps=400,
        optimizer=OptimizerConfig(
            learning_rate=2e-5,
            schedule=ScheduleConfig(kind="cosine", warmup_steps=20, final_share=0.1),
            weight_decay=0.1,
        ),
        step=StepConfig(accumulation=parts),
        mesh=mesh,
        checkpoint=CheckpointConfig(every=50),
        evaluate=EvaluateConfig(every=50, rows=16),
    )
