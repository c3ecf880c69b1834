"""Local attention in plain XLA operations, a tile of queries against a tile of keys at a time.

The softmax over key tiles is the running one of arXiv 1805.02867 and 2205.14135; the backward pass recomputes the
weights as exp(score - lse), which needs no maximum (arXiv 2205.14135, algorithm 4). Memory in addition to inputs
and results is that of a few tiles.

What makes it fast on a CPU: groups are folded into rows, so each tile is one plain matrix product a key head; no
product contracts the first dim of its left operand; tiles that no query sees are never visited, and only those that
need it are masked. Weights and gradients of scores stay in the statistics' dtype: rounded to bfloat16 they would add as
much error as the inputs hold, and save this backend no time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from treering.layers.attention.kernels.block_mask import BlockMask
from treering.layers.attention.kernels.tiles import Tiles, Visits
from treering.layers.attention.mask import Mask
from treering.layers.attention.partial import statistics_dtype
from treering.layers.attention.varying import vary_over, varying_axes

_BY_LAST_DIMS = (((2,), (2,)), ((0,), (0,)))
_PLAIN = (((2,), (1,)), ((0,), (0,)))


def forward(
    q: Float[Array, "batch kv_heads group seq head_dim"],
    k: Float[Array, "batch kv_heads kv_seq head_dim"],
    v: Float[Array, "batch kv_heads kv_seq head_dim"],
    block: BlockMask,
    mask: Mask,
) -> tuple[Float[Array, "batch kv_heads group seq head_dim"], Float[Array, "batch kv_heads group seq"]]:
    """Output and log-sum-exp, as the contract of `layers.attention.kernels` says."""
    if _rows_differ(block):
        return _row_by_row(lambda q, k, v, block: forward(q, k, v, block, mask), (q, k, v, block))
    tiles, scale = Tiles(q, k, block, mask), _Scale(q, mask)
    dtype = statistics_dtype(q.dtype)
    axes = varying_axes(q, k, v, block)
    keys, values = tiles.fold_kv(k), tiles.fold_kv(v)

    def tile(args):
        i, queries = args
        visits = tiles.visits(i)

        def visit(n, carry, masked):
            peak, total, acc = carry
            j = visits.index(n)
            scores = scale.scores(_dot(queries, tiles.kv_tile(keys, j), _BY_LAST_DIMS, dtype))
            if masked:
                scores = jnp.where(tiles.seen(i, j), tiles.unfold_rows(scores), -jnp.inf).reshape(scores.shape)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            # The barrier keeps XLA from computing the exponentials a second time for their sum.
            weights = lax.optimization_barrier(jnp.exp(scores - new_peak[..., None]))
            fade = jnp.exp(peak - new_peak)
            total = total * fade + jnp.sum(weights, axis=-1)
            product = _dot(weights, tiles.kv_tile(values, j).astype(dtype), _PLAIN, dtype)
            return new_peak, total, acc * fade[..., None] + product

        rows = queries.shape[:-1]
        # Half the least finite number: below any score, and still finite when another is subtracted.
        start = (
            jnp.full(rows, jnp.finfo(dtype).min / 2, dtype),
            jnp.zeros(rows, dtype),
            jnp.zeros(queries.shape, dtype),
        )
        peak, total, acc = _fold(visits, visit, vary_over(axes, start))
        some = total > 0
        safe = jnp.where(some, total, 1)
        return acc / safe[..., None], jnp.where(some, peak + jnp.log(safe), -jnp.inf)

    out, lse = lax.map(tile, (jnp.arange(tiles.q_tiles), tiles.fold_q(scale.queries(q))))
    return tiles.unfold_q(out), tiles.unfold_q(lse)


def backward(
    q: Float[Array, "batch kv_heads group seq head_dim"],
    k: Float[Array, "batch kv_heads kv_seq head_dim"],
    v: Float[Array, "batch kv_heads kv_seq head_dim"],
    block: BlockMask,
    mask: Mask,
    lse: Float[Array, "batch kv_heads group seq"],
    delta: Float[Array, "batch kv_heads group seq"],
    d_out: Float[Array, "batch kv_heads group seq head_dim"],
) -> tuple[
    Float[Array, "batch kv_heads group seq head_dim"],
    Float[Array, "batch kv_heads kv_seq head_dim"],
    Float[Array, "batch kv_heads kv_seq head_dim"],
]:
    """Gradients of q, k and v from these pairs, as the contract of `layers.attention.kernels` says."""
    if _rows_differ(block):

        def of_row(q, k, v, block, lse, delta, d_out):
            return backward(q, k, v, block, mask, lse, delta, d_out)

        return _row_by_row(of_row, (q, k, v, block, lse, delta, d_out))
    tiles, scale = Tiles(q, k, block, mask), _Scale(q, mask)
    dtype = statistics_dtype(q.dtype)
    axes = varying_axes(q, k, v, block, lse, delta, d_out)
    keys, values = tiles.fold_kv(k), tiles.fold_kv(v)
    # The barriers around turned keys and gradients keep XLA from folding the transposes into the product, which would
    # then contract its left operand's first dim.
    keys_turned = lax.optimization_barrier(keys.swapaxes(1, 2))
    # A row without keys, like the padding of a last tile, gets weight exp(-inf) = 0 everywhere.
    lse = tiles.fold_q(jnp.where(lse > -jnp.inf, lse, jnp.inf), fill=jnp.inf)

    def tile(grads, args):
        i, queries, d_outs, lses, deltas = args
        visits = tiles.visits(i)

        def visit(n, carry, masked):
            # Scores and all that follows from them are [kv tile, rows], so that no product needs a transposed operand.
            dq_turned, dk, dv = carry
            j = visits.index(n)
            scores, slope = scale.scores_and_slope(_dot(tiles.kv_tile(keys, j), queries, _BY_LAST_DIMS, dtype))
            weights = jnp.exp(scores - lses[:, None, :])
            if masked:
                weights = jnp.where(tiles.seen_turned(i, j), tiles.unfold_columns(weights), 0).reshape(weights.shape)
            weights = lax.optimization_barrier(weights)
            d_weights = _dot(tiles.kv_tile(values, j), d_outs, _BY_LAST_DIMS, dtype)
            d_scores = lax.optimization_barrier(weights * (d_weights - deltas[:, None, :]) * slope)
            dv = tiles.add_to_kv_tile(dv, j, _dot(weights, d_outs.astype(dtype), _PLAIN, dtype))
            dk = tiles.add_to_kv_tile(dk, j, _dot(d_scores, queries.astype(dtype), _PLAIN, dtype))
            return dq_turned + _dot(tiles.kv_tile(keys_turned, j, dim=2).astype(dtype), d_scores, _PLAIN, dtype), dk, dv

        rows, head_dim = queries.shape[1:]
        dq_turned = vary_over(axes, jnp.zeros((queries.shape[0], head_dim, rows), dtype))
        dq_turned, *grads = _fold(visits, visit, (dq_turned, *grads))
        return tuple(grads), lax.optimization_barrier(dq_turned).swapaxes(1, 2)

    per_tile = (
        jnp.arange(tiles.q_tiles),
        tiles.fold_q(scale.queries(q)),
        tiles.fold_q(d_out),
        lse,
        tiles.fold_q(delta),
    )
    zeros = vary_over(axes, jnp.zeros(keys.shape, dtype))
    (dk, dv), dq = lax.scan(tile, (zeros, zeros), per_tile)
    return tiles.unfold_q(dq) * scale.factor, tiles.unfold_kv(dk) * scale.left, tiles.unfold_kv(dv)


def computed_pairs(q_shape: tuple[int, ...], kv_seq: int, block: BlockMask, mask: Mask) -> Int[Array, ""]:
    """How many pairs of a query and a key the kernel computes for one head of all rows, tiles of padding included."""
    rows, kv_heads, _, _, head_dim = q_shape
    q = jax.ShapeDtypeStruct((1, *q_shape[1:]), jnp.float32)
    k = jax.ShapeDtypeStruct((1, kv_heads, kv_seq, head_dim), jnp.float32)
    total = jnp.zeros((), jnp.int32)
    for row in range(rows):
        own = jax.tree.map(lambda x: x[min(row, x.shape[0] - 1)][None], block)  # noqa: B023
        tiles = Tiles(q, k, own, mask)
        visits = [jnp.asarray(tiles.visits(jnp.asarray(i)).all) for i in range(tiles.q_tiles)]
        total += jnp.sum(jnp.stack(visits)) * tiles.q_tile * tiles.kv_tile_size
    return total


def _fold(visits: Visits, visit: Callable, carry: tuple) -> tuple:
    """`visit(n, carry, masked)` over all visits of a tile, those that need no mask first."""
    if not (isinstance(visits.full, int) and visits.full == 0):
        carry = lax.fori_loop(0, visits.full, lambda n, carry: visit(n, carry, False), carry)
    if not (isinstance(visits.full, int) and visits.full == visits.all):
        carry = lax.fori_loop(visits.full, visits.all, lambda n, carry: visit(n, carry, True), carry)
    return carry


def _dot(a: Array, b: Array, dims: tuple, dtype: jnp.dtype) -> Array:
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _rows_differ(block: BlockMask) -> bool:
    return any(x.shape[0] > 1 for x in jax.tree.leaves(block))


def _row_by_row(function: Callable, rows: tuple) -> tuple:
    """Rows of the batch in turn, each with its own documents: together, a tile would be visited for any row's sake."""
    batch = rows[0].shape[0]
    wide = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), rows)
    done = lax.map(lambda row: function(*jax.tree.map(lambda x: x[None], row)), wide)
    return jax.tree.map(lambda x: x[:, 0], done)


class _Scale:
    """How raw products of queries and keys become scores, and the factors that the gradients take from it.

    Float32 and wider queries are scaled beforehand; narrower ones would lose bits, so their scores are scaled instead.
    """

    def __init__(self, q: Array, mask: Mask):
        self.factor = mask.score_scale(q.shape[-1])
        self.before = q.dtype == statistics_dtype(q.dtype)
        self.left = 1.0 if self.before else self.factor
        self.cap = mask.softcap

    def queries(self, q: Array) -> Array:
        return q * self.factor if self.before else q

    def scores(self, products: Array) -> Array:
        return self.scores_and_slope(products)[0]

    def scores_and_slope(self, products: Array) -> tuple[Array, Array | float]:
        """Scores, and their derivative by the scaled products (1 without a cap)."""
        scores = products * self.left
        if self.cap is None:
            return scores, 1.0
        bent = jnp.tanh(scores / self.cap)
        return self.cap * bent, 1 - bent * bent
