"""Root-mean-square normalisation."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from treering.layers.attention.partial import statistics_dtype
from treering.layers.parallel.sharding import array_field


class RMSNorm(eqx.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` (arXiv 1910.07467).

    The mean is taken in float32 or wider; the normalised value is cast to x's dtype before the weight multiplies it,
    the order in which Llama's weights were trained.
    """

    weight: Float[Array, "size"] = array_field(lambda self: (self.dim,))
    dim: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(dim: str, size: int, *, eps: float) -> "RMSNorm":
        """A norm over `dim` with weights of one."""
        return RMSNorm(jnp.ones(size), dim, eps)

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """Normalises the last dim."""
        wide = x.astype(statistics_dtype(x.dtype))
        normalised = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        # Two numbers of x's dtype have an exact product in the wide one, which rounds as it would in x's own. But so
        # the weight may have more digits, and its gradient, a sum over all tokens, has them too.
        weight = jnp.broadcast_to(self.weight.astype(wide.dtype), x.shape)
        return (normalised.astype(x.dtype).astype(wide.dtype) * weight).astype(x.dtype)
