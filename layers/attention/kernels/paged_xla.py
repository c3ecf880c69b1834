"""Attention of queries against the paged KV cache of one device, in plain XLA operations.

The order in memory within a page is known here and in `layers.operations.pool` alone: `kv_heads head_dim kv_seq` for
keys, `kv_heads kv_seq head_dim` for values. So both are the right operand of their product without a transpose.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from treering.layers.attention.mask import Mask, visible
from treering.layers.attention.partial import Partial, statistics_dtype

MANY_QUERIES = 128
"""Queries per row from which a step takes `KEY_TILE` keys: larger products, for a copy of the keys. Else a page."""
KEY_TILE = 512


def attend_pages(
    q: Float[Array, "batch seq heads head_dim"],
    keys: Float[Array, "layers pages kv_heads head_dim slots"],
    values: Float[Array, "layers pages kv_heads slots head_dim"],
    layer: Int[Array, ""],
    table: Int[Array, "batch row_pages"],
    positions: Int[Array, "batch seq"],
    rank: Int[Array, ""],
    devices: int,
    mask: Mask,
) -> Partial:
    """Each row's queries over this device's slots of the row's filled pages.

    The filled pages of all rows make one list of work, taken `batch` pages at a time: rows of any lengths share the
    steps, and an empty page is never read. Where queries are many an item is several consecutive pages of a
    row instead.
    """
    batch, seq, heads, head_dim = q.shape
    _, _, kv_heads, slots, _ = values.shape
    group = heads // kv_heads
    wide = statistics_dtype(q.dtype)
    scale = mask.score_scale(head_dim)
    # One matrix a key head: [batch, kv_heads, group x seq, head_dim]. Scaled here where that loses no digits.
    scaled_early = q.dtype == wide
    grouped = (q * scale if scaled_early else q).reshape(batch, seq, kv_heads, group, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * seq, head_dim)
    q_positions = jnp.tile(positions, (1, group))

    # Pages up to that of this device's newest token; with a window, from that of the oldest key in sight.
    newest = jnp.max(positions, axis=1)
    last = jnp.where(newest >= rank, (newest - rank) // devices // slots + 1, 0)
    first = jnp.zeros_like(last)
    if mask.window is not None:
        oldest = jnp.min(jnp.where(positions >= 0, positions, newest[:, None]), axis=1)
        first = jnp.minimum(jnp.maximum(oldest - mask.window + 1, 0) // (slots * devices), last)
    together = min(max(KEY_TILE // slots, 1), table.shape[1]) if seq >= MANY_QUERIES else 1
    steps = -(-(last - first) // together)
    ends = jnp.cumsum(steps)
    starts = ends - steps

    def step(index, carry):
        peak, total, out = carry
        item = index * batch + jnp.arange(batch)
        row = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), batch - 1)
        begin = first[row] + (item - starts[row]) * together
        row_page = begin[:, None] + jnp.arange(together)[None, :]
        page = table[row[:, None], jnp.clip(row_page, 0, table.shape[1] - 1)]
        k = jnp.moveaxis(keys[layer, page].astype(q.dtype), 1, 3).reshape(batch, kv_heads, head_dim, -1)
        v = jnp.moveaxis(values[layer, page].astype(q.dtype), 1, 2).reshape(batch, kv_heads, -1, head_dim)
        scores = jnp.einsum("bkqd,bkds->bkqs", grouped[row], k, preferred_element_type=wide)
        if not scaled_early:
            scores = scores * scale
        if mask.softcap is not None:
            scores = mask.softcap * jnp.tanh(scores / mask.softcap)
        kv_slots = row_page[:, :, None] * slots + jnp.arange(slots)[None, None, :]
        kv_positions = kv_slots.reshape(batch, -1) * devices + rank
        # Slots not yet written, and pages past the last, are after every query's position: causality hides them too.
        seen = visible(mask, q_positions[row], kv_positions) & (item < ends[-1])[:, None, None]
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        # Items of one row meet in its running maximum and sums.
        mine = row[:, None] == jnp.arange(batch)[None, :]
        highest = jnp.max(scores, axis=-1)
        higher = jnp.maximum(peak, jnp.max(jnp.where(mine[:, :, None, None], highest[:, None], -jnp.inf), axis=0))
        safe = jnp.where(higher > -jnp.inf, higher, 0)
        weights = jnp.exp(scores - safe[row][..., None])
        kept = jnp.exp(peak - safe)
        joined = mine.astype(wide)
        part = jnp.einsum("bkqs,bksd->bkqd", weights.astype(q.dtype), v, preferred_element_type=wide)
        total = kept * total + jnp.einsum("br,bkq->rkq", joined, jnp.sum(weights, axis=-1))
        return higher, total, kept[..., None] * out + jnp.einsum("br,bkqd->rkqd", joined, part)

    rows = (batch, kv_heads, group * seq)
    start = jax.tree.map(
        lambda x: lax.pcast(x, tuple(jax.typeof(keys).manual_axis_type.varying), to="varying"),
        (jnp.full(rows, -jnp.inf, wide), jnp.zeros(rows, wide), jnp.zeros((*rows, head_dim), wide)),
    )
    peak, total, out = lax.fori_loop(0, -(-ends[-1] // batch), step, start)
    some = total > 0
    safe = jnp.where(some, total, 1)
    lse = jnp.where(some, jnp.where(some, peak, 0) + jnp.log(safe), -jnp.inf)
    out = (out / safe[..., None]).reshape(batch, kv_heads, group, seq, head_dim).transpose(0, 3, 1, 2, 4)
    lse = lse.reshape(batch, kv_heads, group, seq).transpose(0, 3, 1, 2)
    return Partial(out.reshape(batch, seq, heads, head_dim), lse.reshape(batch, seq, heads))
