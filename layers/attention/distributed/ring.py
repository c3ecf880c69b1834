"""Ring attention: keys and values travel around a mesh axis while every device attends to those it holds.

Blockwise attention over devices (arXiv 2310.01889), as a fold of `merge` around the axis. Keys and values travel packed
in one message, sent before the block they were needed for is computed, so that links and arithmetic work at the same
time: p - 1 messages forward; backward the same again, and p of the gradients of keys and values, which follow one step
behind their keys and end on the device of their tokens. 3 p - 2 in all, and never more than a fixed number of buffers.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from treering.layers.attention.checks import check_mask, check_shapes
from treering.layers.attention.distributed.arguments import AttentionMesh, TokenData
from treering.layers.attention.distributed.global_arrays import shard_map_attention
from treering.layers.attention.distributed.ring_schedule import FullStep, RingSchedule
from treering.layers.attention.distributed.token_layout import TokenLayout
from treering.layers.attention.kernels import kernel_of_blocks, wants_branch_free
from treering.layers.attention.local import delta, fold_keys, fold_queries, named, unfold_partial
from treering.layers.attention.mask import Mask
from treering.layers.attention.partial import Partial, merge
from treering.layers.attention.varying import vary_over, varying_axes


def ring_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    on: AttentionMesh | Mesh,
    mask: Mask = Mask(),
    tokens: TokenData | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Self-attention over a sequence that is sharded over an axis of a mesh, in q's dtype. See `ring_partial`."""
    return ring_partial(q, k, v, on=on, mask=mask, tokens=tokens).out


def ring_partial(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    on: AttentionMesh | Mesh,
    mask: Mask = Mask(),
    tokens: TokenData | None = None,
) -> Partial:
    """Ring attention with its log-sum-exp; both outputs have gradients. For global arrays.

    `on` is a mesh whose axis "context" splits the sequence, or an `AttentionMesh` that names other axes. The arrays are
    in the order of `tokens` already (`to_order`); "zigzag" balances causal attention. None for `tokens` is one document
    in contiguous order; a length that the axis does not divide is then padded inside. Arrays `[batch heads seq
    head_dim]` must be transposed first: where seq and heads are equal nothing shows the mistake. Outside of jit, arrays
    are put on the mesh first.

    Raises ValueError, naming dims and sizes that would work, where shapes, axes or order do not fit.
    """
    return shard_map_attention(ring_local, q, k, v, on, mask, tokens)


def ring_local(
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
    """Ring attention on a device's own arrays, inside `shard_map` over `axis` (with `check_vma=True`).

    `tokens` are this device's `[batch local_seq]`; `all_tokens` those of all ranks in turn, `[batch seq]`: a model
    gathers them once per step, outside its layers. Those missing are gathered here. `length` says how many tokens of a
    contiguous sequence come before its padding.
    """
    check_shapes(q, k, v)
    check_mask(mask)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"seq {q.shape[1]} of q and {k.shape[1]} of k: a ring's queries and keys are the same tokens")
    layout = TokenLayout.of_device(axis, q.shape[0], q.shape[1], tokens, all_tokens, length)
    axes = varying_axes(q, k, v, layout) | {axis}
    q, k, v, layout = vary_over(axes, (fold_queries(q, k.shape[2]), fold_keys(k), fold_keys(v), layout))
    with jax.named_scope("ring_attention"):
        return unfold_partial(_ring(q, k, v, layout, mask, axis))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _ring(q: Array, k: Array, v: Array, layout: TokenLayout, mask: Mask, axis: str) -> Partial:
    return _ring_forward(q, k, v, layout, mask, axis)[0]


