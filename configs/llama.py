"""Llama: one constant per published size, and two small ones for tests."""

from dataclasses import dataclass, replace
from typing import ClassVar

from treering.configs.model import ModelConfig
from treering.configs.rope import DefaultRope, Llama3Rope


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Llama has no fields of its own: it is what the shared ones describe."""

    family: ClassVar[str] = "llama"


LLAMA_7B = LlamaConfig(
    vocab=32000,
    embed=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_dim=128,
    mlp=11008,
    context_length=2048,
    norm_eps=1e-6,
    tie_embeddings=False,
    rope=DefaultRope(theta=10_000.0),
)
LLAMA_13B = replace(LLAMA_7B, embed=5120, layers=40, heads=40, kv_heads=40, mlp=13824)
LLAMA_30B = replace(LLAMA_7B, embed=6656, layers=60, heads=52, kv_heads=52, mlp=17920)
LLAMA_65B = replace(LLAMA_7B, embed=8192, layers=80, heads=64, kv_heads=64, mlp=22016, norm_eps=1e-5)

LLAMA_2_7B = replace(LLAMA_7B, context_length=4096, norm_eps=1e-5)
LLAMA_2_13B = replace(LLAMA_13B, context_length=4096, norm_eps=1e-5)
LLAMA_2_70B = LlamaConfig(
    vocab=32000,
    embed=8192,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    mlp=28672,
    context_length=4096,
    norm_eps=1e-5,
    tie_embeddings=False,
    rope=DefaultRope(theta=10_000.0),
)

_CODE_ROPE = DefaultRope(theta=1_000_000.0)

CODE_LLAMA_7B = replace(LLAMA_2_7B, vocab=32016, context_length=16384, rope=_CODE_ROPE)
CODE_LLAMA_7B_PYTHON = replace(CODE_LLAMA_7B, vocab=32000)
CODE_LLAMA_13B = replace(LLAMA_2_13B, vocab=32016, context_length=16384, rope=_CODE_ROPE)
CODE_LLAMA_13B_PYTHON = replace(CODE_LLAMA_13B, vocab=32000)
CODE_LLAMA_34B = replace(LLAMA_2_70B, layers=48, mlp=22016, context_length=16384, rope=_CODE_ROPE)
CODE_LLAMA_70B = replace(LLAMA_2_70B, vocab=32016, context_length=16384, rope=_CODE_ROPE)

LLAMA_3_8B = LlamaConfig(
    vocab=128256,
    embed=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    context_length=8192,
    norm_eps=1e-5,
    tie_embeddings=False,
    rope=DefaultRope(theta=500_000.0),
)
LLAMA_3_70B = replace(LLAMA_3_8B, embed=8192, layers=80, heads=64, mlp=28672)

_ROPE_3_1 = Llama3Rope(
    theta=500_000.0, factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192
)

LLAMA_3_1_8B = replace(LLAMA_3_8B, context_length=131072, rope=_ROPE_3_1)
LLAMA_3_1_70B = replace(LLAMA_3_70B, context_length=131072, rope=_ROPE_3_1)
LLAMA_3_1_405B = replace(LLAMA_3_1_8B, embed=16384, layers=126, heads=128, mlp=53248)

LLAMA_3_2_1B = LlamaConfig(
    vocab=128256,
    embed=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    mlp=8192,
    context_length=131072,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope=replace(_ROPE_3_1, factor=32.0),
)
LLAMA_3_2_3B = replace(LLAMA_3_2_1B, embed=3072, layers=28, heads=24, head_dim=128)

LLAMA_3_3_70B = LLAMA_3_1_70B

TINYLLAMA_1_1B = LlamaConfig(
    vocab=32000,
    embed=2048,
    layers=22,
    heads=32,
    kv_heads=4,
    head_dim=64,
    mlp=5632,
    context_length=2048,
    norm_eps=1e-5,
    tie_embeddings=False,
    rope=DefaultRope(theta=10_000.0),
)

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

SMOLLM2_360M = replace(SMOLLM2_135M, embed=960, layers=32, heads=15, kv_heads=5, mlp=2560)
SMOLLM2_1_7B = replace(
    SMOLLM2_135M, embed=2048, layers=24, heads=32, kv_heads=32, mlp=8192, rope=DefaultRope(theta=130_000.0)
)

LWM_TEXT_128K = replace(LLAMA_7B, context_length=131072, rope=DefaultRope(theta=10_000_000.0))
LWM_TEXT_256K = replace(LLAMA_7B, context_length=262144, rope=DefaultRope(theta=10_000_000.0))
LWM_TEXT_512K = replace(LLAMA_7B, context_length=524288, rope=DefaultRope(theta=25_000_000.0))
LWM_TEXT_1M = replace(LLAMA_7B, context_length=1048576, rope=DefaultRope(theta=50_000_000.0))
"""Large World Model's text models, arXiv 2402.08268: Llama 2 7B's sizes with the norm and the theta that they were
trained with."""

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

LLAMA_3_2_1B_CUT = replace(LLAMA_3_2_1B, vocab=2048, layers=2)
"""For tests: the proportions of Llama 3.2 1B, cut to two layers and a small vocabulary."""
