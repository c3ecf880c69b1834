"""Local attention in plain XLA operations, a tile of queries against a tile of keys at a time.

The softmax over key tiles is the running one of arXiv 1805.02867 and 2205.14135; the backward pass recomputes the
weights as exp(score - lse), which needs no maximum (arXiv 2205.14135, algorithm 4). Memory beside the inputs and
results is that of a few tiles.

What makes it fast on a CPU: groups are folded into rows, so each tile is one plain matrix product a key head; no
product contracts the first dim of its left operand; tiles that no query sees are never visited, and only those that
need it are masked. Weights and gradients of scores stay in the statistics' dtype: rounded to bfloat16 they would add as
much error as the inputs hold, and save this backend no time.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from layers.kernels.pairs import Pairs
from layers.mask import BlockClass, Bounds, Mask, classify, visible
from layers.partial import statistics_dtype
from layers.varying import vary_over, varying_axes

Q_TILE, KV_TILE = 256, 256

_BY_LAST_DIMS = (((2,), (2,)), ((0,), (0,)))
_PLAIN = (((2,), (1,)), ((0,), (0,)))


def forward(
    q: Float[Array, "batch kv_heads group seq head_dim"],
    k: Float[Array, "batch kv_heads kv_seq head_dim"],
    v: Float[Array, "batch kv_heads kv_seq head_dim"],
    pairs: Pairs,
    mask: Mask,
) -> tuple[Float[Array, "batch kv_heads group seq head_dim"], Float[Array, "batch kv_heads group seq"]]:
    """Output and log-sum-exp, as the contract of `layers.kernels` says."""
    if _rows_differ(pairs):
        return _row_by_row(lambda row: forward(*row, mask), (q, k, v, pairs))
    plan, scale = _Plan(q, k, pairs, mask), _Scale(q, mask)
    dtype = statistics_dtype(q.dtype)
    axes = varying_axes(q, k, v, pairs)
    keys, values = plan.fold_kv(k), plan.fold_kv(v)

    def tile(args):
        i, queries = args
        visits = plan.visits(i)

        def block(n, carry, masked):
            peak, total, acc = carry
            j = visits.index(n)
            scores = scale.scores(_dot(queries, plan.kv_tile(keys, j), _BY_LAST_DIMS, dtype))
            if masked:
                scores = jnp.where(plan.seen(i, j), plan.unfold_rows(scores), -jnp.inf).reshape(scores.shape)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            # The barrier keeps XLA from computing the exponentials a second time for their sum.
            weights = lax.optimization_barrier(jnp.exp(scores - new_peak[..., None]))
            fade = jnp.exp(peak - new_peak)
            total = total * fade + jnp.sum(weights, axis=-1)
            product = _dot(weights, plan.kv_tile(values, j).astype(dtype), _PLAIN, dtype)
            return new_peak, total, acc * fade[..., None] + product

        rows = queries.shape[:-1]
        # Half the least finite number: below any score, and still finite when another is subtracted.
        start = (
            jnp.full(rows, jnp.finfo(dtype).min / 2, dtype),
            jnp.zeros(rows, dtype),
            jnp.zeros(queries.shape, dtype),
        )
        peak, total, acc = visits.fold(block, vary_over(axes, start))
        some = total > 0
        safe = jnp.where(some, total, 1)
        return acc / safe[..., None], jnp.where(some, peak + jnp.log(safe), -jnp.inf)

    out, lse = lax.map(tile, (jnp.arange(plan.q_tiles), plan.fold_q(scale.queries(q))))
    return plan.unfold_q(out), plan.unfold_q(lse)


def backward(
    q: Float[Array, "batch kv_heads group seq head_dim"],
    k: Float[Array, "batch kv_heads kv_seq head_dim"],
    v: Float[Array, "batch kv_heads kv_seq head_dim"],
    pairs: Pairs,
    mask: Mask,
    lse: Float[Array, "batch kv_heads group seq"],
    delta: Float[Array, "batch kv_heads group seq"],
    d_out: Float[Array, "batch kv_heads group seq head_dim"],
) -> tuple[
    Float[Array, "batch kv_heads group seq head_dim"],
    Float[Array, "batch kv_heads kv_seq head_dim"],
    Float[Array, "batch kv_heads kv_seq head_dim"],
]:
    """Gradients of q, k and v from these pairs, as the contract of `layers.kernels` says."""
    if _rows_differ(pairs):
        return _row_by_row(lambda row: backward(*row[:4], mask, *row[4:]), (q, k, v, pairs, lse, delta, d_out))
    plan, scale = _Plan(q, k, pairs, mask), _Scale(q, mask)
    dtype = statistics_dtype(q.dtype)
    axes = varying_axes(q, k, v, pairs, lse, delta, d_out)
    keys, values = plan.fold_kv(k), plan.fold_kv(v)
    # The barriers around turned keys and gradients keep XLA from folding the transposes into the product, which would
    # then contract its left operand's first dim.
    keys_turned = lax.optimization_barrier(keys.swapaxes(1, 2))
    # A row without keys, like the padding of a last tile, gets weight exp(-inf) = 0 everywhere.
    lse = plan.fold_q(jnp.where(lse > -jnp.inf, lse, jnp.inf), fill=jnp.inf)

    def tile(grads, args):
        i, queries, d_outs, lses, deltas = args
        visits = plan.visits(i)

        def block(n, carry, masked):
            # Scores and all that follows from them are [kv tile, rows], so that no product needs a transposed operand.
            dq_turned, dk, dv = carry
            j = visits.index(n)
            scores, slope = scale.scores_and_slope(_dot(plan.kv_tile(keys, j), queries, _BY_LAST_DIMS, dtype))
            weights = jnp.exp(scores - lses[:, None, :])
            if masked:
                weights = jnp.where(plan.seen_turned(i, j), plan.unfold_columns(weights), 0).reshape(weights.shape)
            weights = lax.optimization_barrier(weights)
            d_weights = _dot(plan.kv_tile(values, j), d_outs, _BY_LAST_DIMS, dtype)
            d_scores = lax.optimization_barrier(weights * (d_weights - deltas[:, None, :]) * slope)
            dv = plan.add_to_kv_tile(dv, j, _dot(weights, d_outs.astype(dtype), _PLAIN, dtype))
            dk = plan.add_to_kv_tile(dk, j, _dot(d_scores, queries.astype(dtype), _PLAIN, dtype))
            return dq_turned + _dot(plan.kv_tile(keys_turned, j, dim=2).astype(dtype), d_scores, _PLAIN, dtype), dk, dv

        rows, head_dim = queries.shape[1:]
        dq_turned = vary_over(axes, jnp.zeros((queries.shape[0], head_dim, rows), dtype))
        dq_turned, *grads = visits.fold(block, (dq_turned, *grads))
        return tuple(grads), lax.optimization_barrier(dq_turned).swapaxes(1, 2)

    tiles = (jnp.arange(plan.q_tiles), plan.fold_q(scale.queries(q)), plan.fold_q(d_out), lse, plan.fold_q(delta))
    zeros = vary_over(axes, jnp.zeros(keys.shape, dtype))
    (dk, dv), dq = lax.scan(tile, (zeros, zeros), tiles)
    return plan.unfold_q(dq) * scale.factor, plan.unfold_kv(dk) * scale.left, plan.unfold_kv(dv)


def computed_pairs(q_shape: tuple[int, ...], kv_seq: int, pairs: Pairs, mask: Mask) -> Int[Array, ""]:
    """How many pairs of a query and a key the kernel computes for one row and head, tiles of padding included."""
    batch, kv_heads, _, _, head_dim = q_shape
    q = jax.ShapeDtypeStruct(q_shape, jnp.float32)
    plan = _Plan(q, jax.ShapeDtypeStruct((batch, kv_heads, kv_seq, head_dim), jnp.float32), pairs, mask)
    visits = sum(jnp.asarray(plan.visits(jnp.asarray(i)).all) for i in range(plan.q_tiles))
    return visits * plan.q_tile * plan.kv_tile_size


def _dot(a: Array, b: Array, dims: tuple, dtype: jnp.dtype) -> Array:
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _rows_differ(pairs: Pairs) -> bool:
    return any(x.shape[0] > 1 for x in jax.tree.leaves(pairs))


def _row_by_row(function: Callable, rows: tuple) -> tuple:
    """Rows of the batch in turn, each with its own documents: together, a tile would be visited for any row's sake."""
    batch = rows[0].shape[0]
    wide = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), rows)
    done = lax.map(lambda row: function(jax.tree.map(lambda x: x[None], row)), wide)
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


