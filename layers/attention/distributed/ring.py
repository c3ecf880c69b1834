"""Ring attention: keys and values travel around a mesh axis while every device attends to those it holds.

Blockwise attention over devices (arXiv 2310.01889), as a fold of `merge` around the axis. Keys and values travel packed
in one message, sent before the block they were needed for is computed, so that links and arithmetic work at the same
time: p - 1 messages forward; backward the same again, and p of the gradients of keys and values, which follow one step
behind their keys and end on the device of their tokens. 3 p - 2 in all, and never more than a fixed number of buffers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from treering.layers.attention.checks import check_mask, check_shapes
from treering.layers.attention.distributed.global_arrays import shard_map_attention
from treering.layers.attention.distributed.ring_schedule import RingSchedule
from treering.layers.attention.distributed.token_layout import Tokens
from treering.layers.attention.kernels import kernel_for
from treering.layers.attention.local import delta, fold_keys, fold_queries, named, unfold_partial
from treering.layers.attention.mask import Mask
from treering.layers.attention.order import Order
from treering.layers.attention.partial import Partial, merge
from treering.layers.attention.varying import vary_over, varying_axes


def ring_attention(
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
    """Self-attention over a sequence that is sharded over mesh axis `axis`, in q's dtype. See `ring_partial`."""
    return ring_partial(
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


def ring_partial(
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
    """Ring attention with its log-sum-exp; both outputs have gradients. For global arrays.

    The arrays are in `order` already (`to_order`); "zigzag" balances causal attention. Without `positions` the order
    gives them; with `segments` `[batch seq]` a token sees its own document only, and segment 0 is padding.
    Where causality follows the order of tokens, leave positions out: plain causal zigzag then runs without a mask.
    `batch_axes` and `head_axes` shard batch and heads; None takes ("data", "fsdp") and ("tensor",) as far as the mesh
    has them. In contiguous order a length that the axis does not divide is padded inside. Arrays `[batch heads seq
    head_dim]` must be transposed first: where seq and heads are equal nothing shows the mistake. Outside of jit, arrays
    are put on the mesh first.

    Raises ValueError, naming dims and sizes that would work, where shapes, axes or order do not fit.
    """
    return shard_map_attention(ring_local, q, k, v, mesh, axis, mask, positions, segments, order, batch_axes, head_axes)


def ring_local(
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
    """Ring attention on a device's own arrays, inside `shard_map` over `axis` (with `check_vma=True`).

    `positions` and `segments` are `[batch local_seq]`, this device's; `kv_positions` and `kv_segments` `[batch seq]`,
    all ranks' in turn: a model gathers them once per step, outside its layers. Those missing are gathered here.
    `length` says how many tokens of a contiguous sequence come before its padding.
    """
    check_shapes(q, k, v)
    check_mask(mask)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"seq {q.shape[1]} of q and {k.shape[1]} of k: a ring's queries and keys are the same tokens")
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
    with jax.named_scope("ring_attention"):
        return unfold_partial(_ring(q, k, v, tokens, mask, axis))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _ring(q: Array, k: Array, v: Array, tokens: Tokens, mask: Mask, axis: str) -> Partial:
    return _ring_forward(q, k, v, tokens, mask, axis)[0]


def _ring_forward(q: Array, k: Array, v: Array, tokens: Tokens, mask: Mask, axis: str) -> tuple[Partial, tuple]:
    schedule = RingSchedule(tokens, mask, axis, q.shape[3])

    def visit(step, kv, partial):
        keys, values = step.keys(kv)
        part = Partial(*kernel_for(step.pairs, mask).forward(step.queries(q), keys, values, step.pairs, mask))
        return part if partial is None else step.join_queries(merge, partial, part)

    p, kv = lax.axis_size(axis), jnp.stack([k, v])
    coming = _send(kv, axis) if p > 1 else None
    partial = visit(schedule.first(), kv, None)
    if p > 2:

        def step(carry, s):
            kv, partial = carry
            coming = _send(kv, axis)
            return (coming, visit(schedule.later(s), kv, partial)), None

        (coming, partial), _ = lax.scan(step, (coming, partial), jnp.arange(1, p - 1))
    if p > 1:
        partial = visit(schedule.later(p - 1), coming, partial)
    kept = named(partial, q.dtype)
    return Partial(kept.out.astype(q.dtype), kept.lse), (q, k, v, tokens, kept)


def _ring_backward(mask: Mask, axis: str, residuals: tuple, cotangent: Partial) -> tuple:
    q, k, v, tokens, partial = residuals
    schedule = RingSchedule(tokens, mask, axis, q.shape[3])
    of_rows = (partial.lse, delta(partial, cotangent), cotangent.out)

    def visit(step, kv, dq, dkv):
        keys, values = step.keys(kv)
        rows = [step.queries(x) for x in of_rows]
        kernel = kernel_for(step.pairs, mask)
        new_dq, *new_dkv = kernel.backward(step.queries(q), keys, values, step.pairs, mask, *rows)
        new_dkv = jnp.stack(new_dkv)
        if dq is None:
            return new_dq, new_dkv
        return step.join_queries(jnp.add, dq, new_dq), step.join_keys(jnp.add, dkv, new_dkv)

    p, kv = lax.axis_size(axis), jnp.stack([k, v])
    coming = _send(kv, axis) if p > 1 else None
    dq, dkv = visit(schedule.first(), kv, None, None)
    if p > 2:

        def step(carry, s):
            kv, dq, dkv = carry
            coming, dkv = _send(kv, axis), _send(dkv, axis)
            return (coming, *visit(schedule.later(s), kv, dq, dkv)), None

        (coming, dq, dkv), _ = lax.scan(step, (coming, dq, dkv), jnp.arange(1, p - 1))
    if p > 1:
        dq, dkv = visit(schedule.later(p - 1), coming, dq, _send(dkv, axis))
        dkv = _send(dkv, axis)
    dk, dv = dkv
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_ring_forward, _ring_backward)


def _send(x: Array, axis: str) -> Array:
    """To the next rank: after s sends a device holds what began s ranks before it."""
    p = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(rank, (rank + 1) % p) for rank in range(p)])
