"""The gated feed-forward layer."""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from treering.layers.nn.linear import Linear


class SwiGLU(eqx.Module):
    """`down(silu(gate(x)) * up(x))` (arXiv 2002.05202)."""

    gate: Linear
    up: Linear
    down: Linear

    @staticmethod
    def init(sizes: dict[str, int], *, key: PRNGKeyArray) -> "SwiGLU":
        """From the sizes of `embed` and `mlp`."""
        gate_key, up_key, down_key = jax.random.split(key, 3)
        return SwiGLU(
            gate=Linear.init("embed -> mlp", sizes, key=gate_key),
            up=Linear.init("embed -> mlp", sizes, key=up_key),
            down=Linear.init("mlp -> embed", sizes, key=down_key),
        )

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Each position by itself."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
