"""Tree attention: partial results of the context axis, joined in one message (arXiv 2408.04093, algorithm 3).

The paper reduces maxima, numerators and denominators in three all-reduces. Here each device sends its output and log of
the sum packed into one message, and the merge of `layers.attention.partial` runs where the parts arrive:

- `all_to_all`: each device receives its part of the heads, the input layout of an output projection sharded over
  (tensor, context) (arXiv 2507.07120);
- `all_gather`: every device receives everything and joins it in rank order: replicated, equal to the last bit;
- `two_level`, `two_level_gather`: first within groups of `inner` neighbours (a node), then across groups, so that slow
  links carry parts already joined. The first ends like `all_to_all`, the second like `all_gather`.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from treering.layers.attention.checks import check_mask, check_shapes
from treering.layers.attention.distributed.arguments import AttentionMesh, TokenData
from treering.layers.attention.distributed.exchange import Route, exchange
from treering.layers.attention.distributed.global_arrays import ShardMapCall, with_auto_axes_if_eager
from treering.layers.attention.distributed.tree_schemes import (
    HEAD_SHARDED,
    Scheme,
    check_scheme,
    choose_scheme,
    wire_dtype_or,
)
from treering.layers.attention.local import local_attention
from treering.layers.attention.mask import Mask
from treering.layers.attention.partial import Partial, merge_stacked, statistics_dtype
from treering.layers.attention.varying import vary_over


def tree_combine(
    partial: Partial,
    axis: str,
    *,
    scheme: Scheme,
    inner: int | None = None,
    wire_dtype: DTypeLike | None = None,
) -> Partial:
    """Joins the partial results of the devices along mesh axis `axis`. For use inside `shard_map`.

    `partial.out` is `[batch seq heads head_dim]`, `partial.lse` `[batch seq heads]`, heads those of the tensor shard.
    The schemes of `HEAD_SHARDED` return heads / p of them, in rank order, so that `out_heads` is sharded as
    `PartitionSpec(("tensor", "context"))`; the others return all heads, replicated over the axis for `check_vma`.
    out travels as `wire_dtype` (None: as it is) and comes back, merged, in the statistics' dtype; lse always travels
    in full. A row that no device has a key for stays (0, -inf). One device with a scheme of `HEAD_SHARDED` sends
    nothing. Raises ValueError where the scheme does not fit (`check_scheme`).
    """
    p, heads = lax.axis_size(axis), partial.out.shape[2]
    check_scheme(scheme, p=p, heads=heads, inner=inner)
    wire = wire_dtype_or(partial.out.dtype, wire_dtype)
    lse = partial.lse.astype(jnp.promote_types(partial.lse.dtype, statistics_dtype(wire)))
    if p == 1 and scheme in HEAD_SHARDED:
        return Partial(partial.out.astype(lse.dtype), lse)
    part = vary_over(frozenset({axis}), Partial(partial.out.astype(wire), lse))
    with jax.named_scope("tree_combine"):
        if scheme == "all_to_all":
            return merge_stacked(exchange(part, Route(axis, gather=False)))
        if scheme == "all_gather":
            return merge_stacked(exchange(part, Route(axis, gather=True)))
        inner = p if inner is None else inner
        outer = p // inner
        near = tuple(tuple(range(first, first + inner)) for first in range(0, p, inner))
        if scheme == "two_level":
            # A device keeps the heads of its rank, group * inner + place in the group: heads go out sorted by place.
            part = jax.tree.map(lambda x: _swap_head_groups(x, outer, inner), part)
            part = _joined(exchange(part, Route(axis, gather=False, groups=near)), wire)
            far = tuple(tuple(range(first, p, inner)) for first in range(inner))
            return merge_stacked(exchange(part, Route(axis, gather=False, groups=far)))
        part = _pad_heads(part, -heads % inner)
        part = _joined(exchange(part, Route(axis, gather=False, groups=near)), wire)
        parts = exchange(part, Route(axis, gather=True))
        joined = merge_stacked(jax.tree.map(lambda x: x.reshape(outer, inner, *x.shape[1:]), parts))
        return jax.tree.map(lambda x: _heads_together(x)[:, :, :heads], joined)


def _joined(parts: Partial, wire: jnp.dtype) -> Partial:
    joined = merge_stacked(parts)
    return Partial(joined.out.astype(wire), joined.lse)


def _swap_head_groups(
    x: Shaped[Array, "batch seq heads *d"], outer: int, inner: int
) -> Shaped[Array, "batch seq heads *d"]:
    """Heads ordered by (outer, inner) rank, ordered by (inner, outer) rank."""
    shape = x.shape
    return x.reshape(*shape[:2], outer, inner, -1, *shape[3:]).swapaxes(2, 3).reshape(shape)


def _pad_heads(part: Partial, count: int) -> Partial:
    """`count` more heads, which saw no key."""
    if count == 0:
        return part
    empty = Partial.empty((*part.lse.shape[:2], count), part.out.shape[-1], part.out.dtype)
    pad = Partial(empty.out, empty.lse.astype(part.lse.dtype))
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=2), part, pad)


def _heads_together(x: Shaped[Array, "inner batch seq shared *d"]) -> Shaped[Array, "batch seq heads *d"]:
    """Parts of the heads along the first dim, in rank order, side by side."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def tree_partial(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch kv_seq kv_heads head_dim"],
    v: Float[Array, "batch kv_seq kv_heads head_dim"],
    *,
    on: AttentionMesh | Mesh,
    mask: Mask = Mask(),
    tokens: TokenData | None = None,
    q_tokens: TokenData | None = None,
    scheme: Scheme | Literal["auto"] = "auto",
    inner: int | None = None,
    head_sharded: bool = True,
    wire_dtype: DTypeLike | None = None,
) -> Partial:
    """`tree_attention` before its output is rounded: out in the statistics' dtype, and lse."""
    on, tokens = with_auto_axes_if_eager(AttentionMesh.of(on), q, k, v), tokens or TokenData()
    q_tokens = q_tokens or TokenData()
    check_shapes(q, k, v)
    check_mask(mask)
    batch, seq, heads, head_dim = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    on.check(batch=batch, heads=heads, kv_heads=kv_heads)
    tokens.check(batch, kv_seq, "kv ")
    q_tokens.check(batch, seq, "q_")
    if (tokens.segments is None) != (q_tokens.segments is None):
        raise ValueError(
            "segments of tokens and of q_tokens: give both or neither (all 1 where one side is one document)"
        )
    if tokens.positions is not None and q_tokens.positions is None and mask.causal:
        raise ValueError("positions of keys without those of q_tokens: a causal mask needs the position of each query")
    if tokens.order != "contiguous" and tokens.positions is None:
        raise ValueError(f"keys in {tokens.order} order without positions: give their positions")
    if q_tokens.positions is None and mask.causal and seq > kv_seq:
        raise ValueError(
            f"seq {seq} queries are the last of kv_seq {kv_seq} keys by default, and there are more: give positions in "
            "q_tokens"
        )
    wide = statistics_dtype(q.dtype)
    wire = wire_dtype_or(wide, wire_dtype)
    local_heads = heads // on.parts(on.head_axes)
    if scheme == "auto":
        scheme = choose_scheme(
            p=on.size,
            batch=batch // on.parts(on.batch_axes),
            seq=seq,
            heads=local_heads,
            head_dim=head_dim,
            itemsize=wire.itemsize,
            inner=inner,
            head_sharded=head_sharded,
        )
    check_scheme(scheme, p=on.size, heads=local_heads, inner=inner)
    if scheme in HEAD_SHARDED and not head_sharded:
        raise ValueError(f"scheme {scheme!r} shards heads over {on.axis}, and head_sharded is False: take 'all_gather'")

    padding = -kv_seq % on.size
    newest_sees_all = mask.window is None and q_tokens.positions is None and (seq == 1 or not mask.causal)
    by_data = not newest_sees_all or padding or tokens.positions is not None or tokens.segments is not None
    if by_data:
        q_tokens = q_tokens.positioned(batch, kv_seq - seq, kv_seq)
        tokens = tokens.positioned(batch, 0, kv_seq).padded(padding)
        k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (k, v))
    else:
        mask = dataclasses.replace(mask, causal=False)
        tokens = q_tokens = TokenData()

    keys, queries = on.spec("batch", "seq", "heads"), on.spec("batch", None, "heads")
    out_heads = (*(on.head_axes or ()), on.axis) if scheme in HEAD_SHARDED else on.head_axes
    call = ShardMapCall(
        _tree_on_device,
        (on.axis, mask, scheme, inner, wide, wire),
        on.mesh,
        in_specs=(queries, keys, keys, on.spec("batch"), on.spec("batch", "seq")),
        out_specs=PartitionSpec(on.batch_axes, None, out_heads),
    )
    return call(q, k, v, q_tokens, tokens)


