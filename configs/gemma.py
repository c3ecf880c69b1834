"""Gemma 3's text models: one constant per published size, and the text parts of the multimodal ones."""

from dataclasses import dataclass, replace
from typing import ClassVar

from treering.configs.errors import UserError
from treering.configs.model import ModelConfig
from treering.configs.rope import DefaultRope, LinearRope


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """Gemma 3's own fields: layers that see a window, in a pattern with layers that see all.

    `rope` is that of the layers that see all.
    """

    family: ClassVar[str] = "gemma3"

    window: int
    """How many positions a query sees in a layer with a window, its own included."""
    period: int
    """One layer in this many, the last, sees all positions; the others have the window."""
    local_theta: float
    """The base of the rotary angles in layers with a window; they are not scaled."""
    query_scalar: int
    """Scores are divided by the square root of this."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("window", "period", "query_scalar"):
            if getattr(self, name) < 1:
                raise UserError("it must be at least 1", field=name, value=getattr(self, name))


GEMMA_3_270M = Gemma3Config(
    vocab=262144,
    embed=640,
    layers=18,
    heads=4,
    kv_heads=1,
    head_dim=256,
    mlp=2048,
    context_length=32768,
    norm_eps=1e-6,
    tie_embeddings=True,
    rope=DefaultRope(theta=1_000_000.0),
    window=512,
    period=6,
    local_theta=10_000.0,
    query_scalar=256,
)

GEMMA_3_1B = replace(GEMMA_3_270M, embed=1152, layers=26, mlp=6912)

GEMMA_3_4B_TEXT = Gemma3Config(
    vocab=262208,
    embed=2560,
    layers=34,
    heads=8,
    kv_heads=4,
    head_dim=256,
    mlp=10240,
    context_length=131072,
    norm_eps=1e-6,
    tie_embeddings=True,
    rope=LinearRope(theta=1_000_000.0, factor=8.0),
    window=1024,
    period=6,
    local_theta=10_000.0,
    query_scalar=256,
)

GEMMA_3_12B_TEXT = replace(GEMMA_3_4B_TEXT, embed=3840, layers=48, heads=16, kv_heads=8, mlp=15360)

GEMMA_3_27B_TEXT = replace(
    GEMMA_3_4B_TEXT, embed=5376, layers=62, heads=32, kv_heads=16, head_dim=128, mlp=21504, query_scalar=168
)
