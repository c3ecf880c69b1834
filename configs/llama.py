"""Llama: one constant a published size, and two small ones for tests."""

from dataclasses import dataclass
from typing import ClassVar

from configs.model import ModelConfig
from configs.rope import DefaultRope, Llama3Rope


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Llama has no fields of its own: it is what the shared ones describe."""

    family: ClassVar[str] = "llama"


SMOLLM2_135M = LlamaConfig(
    vocab=49152,
    embed=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    mlp=1536,
    context_length=8192,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope=DefaultRope(theta=100_000.0),
)

TINY = LlamaConfig(
    vocab=96,
    embed=64,
    layers=2,
    heads=8,
    kv_heads=2,
    head_dim=8,
    mlp=96,
    context_length=256,
    norm_eps=1e-5,
    tie_embeddings=False,
    rope=DefaultRope(theta=10_000.0),
)
"""For tests: grouped heads whose group size is not their number."""

LLAMA_3_2_1B_CUT = LlamaConfig(
    vocab=2048,
    embed=2048,
    layers=2,
    heads=32,
    kv_heads=8,
    head_dim=64,
    mlp=8192,
    context_length=131072,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope=Llama3Rope(
        theta=500_000.0,
        factor=32.0,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_context=8192,
    ),
)
"""For tests: the proportions of Llama 3.2 1B, cut to two layers and a small vocabulary."""
