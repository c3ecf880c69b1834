"""Attention as the gradient of a scalar energy (arXiv 2408.04093, section 3)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from treering.layers.attention.mask import Mask, visible
from treering.layers.attention.partial import statistics_dtype


def attention_energy(
    q: Float[Array, "*rows seq head_dim"],
    k: Float[Array, "*rows kv_seq head_dim"],
    v: Float[Array, "*rows kv_seq head_dim"],
    source: Float[Array, "*rows seq head_dim"],
    *,
    causal: bool = False,
) -> Float[Array, ""]:
    """The sum over queries i of log sum_a exp(q_i . k_a + source_i . v_a).

    Its gradient in `source`, at zero, is attention without a scale (multiply q by 1 / sqrt(head_dim) for the usual
    one), because the log of a sum of exponentials has the softmax as its gradient:

        attention = jax.grad(attention_energy, argnums=3)(q, k, v, jnp.zeros_like(q))

    One query `[1 head_dim]` gives equations 5 and 6 of the paper; `causal`, where query i sees keys a <= i, equations
    25 and 26; heads as a leading dim, over which the energy sums, 27 and 28. `logsumexp` reduces in any grouping, and a
    gradient costs about what its function costs: so attention over p devices takes one reduction of depth log p
    (theorem 1). Second derivatives in `source` are covariances of v under the attention weights (equation 20).
    Scores and their sum are in the statistics' dtype. Raises ValueError where the shapes do not fit each other.
    """
    if q.shape != source.shape or k.shape != v.shape or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}, source {source.shape}: q and source must be [*rows seq head_dim], "
            f"k and v [*rows kv_seq head_dim]"
        )
    q, k, v, source = (x.astype(statistics_dtype(x.dtype)) for x in (q, k, v, source))
    scores = jnp.einsum("...qd,...kd->...qk", q, k) + jnp.einsum("...qd,...kd->...qk", source, v)
    if causal:
        seen = visible(Mask(), jnp.arange(q.shape[-2]), jnp.arange(k.shape[-2]))
        scores = jnp.where(jnp.broadcast_to(seen, scores.shape), scores, -jnp.inf)
    return jnp.sum(jax.nn.logsumexp(scores, axis=-1))
