"""Gather attention: every device takes in all keys and values, and attends with its own queries.

One all-gather forward; backward one more, since keeping all keys would cost a ring's memory times p, and one
reduce-scatter of their gradients, in float32 or wider (arXiv 2407.21783, section 3.3.2). Against a ring it has two
launches instead of p - 1 and nothing to overlap: best for grouped heads at moderate lengths.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from treering.layers.attention.checks import check_mask, check_shapes
from treering.layers.attention.distributed.global_arrays import shard_map_attention
from treering.layers.attention.distributed.token_layout import Tokens
from treering.layers.attention.kernels import kernel_for
from treering.layers.attention.local import delta, fold_keys, fold_queries, named, unfold_partial
from treering.layers.attention.mask import Mask
from treering.layers.attention.order import Order
from treering.layers.attention.partial import Partial
from treering.layers.attention.varying import vary_over, varying_axes


def gather_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    mesh: jax.sharding.Mesh,
    axis: str = "context",
    mask: Mask = Mask(),
    positions: Int[Array, "..."] | None = None,
    segments: Int[Array, "..."] | None = None,
    order: Order = "contiguous",
    batch_axes: tuple[str, ...] | None = None,
    head_axes: tuple[str, ...] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Self-attention over a sequence that is sharded over mesh axis `axis`; arguments as `ring_partial`."""
    return gather_partial(
        q,
        k,
        v,
        mesh=mesh,
        axis=axis,
        mask=mask,
        positions=positions,
        segments=segments,
        order=order,
        batch_axes=batch_axes,
        head_axes=head_axes,
    ).out


def gather_partial(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    mesh: jax.sharding.Mesh,
    axis: str = "context",
    mask: Mask = Mask(),
    positions: Int[Array, "..."] | None = None,
    segments: Int[Array, "..."] | None = None,
    order: Order = "contiguous",
    batch_axes: tuple[str, ...] | None = None,
    head_axes: tuple[str, ...] | None = None,
) -> Partial:
    """Gather attention with its log-sum-exp; arguments, errors and gradients as `ring_partial`."""
    return shard_map_attention(
        gather_local, q, k, v, mesh, axis, mask, positions, segments, order, batch_axes, head_axes
    )


def gather_local(
    q: Float[Array, "batch local_seq heads head_dim"],
    k: Float[Array, "batch local_seq kv_heads head_dim"],
    v: Float[Array, "batch local_seq kv_heads head_dim"],
    *,
    axis: str,
    mask: Mask = Mask(),
    order: Order = "contiguous",
    positions: Int[Array, "..."] | None = None,
    segments: Int[Array, "..."] | None = None,
    kv_positions: Int[Array, "..."] | None = None,
    kv_segments: Int[Array, "..."] | None = None,
    length: int | None = None,
) -> Partial:
    """Gather attention on a device's own arrays, inside `shard_map`; arguments as `ring_local`."""
    check_shapes(q, k, v)
    check_mask(mask)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"seq {q.shape[1]} of q and {k.shape[1]} of k: queries and keys are the same tokens here")
    tokens = Tokens.of_device(
        axis,
        batch=q.shape[0],
        local_seq=q.shape[1],
        order=order,
        length=length,
        positions=positions,
        segments=segments,
        kv_positions=kv_positions,
        kv_segments=kv_segments,
    )
    axes = varying_axes(q, k, v, tokens) | {axis}
    q, k, v, tokens = vary_over(axes, (fold_queries(q, k.shape[2]), fold_keys(k), fold_keys(v), tokens))
    with jax.named_scope("gather_attention"):
        return unfold_partial(_gather(q, k, v, tokens, mask, axis))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _gather(q: Array, k: Array, v: Array, tokens: Tokens, mask: Mask, axis: str) -> Partial:
    return _gather_forward(q, k, v, tokens, mask, axis)[0]


def _gather_forward(q: Array, k: Array, v: Array, tokens: Tokens, mask: Mask, axis: str) -> tuple[Partial, tuple]:
    pairs = tokens.pairs(mask, axis, q.shape[3], None)
    kept = named(Partial(*kernel_for(pairs, mask).forward(q, *_all_ranks(k, v, axis), pairs, mask)), q.dtype)
    return Partial(kept.out.astype(q.dtype), kept.lse), (q, k, v, tokens, kept)


def _gather_backward(mask: Mask, axis: str, residuals: tuple, cotangent: Partial) -> tuple:
    q, k, v, tokens, partial = residuals
    pairs = tokens.pairs(mask, axis, q.shape[3], None)
    dq, dk, dv = kernel_for(pairs, mask).backward(
        q, *_all_ranks(k, v, axis), pairs, mask, partial.lse, delta(partial, cotangent), cotangent.out
    )
    dk, dv = lax.psum_scatter(jnp.stack([dk, dv]), axis, scatter_dimension=3, tiled=True)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_gather.defvjp(_gather_forward, _gather_backward)


def _all_ranks(k: Array, v: Array, axis: str) -> Array:
    """Keys and values of all ranks in turn, packed `[2 batch kv_heads seq head_dim]`, in one message."""
    return lax.all_gather(jnp.stack([k, v]), axis, axis=3, tiled=True)
