"""Gather attention: every device takes in all keys and values, and attends with its own queries.

One all-gather forward; backward one more, since keeping all keys would cost a ring's memory times p, and one
reduce-scatter of their gradients, in float32 or wider (arXiv 2407.21783, section 3.3.2). Against a ring it has two
launches instead of p - 1 and nothing to overlap: best for grouped heads at moderate lengths.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from treering.layers.attention.checks import check_mask, check_shapes
from treering.layers.attention.distributed.arguments import AttentionMesh, TokenData
from treering.layers.attention.distributed.global_arrays import shard_map_attention
from treering.layers.attention.distributed.ring import backward_step, forward_step
from treering.layers.attention.distributed.ring_schedule import FullStep, RingSchedule
from treering.layers.attention.distributed.token_layout import TokenLayout
from treering.layers.attention.kernels import wants_branch_free
from treering.layers.attention.local import delta, fold_keys, fold_queries, named, unfold_partial
from treering.layers.attention.mask import Mask
from treering.layers.attention.partial import Partial
from treering.layers.attention.varying import vary_over, varying_axes


def gather_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    on: AttentionMesh | Mesh,
    mask: Mask = Mask(),
    tokens: TokenData | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Self-attention over a sequence that is sharded over an axis of a mesh; arguments as `ring_partial`."""
    return gather_partial(q, k, v, on=on, mask=mask, tokens=tokens).out


def gather_partial(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    on: AttentionMesh | Mesh,
    mask: Mask = Mask(),
    tokens: TokenData | None = None,
) -> Partial:
    """Gather attention with its log-sum-exp; arguments, errors and gradients as `ring_partial`."""
    return shard_map_attention(gather_local, q, k, v, on, mask, tokens)


def gather_local(
    q: Float[Array, "batch local_seq heads head_dim"],
    k: Float[Array, "batch local_seq kv_heads head_dim"],
    v: Float[Array, "batch local_seq kv_heads head_dim"],
    *,
    axis: str,
    mask: Mask = Mask(),
    tokens: TokenData | None = None,
    all_tokens: TokenData | None = None,
    length: int | None = None,
) -> Partial:
    """Gather attention on a device's own arrays, inside `shard_map`; arguments as `ring_local`."""
    check_shapes(q, k, v)
    check_mask(mask)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"seq {q.shape[1]} of q and {k.shape[1]} of k: queries and keys are the same tokens here")
    layout = TokenLayout.of_device(axis, q.shape[0], q.shape[1], tokens, all_tokens, length)
    axes = varying_axes(q, k, v, layout) | {axis}
    q, k, v, layout = vary_over(axes, (fold_queries(q, k.shape[2]), fold_keys(k), fold_keys(v), layout))
    with jax.named_scope("gather_attention"):
        return unfold_partial(_gather(q, k, v, layout, mask, axis))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _gather(q: Array, k: Array, v: Array, layout: TokenLayout, mask: Mask, axis: str) -> Partial:
    return _gather_forward(q, k, v, layout, mask, axis)[0]


def _gather_forward(q: Array, k: Array, v: Array, layout: TokenLayout, mask: Mask, axis: str) -> tuple[Partial, tuple]:
    everyone = _all_ranks(k, v, axis)
    partial = None
    for step, ranks in _steps(q, layout, mask, axis):
        partial = forward_step(step, q, _of_ranks(everyone, ranks, k.shape[2]), mask, partial)
    assert partial is not None
    kept = named(partial, q.dtype)
    return Partial(kept.out.astype(q.dtype), kept.lse), (q, k, v, layout, kept)


def _gather_backward(mask: Mask, axis: str, residuals: tuple, cotangent: Partial) -> tuple:
    q, k, v, layout, partial = residuals
    everyone = _all_ranks(k, v, axis)
    of_rows = (partial.lse, delta(partial, cotangent), cotangent.out)
    dq, dkv = None, None
    for step, ranks in _steps(q, layout, mask, axis):
        more_q, more_kv = backward_step(step, q, _of_ranks(everyone, ranks, k.shape[2]), mask, of_rows, None)
        dq = more_q if dq is None else dq + more_q
        if ranks is None:
            dkv = more_kv
        else:
            dkv = jnp.zeros(everyone.shape, more_kv.dtype) if dkv is None else dkv
            start = ranks * k.shape[2]
            dkv = lax.dynamic_update_slice_in_dim(vary_over(varying_axes(more_kv), dkv), more_kv, start, 3)
    assert dq is not None and dkv is not None
    dk, dv = lax.psum_scatter(dkv, axis, scatter_dimension=3, tiled=True)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_gather.defvjp(_gather_forward, _gather_backward)


def _steps(q: Array, layout: TokenLayout, mask: Mask, axis: str) -> list[tuple[FullStep, Array | None]]:
    """One block with the keys of all ranks (None), or the steps of a branch-free ring, whose keys are here already."""
    if wants_branch_free(q, layout.segments is not None) and layout.positions is None:
        schedule = RingSchedule(layout, mask, axis, q.shape[3], branch_free=True)
        rank, p = lax.axis_index(axis), lax.axis_size(axis)
        return [(schedule.later(s) if s else schedule.first(), (rank - s) % p) for s in range(p)]
    return [(FullStep(layout.block(mask, axis, q.shape[3], None)), None)]


def _all_ranks(k: Array, v: Array, axis: str) -> Array:
    """Keys and values of all ranks in turn, packed `[2 batch kv_heads seq head_dim]`, in one message."""
    return lax.all_gather(jnp.stack([k, v]), axis, axis=3, tiled=True)


def _of_ranks(everyone: Array, rank: Array | None, local_seq: int) -> Array:
    return everyone if rank is None else lax.dynamic_slice_in_dim(everyone, rank * local_seq, local_seq, 3)
