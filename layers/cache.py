"""The KV cache: a pool of pages, sharded over the context axis, and attention against it.

Token t of a row lives on context device t mod p, in that device's local slot t // p, so every device holds an equal
share of every row at every length. A page is the same `page_len` local slots on all p devices: `page_len * p`
consecutive tokens. A row's page table says where its pages lie in the pool, so rows of any length share it and no
program depends on which pages a row was given. Keys are stored rotated.

The order in memory within a page is private to this module: `kv_heads head_dim kv_seq` for keys, `kv_heads kv_seq
head_dim` for values. So both are the right operand of their product as it stands.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from treering.layers.attention import Context
from treering.layers.mask import Mask, visible
from treering.layers.partial import Partial, statistics_dtype
from treering.layers.ring import ring_local
from treering.layers.sharding import Plan, array_field
from treering.layers.tree import Scheme, tree_combine

QUERY_TILE = 256
"""Queries that attend together where they are many."""
MANY_QUERIES = 128
"""Queries a row from which a step takes `KEY_TILE` keys: larger products, for a copy of the keys. For fewer a page."""
KEY_TILE = 512
NO_PAGE = 2**31 - 1
"""A page past every pool, which is neither read nor written."""


class PagePool(eqx.Module):
    """Keys and values of all layers that share a place in the pattern."""

    keys: Float[Array, "layers pages kv_heads head_dim kv_seq"] = array_field("layers pages kv_heads head_dim kv_seq")
    values: Float[Array, "layers pages kv_heads kv_seq head_dim"] = array_field("layers pages kv_heads kv_seq head_dim")

    @staticmethod
    def empty(
        *, layers: int, pages: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: jnp.dtype
    ) -> "PagePool":
        """`pages` pages of `page_tokens` tokens each (all context devices together), holding nothing."""
        keys, values = (head_dim, page_tokens), (page_tokens, head_dim)
        return PagePool(*(jnp.zeros((layers, pages, kv_heads, *page), dtype) for page in (keys, values)))

    def specs(self, plan: Plan) -> tuple[PartitionSpec, PartitionSpec]:
        """How keys and values are split over the mesh."""
        return (
            plan.spec("layers pages kv_heads head_dim kv_seq", self.keys.shape),
            plan.spec("layers pages kv_heads kv_seq head_dim", self.values.shape),
        )

    def with_copies(self, source: Int[Array, "batch"], target: Int[Array, "batch"], plan: Plan) -> "PagePool":
        """With one page of each group of devices (a coordinate of data x fsdp) copied to another of its pages."""
        specs, rows = self.specs(plan), plan.spec("batch", source.shape)

        def island(keys, values, source, target):
            return tuple(pool.at[:, target[0]].set(pool[:, source[0]]) for pool in (keys, values))

        copy = jax.shard_map(island, mesh=plan.mesh, in_specs=(*specs, rows, rows), out_specs=specs)
        return PagePool(*copy(self.keys, self.values, source, target))

    def read(
        self,
        layer: Int[Array, ""],
        pages: Int[Array, "batch row_pages"],
        length: Int[Array, ""],
        *,
        tokens: int,
        plan: Plan,
    ) -> tuple[Float[Array, "tokens kv_heads head_dim"], Float[Array, "tokens kv_heads head_dim"]]:
        """A layer's keys and values of one row in the order of its text, split over the context axis, 0 past `length`.

        `pages` are the row's, by group of devices: `NO_PAGE` in the groups that do not have the row, and past its last.
        `tokens` is a size that `token_share` divides. One all-to-all deals the tokens.
        """
        devices = plan.size("context")
        local = tokens // devices

        def island(keys, values, layer, pages, length):
            k, v = (pool.at[layer, pages[0]].get(mode="fill", fill_value=0) for pool in (keys, values))
            k, v = k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)
            both = jnp.stack([x.reshape(-1, *x.shape[2:])[:local] for x in (k, v)])
            own = jnp.arange(local) * devices + lax.axis_index("context") < length
            both = jnp.where(own[:, None, None], both, 0)
            both = both.reshape(2, devices, local // devices, *both.shape[2:])
            both = lax.all_to_all(both, "context", 1, 1).swapaxes(1, 2).reshape(2, local, *both.shape[3:])
            # From the group that has the row to all; as whole numbers, since -0.0 + 0.0 is 0.0.
            bits = lax.bitcast_convert_type(both, jnp.dtype(f"int{8 * both.dtype.itemsize}"))
            return tuple(lax.bitcast_convert_type(lax.psum(bits, ("data", "fsdp")), both.dtype))

        row = plan.spec("kv_seq kv_heads head_dim", (tokens, *self.values.shape[2::2]))
        return jax.shard_map(
            island,
            mesh=plan.mesh,
            in_specs=(
                *self.specs(plan),
                PartitionSpec(),
                plan.spec("batch row_pages", pages.shape),
                PartitionSpec(),
            ),
            out_specs=(row, row),
        )(self.keys, self.values, layer, pages, length)

    def write(
        self,
        layer: Int[Array, ""],
        pages: Int[Array, "batch row_pages"],
        keys: Float[Array, "tokens kv_heads head_dim"],
        values: Float[Array, "tokens kv_heads head_dim"],
        *,
        plan: Plan,
    ) -> "PagePool":
        """With one row's keys and values of a layer replaced by those of a text, as `read` gives them."""
        devices = plan.size("context")
        slots = self.values.shape[3] // devices

        def island(key_pool, value_pool, layer, pages, keys, values):
            both = jnp.stack([keys, values])
            local = both.shape[1]
            both = both.reshape(2, local // devices, devices, *both.shape[2:]).swapaxes(1, 2)
            both = lax.all_to_all(both, "context", 1, 1).reshape(2, local, *both.shape[3:])
            both = jnp.pad(both, ((0, 0), (0, -local % slots), (0, 0), (0, 0)))
            k, v = both.reshape(2, -1, slots, *both.shape[2:])
            key_pool = key_pool.at[layer, pages[0]].set(k.transpose(0, 2, 3, 1), mode="drop")
            return key_pool, value_pool.at[layer, pages[0]].set(v.transpose(0, 2, 1, 3), mode="drop")

        row = plan.spec("kv_seq kv_heads head_dim", keys.shape)
        specs = self.specs(plan)
        written = jax.shard_map(
            island,
            mesh=plan.mesh,
            in_specs=(*specs, PartitionSpec(), plan.spec("batch row_pages", pages.shape), row, row),
            out_specs=specs,
        )(self.keys, self.values, layer, pages, keys, values)
        return PagePool(*written)


def token_share(plan: Plan) -> int:
    """What divides the tokens of a row that is read or written in the order of its text: each device of the context
    axis then has as many for every other."""
    return plan.size("context") ** 2


class PagedAttention(eqx.Module):
    """Attention of new tokens against all that their rows hold, themselves included.

    The new tokens' keys and values are written first, each by the device that owns its position; then each device
    attends over its own slots of the filled pages, and one packed collective joins the partial results.

    Where the plan spreads tokens over context, each device has those whose positions it owns. Queries then visit all
    devices, and their partial results come home in one message (arXiv 2411.01783): what travels does not grow with what
    the rows hold. In rows that held nothing keys travel instead, around a ring: with their values they are no more
    numbers than queries and results.
    """

    table: Int[Array, "batch row_pages"] = array_field("batch row_pages")
    """Each row's pages in order, as indices into the device's own part of the pool."""
    fresh: bool = eqx.field(static=True, default=False)
    """Whether the rows held nothing before the new tokens."""

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
        plan, seq = context.plan, q.shape[1]
        devices = plan.size("context")
        spread = "context" in plan.axes("seq", seq)
        scheme = head_scheme(plan, q.shape)
        out_dims = "batch seq out_heads head_dim" if scheme == "all_to_all" else "batch seq heads head_dim"
        pool_specs = state.specs(plan)
        kv_spec = plan.spec("batch seq kv_heads head_dim", k.shape)
        rows = plan.axes("batch", q.shape[0])

        def island(q, k, v, keys, values, table, positions, layer):
            rank = lax.axis_index("context")
            own = lax.dynamic_slice_in_dim(positions, rank * q.shape[1], q.shape[1], axis=1) if spread else positions
            slots = values.shape[3]
            page, slot = _places(own, table, slots, rank, devices)
            # An index past the pool is not written; one of -1 would be its last page.
            keys = keys.at[layer, page, :, :, slot].set(k.astype(keys.dtype), mode="drop")
            values = values.at[layer, page, :, slot].set(v.astype(values.dtype), mode="drop")

            def attend(q, positions):
                with jax.named_scope("cached_attention"):
                    return _attend(q, keys, values, layer, table, positions, rank, devices, mask)

            if not spread:
                out = tree_combine(attend(q, positions), "context", scheme=scheme).out
            elif self.fresh:
                # As the cache would give them back.
                k, v = (x.astype(keys.dtype).astype(q.dtype) for x in (k, v))
                out = ring_local(
                    q, k, v, axis="context", mask=mask, order="striped", positions=own, kv_positions=positions
                ).out
            else:
                out = _pass_queries(attend, q, positions, devices)
            return out.astype(q.dtype), keys, values

        out, keys, values = jax.shard_map(
            island,
            mesh=plan.mesh,
            in_specs=(
                plan.spec("batch seq heads head_dim", q.shape),
                kv_spec,
                kv_spec,
                *pool_specs,
                plan.spec("batch row_pages", self.table.shape),
                # Of all devices' tokens: gathered once for all layers, not in each.
                PartitionSpec(rows, None),
                PartitionSpec(),
            ),
            out_specs=(plan.spec(out_dims, q.shape), *pool_specs),
        )(q, k, v, state.keys, state.values, self.table, context.positions, jnp.asarray(layer, jnp.int32))
        return out, PagePool(keys, values)


def _pass_queries(
    attend: Callable[[Array, Array], Partial],
    q: Float[Array, "batch share heads head_dim"],
    positions: Int[Array, "batch seq"],
    devices: int,
) -> Float[Array, "batch share heads head_dim"]:
    """Each device's queries over all devices' slots; `positions` are those of all queries, ranks in turn."""
    batch, share, heads, head_dim = q.shape
    q = lax.all_gather(q, "context", axis=2)
    positions = positions.reshape(batch, devices, share).swapaxes(1, 2)
    # Tiles of queries that follow each other in the text, each against the pages up to its newest token's.
    rows = next(n for n in range(min(share, max(QUERY_TILE // devices, 1)), 0, -1) if share % n == 0)

    def tile(x: Array, dims: tuple[int, ...]) -> Array:
        return jnp.moveaxis(x.reshape(batch, share // rows, rows * devices, *dims), 1, 0)

    partial = lax.map(lambda tiles: attend(*tiles), (tile(q, (heads, head_dim)), tile(positions, ())))

    def to_senders(x: Array, dims: tuple[int, ...]) -> Array:
        """Devices where a message to all of them has heads."""
        x = jnp.moveaxis(x, 0, 1).reshape(batch, share, devices, heads, *dims)
        return x.swapaxes(2, 3).reshape(batch, share * heads, devices, *dims)

    partial = Partial(to_senders(partial.out, (head_dim,)), to_senders(partial.lse, ()))
    return tree_combine(partial, "context", scheme="all_to_all").out.reshape(batch, share, heads, head_dim)


def head_scheme(plan: Plan, shape: tuple[int, ...]) -> Scheme:
    """The collective that joins queries of global `shape` `[batch seq heads head_dim]` over the context axis.

    The all-to-all wherever the output projection is split over context too, so that its result is what that projection
    takes in; else the all-gather.
    """
    return "all_to_all" if "context" in plan.axes("out_heads", shape[2]) else "all_gather"


def _places(
    positions: Int[Array, "batch seq"],
    table: Int[Array, "batch row_pages"],
    slots: int,
    rank: Int[Array, ""],
    devices: int,
) -> tuple[Int[Array, "batch seq"], Int[Array, "batch seq"]]:
    """The page of this device's pool, and the slot in it, where the key of each new token goes.

    A token of another device, of padding, or past the row's last page has a page past every pool.
    """
    slot = positions // devices
    row_page = slot // slots
    owned = (positions >= 0) & (positions % devices == rank) & (row_page < table.shape[1])
    page = jnp.take_along_axis(table, jnp.clip(row_page, 0, table.shape[1] - 1), axis=1)
    return jnp.where(owned, page, NO_PAGE), slot % slots


def _attend(
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
    steps, and an empty page is never read. Where queries are many an item is several pages of a row instead, laid side
    by side.
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
        # Slots not yet written, and pages past the last, lie after every query's position: causality hides them too.
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


class DecodeState(eqx.Module):
    """All that changes while rows of text grow."""

    pools: tuple[Any, ...]
    """One state a place of the pattern (for attention a `PagePool`), stacked over layers."""
    table: Int[Array, "batch row_pages"] = array_field("batch row_pages")
    lengths: Int[Array, "batch"] = array_field("batch")
    """Tokens that each row holds."""
