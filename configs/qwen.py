"""Qwen2, Qwen2.5 and Qwen3, the dense ones: one constant per published size.

Contexts are those of config.json: of the base models for Qwen2 and 2.5, of the models for chat for Qwen3.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from treering.configs.model import ModelConfig
from treering.configs.rope import DefaultRope


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(ModelConfig):
    """Qwen2 has no fields of its own: biases on queries, keys and values are always there."""

    family: ClassVar[str] = "qwen2"


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(ModelConfig):
    """Qwen3 has no fields of its own: norms on queries and keys are always there."""

    family: ClassVar[str] = "qwen3"


_ROPE = DefaultRope(theta=1_000_000.0)

QWEN2_0_5B = Qwen2Config(
    vocab=151936,
    embed=896,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    mlp=4864,
    context_length=131072,
    norm_eps=1e-6,
    tie_embeddings=True,
    rope=_ROPE,
)

QWEN2_1_5B = Qwen2Config(
    vocab=151936,
    embed=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    head_dim=128,
    mlp=8960,
    context_length=131072,
    norm_eps=1e-6,
    tie_embeddings=True,
    rope=_ROPE,
)

QWEN2_7B = Qwen2Config(
    vocab=152064,
    embed=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    mlp=18944,
    context_length=131072,
    norm_eps=1e-6,
    tie_embeddings=False,
    rope=_ROPE,
)

QWEN2_72B = Qwen2Config(
    vocab=152064,
    embed=8192,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    mlp=29568,
    context_length=131072,
    norm_eps=1e-5,
    tie_embeddings=False,
    rope=_ROPE,
)

QWEN2_5_0_5B = replace(QWEN2_0_5B, context_length=32768)

QWEN2_5_1_5B = QWEN2_1_5B

QWEN2_5_3B = Qwen2Config(
    vocab=151936,
    embed=2048,
    layers=36,
    heads=16,
    kv_heads=2,
    head_dim=128,
    mlp=11008,
    context_length=32768,
    norm_eps=1e-6,
    tie_embeddings=True,
    rope=_ROPE,
)

QWEN2_5_7B = QWEN2_7B

QWEN2_5_14B = Qwen2Config(
    vocab=152064,
    embed=5120,
    layers=48,
    heads=40,
    kv_heads=8,
    head_dim=128,
    mlp=13824,
    context_length=131072,
    norm_eps=1e-5,
    tie_embeddings=False,
    rope=_ROPE,
)

QWEN2_5_32B = replace(QWEN2_5_14B, layers=64, mlp=27648)

QWEN2_5_72B = QWEN2_72B

QWEN3_0_6B = Qwen3Config(
    vocab=151936,
    embed=1024,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    mlp=3072,
    context_length=40960,
    norm_eps=1e-6,
    tie_embeddings=True,
    rope=_ROPE,
)

QWEN3_1_7B = replace(QWEN3_0_6B, embed=2048, mlp=6144)

QWEN3_4B = Qwen3Config(
    vocab=151936,
    embed=2560,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=9728,
    context_length=40960,
    norm_eps=1e-6,
    tie_embeddings=True,
    rope=_ROPE,
)

QWEN3_8B = replace(QWEN3_4B, embed=4096, mlp=12288, tie_embeddings=False)

QWEN3_14B = replace(QWEN3_8B, embed=5120, layers=40, heads=40, mlp=17408)

QWEN3_32B = replace(QWEN3_14B, layers=64, heads=64, mlp=25600)