def _tree_on_device(settings: tuple, q: Array, k: Array, v: Array, q_tokens: TokenData, tokens: TokenData) -> Partial:
    axis, mask, scheme, inner, wide, wire = settings
    partial = local_attention(
        q,
        k,
        v,
        mask=mask,
        q_positions=q_tokens.positions,
        kv_positions=tokens.positions,
        q_segments=q_tokens.segments,
        kv_segments=tokens.segments,
        out_dtype=wide,
    )
    return tree_combine(partial, axis, scheme=scheme, inner=inner, wire_dtype=wire)


def tree_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch kv_seq kv_heads head_dim"],
    v: Float[Array, "batch kv_seq kv_heads head_dim"],
    *,
    on: AttentionMesh | Mesh,
    mask: Mask = Mask(),
    tokens: TokenData | None = None,
    q_tokens: TokenData | None = None,
    scheme: Scheme | Literal["auto"] = "auto",
    inner: int | None = None,
    head_sharded: bool = True,
    wire_dtype: DTypeLike | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention of queries that every device of an axis holds over keys and values that are sharded along it.

    `on` is a mesh whose axis "context" splits the keys, or an `AttentionMesh` that names other axes. Arrays are global:
    k and v sharded by tokens, q replicated over the axis. A kv_seq that the axis does not divide is padded here.
    `tokens` are those of the keys, in any order where they have positions (-1 an empty slot, segment 0 padding),
    `q_tokens` those of the queries; without any, keys are in token order and the queries are the last of them. Arrays
    `[batch heads seq head_dim]` must be transposed first: where seq and heads are equal nothing shows the mistake.
    Outside of jit, arrays are put on the mesh first.

    Each device attends over its own keys, and one message joins the results (arXiv 2408.04093, algorithm 3, one
    collective instead of three). `scheme` "auto" chooses by `choose_scheme`; `inner` says how many neighbours on the
    axis share fast links. The result's heads are sharded over (head_axes, axis) with the schemes of `HEAD_SHARDED`,
    which "auto" takes only if `head_sharded`; else it is replicated over the axis. Outputs travel as `wire_dtype`: None
    for the statistics' dtype, with which an error in bfloat16 does not grow with devices; bfloat16 halves the bytes,
    for an error up to a half larger.

    Raises ValueError where shapes, axes, sizes or the scheme do not fit, naming what would.
    """
    return tree_partial(
        q,
        k,
        v,
        on=on,
        mask=mask,
        tokens=tokens,
        q_tokens=q_tokens,
        scheme=scheme,
        inner=inner,
        head_sharded=head_sharded,
        wire_dtype=wire_dtype,
    ).out.astype(q.dtype)
