"""Attention from its definition: the oracle that every algorithm is tested against."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from treering.layers.attention.checks import check_mask, check_shapes, check_token_data
from treering.layers.attention.mask import Mask, visible
from treering.layers.attention.partial import Partial, statistics_dtype


def dense_partial(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch kv_seq kv_heads head_dim"],
    v: Float[Array, "batch kv_seq kv_heads head_dim"],
    *,
    mask: Mask = Mask(),
    q_positions: Int[Array, "..."] | None = None,
    kv_positions: Int[Array, "..."] | None = None,
    q_segments: Int[Array, "..."] | None = None,
    kv_segments: Int[Array, "..."] | None = None,
) -> Partial:
    """softmax(scale q k^T) v with every score in memory, and the log of each row's sum of exponentials.

    All arithmetic is in the statistics' dtype, so float64 stays float64. Positions and segments are `[batch seq]` and
    `[batch kv_seq]`; positions default to 0, 1, 2, ... A row that sees no key is (0, -inf), with finite gradients.
    Raises ValueError, naming dims and sizes, where shapes do not fit each other.
    """
    check_shapes(q, k, v)
    check_mask(mask)
    batch, seq, heads, head_dim = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    check_token_data("q_positions", q_positions, batch, seq)
    check_token_data("kv_positions", kv_positions, batch, kv_seq)
    check_token_data("q_segments", q_segments, batch, seq)
    check_token_data("kv_segments", kv_segments, batch, kv_seq)
    if (q_segments is None) != (kv_segments is None):
        raise ValueError("q_segments and kv_segments: give both or neither (all 1 where one side is one document)")
    dtype = statistics_dtype(q.dtype)
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim).astype(dtype)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k.astype(dtype)) * mask.score_scale(head_dim)
    if mask.softcap is not None:
        scores = mask.softcap * jnp.tanh(scores / mask.softcap)
    if q_positions is None:
        q_positions = jnp.broadcast_to(jnp.arange(seq), (batch, seq))
    if kv_positions is None:
        kv_positions = jnp.broadcast_to(jnp.arange(kv_seq), (batch, kv_seq))
    seen = visible(mask, q_positions, kv_positions, q_segments, kv_segments)[:, None, None]
    some = jnp.any(seen, axis=-1)
    # A row without keys takes weights from zeros instead of -inf - (-inf), which is NaN in value and gradient.
    scores = jnp.where(seen, scores, jnp.where(some, -jnp.inf, 0)[..., None])
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - peak), 0)
    total = jnp.sum(weights, axis=-1)
    safe = jnp.where(some, total, 1)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights / safe[..., None], v.astype(dtype))
    lse = jnp.where(some, peak[..., 0] + jnp.log(safe), -jnp.inf)
    return Partial(
        out.reshape(q.shape).astype(q.dtype),
        jnp.moveaxis(lse.reshape(batch, heads, seq), 1, 2),
    )


def dense_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch kv_seq kv_heads head_dim"],
    v: Float[Array, "batch kv_seq kv_heads head_dim"],
    *,
    mask: Mask = Mask(),
    positions: Int[Array, "..."] | None = None,
    segments: Int[Array, "..."] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Self-attention on one device with every score in memory; arguments as `ring_attention`, without a mesh."""
    check_shapes(q, k, v)
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"seq {q.shape[1]} of q and {k.shape[1]} of k: self-attention takes one sequence")
    return dense_partial(
        q,
        k,
        v,
        mask=mask,
        q_positions=positions,
        kv_positions=positions,
        q_segments=segments,
        kv_segments=segments,
    ).out
