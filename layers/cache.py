"""The KV cache: a pool of pages, sharded over the context axis, and attention against it.

Token t of a row lives on context device t mod p, in that device's local slot t // p, so every device holds an equal
share of every row at every length. A page is the same `page_len` local slots on all p devices: `page_len * p`
consecutive tokens. A row's page table says where its pages lie in the pool, so rows of any length share it and no
program depends on which pages a row was given. Keys are stored rotated.

The order in memory, `kv_heads kv_seq head_dim` within a page, is private to this module.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from layers.attention import Context
from layers.mask import Mask, visible
from layers.partial import Partial, statistics_dtype
from layers.sharding import Plan, array_field
from layers.tree import Scheme, tree_combine


class PagePool(eqx.Module):
    """Keys and values of all layers that share a place in the pattern."""

    keys: Float[Array, "layers pages kv_heads kv_seq head_dim"] = array_field("layers pages kv_heads kv_seq head_dim")
    values: Float[Array, "layers pages kv_heads kv_seq head_dim"] = array_field("layers pages kv_heads kv_seq head_dim")

    @staticmethod
    def empty(
        *, layers: int, pages: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: jnp.dtype
    ) -> "PagePool":
        """`pages` pages of `page_tokens` tokens each (all context devices together), holding nothing."""
        shape = (layers, pages, kv_heads, page_tokens, head_dim)
        return PagePool(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class PagedAttention(eqx.Module):
    """Attention of new tokens against all that their rows hold, themselves included.

    The new tokens' keys and values are written first, each by the device that owns its position; then each device
    attends over its own slots of the filled pages, and one packed collective joins the partial results.
    """

    table: Int[Array, "batch row_pages"] = array_field("batch row_pages")
    """Each row's pages in order, as indices into the device's own part of the pool."""

    def __call__(
        self,
        q: Float[Array, "batch seq heads head_dim"],
        k: Float[Array, "batch seq kv_heads head_dim"],
        v: Float[Array, "batch seq kv_heads head_dim"],
        *,
        mask: Mask,
        context: Context,
        state: PagePool,
        layer: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], PagePool]:
        """Outputs (split over heads as the output projection takes them in, where heads divide) and the pool.

        Tokens of position -1 are padding: nothing is written for them and their output is 0.
        """
        plan = context.plan
        devices = plan.size("context")
        scheme = head_scheme(plan, q.shape)
        out_dims = "batch seq out_heads head_dim" if scheme == "all_to_all" else "batch seq heads head_dim"
        pool_spec = plan.spec("layers pages kv_heads kv_seq head_dim", state.keys.shape)
        kv_spec = plan.spec("batch seq kv_heads head_dim", k.shape)

        def island(q, k, v, keys, values, table, positions, layer):
            rank = lax.axis_index("context")
            keys = _write(keys, k, layer, table, positions, rank, devices)
            values = _write(values, v, layer, table, positions, rank, devices)
            partial = _attend(q, keys, values, layer, table, positions, rank, devices, mask)
            joined = tree_combine(partial, "context", scheme=scheme, wire_dtype=q.dtype)
            return joined.out.astype(q.dtype), keys, values

        out, keys, values = jax.shard_map(
            island,
            mesh=plan.mesh,
            in_specs=(
                plan.spec("batch seq heads head_dim", q.shape),
                kv_spec,
                kv_spec,
                pool_spec,
                pool_spec,
                plan.spec("batch row_pages", self.table.shape),
                plan.spec("batch seq", context.positions.shape),
                PartitionSpec(),
            ),
            out_specs=(plan.spec(out_dims, q.shape), pool_spec, pool_spec),
        )(q, k, v, state.keys, state.values, self.table, context.positions, jnp.asarray(layer, jnp.int32))
        return out, PagePool(keys, values)


def head_scheme(plan: Plan, shape: tuple[int, ...]) -> Scheme:
    """The collective that joins queries of global `shape` `[batch seq heads head_dim]` over the context axis.

    The all-to-all wherever the output projection is split over context too, so that its result is what that projection
    takes in; else the all-gather.
    """
    return "all_to_all" if "context" in plan.axes("out_heads", shape[2]) else "all_gather"


def _write(
    pool: Float[Array, "layers pages kv_heads slots head_dim"],
    new: Float[Array, "batch seq kv_heads head_dim"],
    layer: Int[Array, ""],
    table: Int[Array, "batch row_pages"],
    positions: Int[Array, "batch seq"],
    rank: Int[Array, ""],
    devices: int,
) -> Float[Array, "layers pages kv_heads slots head_dim"]:
    """Stores the new tokens that this device owns, in place.

    A token of another device, of padding, or past the row's last page gets an index past the pool, where a scatter
    writes nothing; an index of -1 would write the last page.
    """
    _, pages, _, slots, _ = pool.shape
    slot = positions // devices
    row_page = slot // slots
    owned = (positions >= 0) & (positions % devices == rank) & (row_page < table.shape[1])
    page = jnp.take_along_axis(table, jnp.clip(row_page, 0, table.shape[1] - 1), axis=1)
    page = jnp.where(owned, page, pages)
    return pool.at[layer, page, :, slot % slots, :].set(new.astype(pool.dtype), mode="drop", unique_indices=False)


def _attend(
    q: Float[Array, "batch seq heads head_dim"],
    keys: Float[Array, "layers pages kv_heads slots head_dim"],
    values: Float[Array, "layers pages kv_heads slots head_dim"],
    layer: Int[Array, ""],
    table: Int[Array, "batch row_pages"],
    positions: Int[Array, "batch seq"],
    rank: Int[Array, ""],
    devices: int,
    mask: Mask,
) -> Partial:
    """Each row's queries over this device's slots of the row's filled pages.

    The trip count follows the row's length, not the pool's: an empty page is never read.
    """
    batch, seq, heads, head_dim = q.shape
    _, _, kv_heads, slots, _ = keys.shape
    group = heads // kv_heads
    wide = statistics_dtype(q.dtype)
    # One matrix a key head: [kv_heads, group x seq, head_dim], scaled once.
    grouped = (q * mask.score_scale(head_dim)).astype(q.dtype)
    grouped = grouped.reshape(batch, seq, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, group * seq, head_dim)

    def row(q_row, pages, q_positions):
        newest = jnp.max(q_positions)
        oldest = jnp.min(jnp.where(q_positions >= 0, q_positions, newest))
        page_tokens = slots * devices
        # Pages up to that of this device's newest token; with a window, from that of the oldest key in sight.
        last = jnp.where(newest >= rank, (newest - rank) // devices // slots + 1, 0)
        first = 0 if mask.window is None else jnp.maximum(oldest - mask.window + 1, 0) // page_tokens
        rows_positions = jnp.tile(q_positions, group)

        def page_step(index, carry):
            peak, total, out = carry
            at = (layer, pages[index], 0, 0, 0)
            k = lax.dynamic_slice(keys, at, (1, 1, *keys.shape[2:]))[0, 0].astype(q_row.dtype)
            v = lax.dynamic_slice(values, at, (1, 1, *values.shape[2:]))[0, 0].astype(q_row.dtype)
            scores = jnp.einsum("kqd,ksd->kqs", q_row, k, preferred_element_type=wide)
            if mask.softcap is not None:
                scores = mask.softcap * jnp.tanh(scores / mask.softcap)
            kv_positions = (index * slots + jnp.arange(slots)) * devices + rank
            # Slots not yet written lie after every query's position, so causality hides them too.
            seen = visible(mask, rows_positions, kv_positions)[None]
            scores = jnp.where(seen, scores, -jnp.inf)
            higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
            safe = jnp.where(higher > -jnp.inf, higher, 0)
            kept = jnp.exp(peak - safe)
            weights = jnp.exp(scores - safe[..., None])
            out = kept[..., None] * out + jnp.einsum(
                "kqs,ksd->kqd", weights.astype(q_row.dtype), v, preferred_element_type=wide
            )
            return higher, kept * total + jnp.sum(weights, axis=-1), out

        rows = (kv_heads, group * seq)
        start = jax.tree.map(
            lambda x: lax.pcast(x, tuple(jax.typeof(keys).manual_axis_type.varying), to="varying"),
            (jnp.full(rows, -jnp.inf, wide), jnp.zeros(rows, wide), jnp.zeros((*rows, head_dim), wide)),
        )
        peak, total, out = lax.fori_loop(first, last, page_step, start)
        some = total > 0
        safe = jnp.where(some, total, 1)
        return out / safe[..., None], jnp.where(some, jnp.where(some, peak, 0) + jnp.log(safe), -jnp.inf)

    if batch == 1:
        out, lse = jax.tree.map(lambda x: x[None], row(grouped[0], table[0], positions[0]))
    else:
        out, lse = lax.map(lambda args: row(*args), (grouped, table, positions))
    out = out.reshape(batch, kv_heads, group, seq, head_dim).transpose(0, 3, 1, 2, 4)
    lse = lse.reshape(batch, kv_heads, group, seq).transpose(0, 3, 1, 2)
    return Partial(out.reshape(batch, seq, heads, head_dim), lse.reshape(batch, seq, heads))


class DecodeState(eqx.Module):
    """All that changes while rows of text grow."""

    pools: tuple[Any, ...]
    """One state a place of the pattern (for attention a `PagePool`), stacked over layers."""
    table: Int[Array, "batch row_pages"] = array_field("batch row_pages")
    lengths: Int[Array, "batch"] = array_field("batch")
    """Tokens that each row holds."""
