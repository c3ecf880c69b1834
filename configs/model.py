"""The architecture fields that every family shares."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import ClassVar

from treering.configs.errors import UserError
from treering.configs.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """An architecture and nothing else: no mesh, no dtype, no kernel choice.

    Sizes carry the names of the array dims they give. A family extends this class by its own fields and sets `family`,
    the name under which its checkpoints find it.
    """

    family: ClassVar[str] = ""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    context_length: int
    """Tokens that a sequence may hold: the positions that the weights were trained for."""
    norm_eps: float
    tie_embeddings: bool
    """Whether the output projection is the embedding table."""
    rope: RopeConfig

    def __post_init__(self):
        sizes = ("vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "context_length")
        for name in sizes:
            if getattr(self, name) < 1:
                raise UserError("it must be at least 1", field=name, value=getattr(self, name))
        if self.heads % self.kv_heads:
            raise UserError(
                f"it must divide the {self.heads} query heads, of which each key head serves an equal group",
                field="kv_heads",
                value=self.kv_heads,
                works=[n for n in range(1, min(self.heads, 1024) + 1) if self.heads % n == 0],
            )
        if self.head_dim % 2:
            raise UserError(
                "it must be even: rotary embeddings turn pairs of dimensions", field="head_dim", value=self.head_dim
            )

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token leaves in the cache, all layers, at `itemsize` bytes per number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def fingerprint(self) -> str:
        """A short hash of family and fields: equal for equal architectures, in every process."""
        fields = json.dumps([self.family, type(self.rope).__name__, asdict(self)], sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()[:16]
