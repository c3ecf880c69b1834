"""Attention on one device: memory of a few tiles, gradients from q, k, v, out and lse alone."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from treering.layers.attention.checks import check_mask, check_shapes, check_token_data
from treering.layers.attention.kernels import NO_WINDOW, BlockMask, Geometry, kernel_of_blocks
from treering.layers.attention.kernels.tiles import Q_TILE
from treering.layers.attention.mask import Mask
from treering.layers.attention.partial import Partial, statistics_dtype
from treering.layers.attention.varying import vary_over, varying_axes

OUT_NAME, LSE_NAME = "attention_out", "attention_lse"
"""What remat policies save by name so that attention does not run again (`jax.checkpoint_policies`)."""


def local_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch kv_seq kv_heads head_dim"],
    v: Float[Array, "batch kv_seq kv_heads head_dim"],
    *,
    mask: Mask = Mask(),
    q_positions: Int[Array, "..."] | None = None,
    kv_positions: Int[Array, "..."] | None = None,
    q_segments: Int[Array, "..."] | None = None,
    kv_segments: Int[Array, "..."] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Partial:
    """Attention of queries over the keys given: out in `out_dtype` (None for q's), lse in the statistics' dtype.

    Take the statistics' dtype for a part that will be merged with others: rounded parts add up their errors.
    Each key head serves heads / kv_heads query heads, in order. Positions and segments are `[batch seq]` and
    `[batch kv_seq]`; positions default to 0, 1, 2, ..., segments to one document. Works outside `shard_map` and inside
    (on a device's own arrays, without communication), under jit, grad and vmap; both outputs have gradients.

    Raises ValueError, naming dims and sizes, where shapes do not fit each other.
    """
    check_shapes(q, k, v)
    check_mask(mask)
    batch, seq, kv_seq = q.shape[0], q.shape[1], k.shape[1]
    for name, x, length in (
        ("q_positions", q_positions, seq),
        ("kv_positions", kv_positions, kv_seq),
        ("q_segments", q_segments, seq),
        ("kv_segments", kv_segments, kv_seq),
    ):
        check_token_data(name, x, batch, length)
    if (q_segments is None) != (kv_segments is None):
        raise ValueError("q_segments and kv_segments: give both or neither (all 1 where one side is one document)")
    segments = {} if q_segments is None else {"q_segments": q_segments, "kv_segments": kv_segments}
    geometry = Geometry.POSITIONS
    if q_positions is kv_positions is None:
        if not mask.causal:
            geometry = Geometry.FULL
        elif seq == kv_seq and (mask.window is None or mask.window >= seq):
            geometry = Geometry.DIAGONAL
        else:
            geometry = Geometry.BAND
    band = None
    if geometry is Geometry.BAND:
        band = jnp.array([[NO_WINDOW if mask.window is None else 1 - mask.window, 0]], jnp.int32)
    if geometry is Geometry.POSITIONS:
        q_positions = jnp.arange(seq, dtype=jnp.int32)[None] if q_positions is None else q_positions
        kv_positions = jnp.arange(kv_seq, dtype=jnp.int32)[None] if kv_positions is None else kv_positions
    block = jax.tree.map(jnp.asarray, BlockMask(geometry, band, q_positions, kv_positions, **segments))
    axes = varying_axes(q, k, v, block)
    q, k, v, block = vary_over(axes, (fold_queries(q, k.shape[2]), fold_keys(k), fold_keys(v), block))
    with jax.named_scope("local_attention"):
        return unfold_partial(_attend(q, k, v, block, mask, q.dtype if out_dtype is None else jnp.dtype(out_dtype)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q: Array, k: Array, v: Array, block: BlockMask, mask: Mask, out_dtype: jnp.dtype) -> Partial:
    return _attend_forward(q, k, v, block, mask, out_dtype)[0]


def _attend_forward(
    q: Array, k: Array, v: Array, block: BlockMask, mask: Mask, out_dtype: jnp.dtype
) -> tuple[Partial, tuple]:
    kept = named(Partial(*kernel_of_blocks(q, block).forward(q, k, v, block, mask)), out_dtype)
    return Partial(kept.out.astype(out_dtype), kept.lse), (q, k, v, block, kept)


def _attend_backward(mask: Mask, out_dtype: jnp.dtype, residuals: tuple, cotangent: Partial) -> tuple:
    q, k, v, block, partial = residuals
    kernel = kernel_of_blocks(q, block)
    assert kernel.backward is not None, f"kernel {kernel.name} has no gradients"
    dq, dk, dv = kernel.backward(
        q, k, v, block, mask, partial.lse, delta(partial, cotangent), cotangent.out.astype(q.dtype)
    )
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def named(partial: Partial, dtype: DTypeLike) -> Partial:
    """What to keep of a result `[... seq head_dim]` that is returned in `dtype`, marked for remat policies.

    The gradients of scores are small differences of d_out . v and d_out . out. In a row that sees a few keys they lose
    half of bfloat16's digits where out is kept as rounded as it is returned; over many rows these errors drown. So out
    is kept wide where that is no more than a tile.

    Works only inside a custom forward rule, on the very values that it keeps: named outside, they are saved and the
    rule runs again all the same.
    """
    out = partial.out if partial.out.shape[-2] <= Q_TILE else partial.out.astype(dtype)
    return Partial(checkpoint_name(out, OUT_NAME), checkpoint_name(partial.lse, LSE_NAME))


def delta(partial: Partial, cotangent: Partial) -> Float[Array, "*rows"]:
    """rowsum(d_out * out) - d_lse: what the weights' gradients are measured from; 0 where a row saw no key.

    The gradient of a score is weight * (d_out . v - delta) (arXiv 2205.14135, appendix B.2); lse, the log of the sum of
    exponentiated scores, adds weight * d_lse.
    """
    dtype = statistics_dtype(partial.out.dtype)
    inner = jnp.sum(cotangent.out.astype(dtype) * partial.out.astype(dtype), axis=-1)
    return jnp.where(partial.lse > -jnp.inf, inner - cotangent.lse, 0)


def fold_queries(
    q: Float[Array, "batch seq heads head_dim"], kv_heads: int
) -> Float[Array, "batch kv_heads group seq head_dim"]:
    """Heads grouped by the key head that serves them, outside the sequence: the order of kernels."""
    batch, seq, heads, head_dim = q.shape
    return q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)


def fold_keys(k: Float[Array, "batch kv_seq kv_heads head_dim"]) -> Float[Array, "batch kv_heads kv_seq head_dim"]:
    """Heads outside the sequence."""
    return k.swapaxes(1, 2)


def unfold_partial(partial: Partial) -> Partial:
    """From kernels' order back to `[batch seq heads head_dim]` and `[batch seq heads]`."""
    batch, kv_heads, group, seq, head_dim = partial.out.shape
    out = partial.out.transpose(0, 3, 1, 2, 4).reshape(batch, seq, kv_heads * group, head_dim)
    return Partial(out, partial.lse.transpose(0, 3, 1, 2).reshape(batch, seq, kv_heads * group))
