"""Mistral: one constant per published size."""

from dataclasses import dataclass, replace
from typing import ClassVar

from treering.configs.errors import UserError
from treering.configs.model import ModelConfig
from treering.configs.rope import DefaultRope


@dataclass(frozen=True, kw_only=True)
class MistralConfig(ModelConfig):
    """Mistral's own field is its window."""

    family: ClassVar[str] = "mistral"

    window: int | None
    """How many positions a query sees, its own included; None for all."""

    def __post_init__(self):
        super().__post_init__()
        if self.window is not None and self.window < 1:
            raise UserError("it must be at least 1: a query sees itself", field="window", value=self.window)


MISTRAL_7B_V0_1 = MistralConfig(
    vocab=32000,
    embed=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    context_length=32768,
    norm_eps=1e-5,
    tie_embeddings=False,
    rope=DefaultRope(theta=10_000.0),
    window=4096,
)

MISTRAL_7B_V0_2 = MistralConfig(
    vocab=32000,
    embed=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    context_length=32768,
    norm_eps=1e-5,
    tie_embeddings=False,
    rope=DefaultRope(theta=1_000_000.0),
    window=None,
)

MISTRAL_7B_V0_3 = replace(MISTRAL_7B_V0_2, vocab=32768)

MISTRAL_NEMO_12B = MistralConfig(
    vocab=131072,
    embed=5120,
    layers=40,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    context_length=128000,
    norm_eps=1e-5,
    tie_embeddings=False,
    rope=DefaultRope(theta=1_000_000.0),
    window=None,
)