class _Visits(NamedTuple):
    """The key tiles that one query tile meets: visits 0 ... full need no mask, full ... all do."""

    index: Callable[[Int[Array, ""]], Int[Array, ""]]
    """The key tile of a visit."""
    full: int | Int[Array, ""]
    all: int | Int[Array, ""]

    def fold(self, block: Callable, carry: tuple) -> tuple:
        if not (isinstance(self.full, int) and self.full == 0):
            carry = lax.fori_loop(0, self.full, lambda n, carry: block(n, carry, False), carry)
        if not (isinstance(self.full, int) and self.full == self.all):
            carry = lax.fori_loop(self.full, self.all, lambda n, carry: block(n, carry, True), carry)
        return carry


class _Plan:
    """Cuts queries and keys into tiles, and knows which tiles meet. Both sides are padded to whole tiles.

    Folded queries are `[q_tiles rows group*q_tile ...]`, folded keys `[rows kv_tiles*kv_tile head_dim]`, where rows are
    those of batch and kv_heads together.
    """

    def __init__(self, q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, pairs: Pairs, mask: Mask):
        self.batch, self.kv_heads, self.group, self.seq = q.shape[:4]
        self.kv_seq = k.shape[2]
        self.pairs, self.mask = pairs, mask
        self.q_tile, self.q_tiles = _even_tiles(self.seq, Q_TILE)
        self.kv_tile_size, self.kv_tiles = _even_tiles(self.kv_seq, KV_TILE)
        if pairs.kind is BlockClass.DIAGONAL:
            assert self.seq == self.kv_seq, "a diagonal pair has as many keys as queries"
            self.kv_tile_size, self.kv_tiles = self.q_tile, self.q_tiles
        if pairs.kind is BlockClass.MIXED:
            # A padded query copies the last one, so that it widens no bounds; a padded key is an empty slot.
            q_side = _pad_to(pairs.q_positions[0], self.q_tiles * self.q_tile, mode="edge")
            kv_side = _pad_to(pairs.kv_positions[0], self.kv_tiles * self.kv_tile_size, constant_values=-1)
            self.q_positions = q_side.reshape(self.q_tiles, self.q_tile)
            self.kv_positions = kv_side.reshape(self.kv_tiles, self.kv_tile_size)
            self.q_segments = self.kv_segments = None
            if pairs.q_segments is not None:
                q_side = _pad_to(pairs.q_segments[0], self.q_tiles * self.q_tile, mode="edge")
                kv_side = _pad_to(pairs.kv_segments[0], self.kv_tiles * self.kv_tile_size)
                self.q_segments = q_side.reshape(self.q_tiles, self.q_tile)
                self.kv_segments = kv_side.reshape(self.kv_tiles, self.kv_tile_size)
            self.q_bounds = Bounds.of(self.q_positions, self.q_segments, slots=False)
            self.kv_bounds = Bounds.of(self.kv_positions, self.kv_segments, slots=True)

    def visits(self, i: Int[Array, ""]) -> _Visits:
        """What query tile `i` meets."""
        if self.pairs.kind is BlockClass.FULL:
            whole = self.kv_tiles * self.kv_tile_size == self.kv_seq
            return _Visits(lambda n: n, self.kv_tiles if whole else self.kv_tiles - 1, self.kv_tiles)
        if self.pairs.kind is BlockClass.DIAGONAL:
            return _Visits(lambda n: n, i, i + 1)
        classes = classify(self.mask, jax.tree.map(lambda x: x[i], self.q_bounds), self.kv_bounds)
        rank = jnp.where(classes == BlockClass.FULL, 0, jnp.where(classes == BlockClass.MIXED, 1, 2))
        order = jnp.argsort(rank, stable=True)
        full = jnp.sum(rank == 0, dtype=jnp.int32)
        return _Visits(lambda n: order[n], full, full + jnp.sum(rank == 1, dtype=jnp.int32))

    def seen(self, i: Int[Array, ""], j: Int[Array, ""]) -> Bool[Array, "1 1 q_tile kv_tile"]:
        """Which pairs of a masked visit count."""
        if self.pairs.kind is BlockClass.MIXED:
            segments = (None, None) if self.q_segments is None else (self.q_segments[i], self.kv_segments[j])
            return visible(self.mask, self.q_positions[i], self.kv_positions[j], *segments)[None, None]
        keys = j * self.kv_tile_size + jnp.arange(self.kv_tile_size)[None, :]
        last = i * self.q_tile + jnp.arange(self.q_tile)[:, None]
        if self.pairs.kind is BlockClass.FULL:
            last = jnp.full_like(last, self.kv_seq - 1)
        return (keys <= last)[None, None]

    def seen_turned(self, i: Int[Array, ""], j: Int[Array, ""]) -> Bool[Array, "1 kv_tile 1 q_tile"]:
        return jnp.moveaxis(self.seen(i, j), 3, 1)

    def unfold_rows(self, scores: Shaped[Array, "rows group_q kv_tile"]) -> Shaped[Array, "rows group q_tile kv_tile"]:
        return scores.reshape(-1, self.group, self.q_tile, scores.shape[-1])

    def unfold_columns(
        self, scores: Shaped[Array, "rows kv_tile group_q"]
    ) -> Shaped[Array, "rows kv_tile group q_tile"]:
        return scores.reshape(*scores.shape[:2], self.group, self.q_tile)

    def fold_q(self, x: Shaped[Array, "batch kv_heads group seq *d"], *, fill: float = 0) -> Array:
        x = _pad_to(x, self.q_tiles * self.q_tile, dim=3, constant_values=fill)
        x = x.reshape(self.batch * self.kv_heads, self.group, self.q_tiles, self.q_tile, *x.shape[4:])
        x = jnp.moveaxis(x, 2, 0)
        return x.reshape(*x.shape[:2], self.group * self.q_tile, *x.shape[4:])

    def unfold_q(self, x: Array) -> Shaped[Array, "batch kv_heads group seq *d"]:
        x = x.reshape(self.q_tiles, -1, self.group, self.q_tile, *x.shape[3:])
        x = jnp.moveaxis(x, 0, 2)
        x = x.reshape(self.batch, self.kv_heads, self.group, -1, *x.shape[4:])
        return x[:, :, :, : self.seq]

    def fold_kv(self, x: Float[Array, "batch kv_heads kv_seq head_dim"]) -> Array:
        x = x.reshape(-1, *x.shape[2:])
        return _pad_to(x, self.kv_tiles * self.kv_tile_size, dim=1)

    def unfold_kv(self, x: Array) -> Float[Array, "batch kv_heads kv_seq head_dim"]:
        return x[:, : self.kv_seq].reshape(self.batch, self.kv_heads, self.kv_seq, -1)

    def kv_tile(self, x: Array, j: Int[Array, ""], *, dim: int = 1) -> Array:
        return lax.dynamic_slice_in_dim(x, j * self.kv_tile_size, self.kv_tile_size, dim)

    def add_to_kv_tile(self, x: Array, j: Int[Array, ""], more: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, self.kv_tile(x, j) + more, j * self.kv_tile_size, 1)


def _even_tiles(length: int, limit: int) -> tuple[int, int]:
    """Size and number of the fewest tiles of at most `limit` tokens, as even as they come."""
    tiles = -(-length // limit)
    return -(-length // tiles), tiles


def _pad_to(x: Array, length: int, *, dim: int = 0, **how) -> Array:
    if x.shape[dim] == length:
        return x
    return jnp.pad(x, [(0, length - x.shape[dim]) if d == dim else (0, 0) for d in range(x.ndim)], **how)