def _ring_forward(q: Array, k: Array, v: Array, layout: TokenLayout, mask: Mask, axis: str) -> tuple[Partial, tuple]:
    schedule = RingSchedule(
        layout, mask, axis, q.shape[3], branch_free=wants_branch_free(q, layout.segments is not None)
    )
    p, kv = lax.axis_size(axis), jnp.stack([k, v])
    coming = _send(kv, axis) if p > 1 else None
    partial = forward_step(schedule.first(), q, kv, mask, None)
    if p > 2:

        def step(carry, s):
            kv, partial = carry
            coming = _send(kv, axis)
            return (coming, forward_step(schedule.later(s), q, kv, mask, partial)), None

        (coming, partial), _ = lax.scan(step, (coming, partial), jnp.arange(1, p - 1))
    if coming is not None:
        partial = forward_step(schedule.later(p - 1), q, coming, mask, partial)
    kept = named(partial, q.dtype)
    return Partial(kept.out.astype(q.dtype), kept.lse), (q, k, v, layout, kept)


def _ring_backward(mask: Mask, axis: str, residuals: tuple, cotangent: Partial) -> tuple:
    q, k, v, layout, partial = residuals
    schedule = RingSchedule(
        layout, mask, axis, q.shape[3], branch_free=wants_branch_free(q, layout.segments is not None)
    )
    of_rows = (partial.lse, delta(partial, cotangent), cotangent.out)
    p, kv = lax.axis_size(axis), jnp.stack([k, v])
    coming = _send(kv, axis) if p > 1 else None
    grads = backward_step(schedule.first(), q, kv, mask, of_rows, None)
    if p > 2:

        def step(carry, s):
            kv, (dq, dkv) = carry
            coming, dkv = _send(kv, axis), _send(dkv, axis)
            return (coming, backward_step(schedule.later(s), q, kv, mask, of_rows, (dq, dkv))), None

        (coming, grads), _ = lax.scan(step, (coming, grads), jnp.arange(1, p - 1))
    dq, dkv = grads
    if coming is not None:
        dq, dkv = backward_step(schedule.later(p - 1), q, coming, mask, of_rows, (dq, _send(dkv, axis)))
        dkv = _send(dkv, axis)
    dk, dv = dkv
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_ring_forward, _ring_backward)


def _send(x: Array, axis: str) -> Array:
    """To the next rank: after s sends a device holds what began s ranks before it."""
    p = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(rank, (rank + 1) % p) for rank in range(p)])


def forward_step(step: FullStep, q: Array, kv: Array, mask: Mask, partial: Partial | None) -> Partial:
    """The result after a step, where `partial` is that before it (None at the first)."""
    queries, (keys, values) = step.queries(q), step.keys(kv)
    part = Partial(*kernel_of_blocks(queries, step.block).forward(queries, keys, values, step.block, mask))
    if partial is None:
        partial = _nothing(step, q, part)
        if partial is None:
            return part
    return step.join_queries(merge, partial, part)


def backward_step(
    step: FullStep, q: Array, kv: Array, mask: Mask, of_rows: Sequence[Array], grads: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """Gradients of q, and of the keys and values at hand, after a step; `of_rows` are lse, delta and d_out."""
    queries, (keys, values) = step.queries(q), step.keys(kv)
    rows = [step.queries(x) for x in of_rows]
    kernel = kernel_of_blocks(queries, step.block)
    assert kernel.backward is not None, f"kernel {kernel.name} has no gradients"
    dq, *dkv = kernel.backward(queries, keys, values, step.block, mask, *rows)
    dkv = jnp.stack(dkv)
    if grads is None:
        if type(step) is FullStep:
            return dq, dkv
        zeros = jnp.zeros(q.shape, dq.dtype), jnp.zeros(kv.shape, dkv.dtype)
        grads = vary_over(varying_axes(dq, dkv), zeros)
    return step.join_queries(jnp.add, grads[0], dq), step.join_keys(jnp.add, grads[1], dkv)


def _nothing(step: FullStep, q: Array, part: Partial) -> Partial | None:
    """What a first step of halves joins with; None for a step whose result is whole."""
    if type(step) is FullStep:
        return None
    return vary_over(varying_axes(part), Partial.empty(q.shape[:-1], q.shape[-1], part.out.dtype))
