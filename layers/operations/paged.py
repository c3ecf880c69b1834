"""The attention operation of prefill and decoding: against the pages of `layers.operations.pool`."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from treering.layers.attention.distributed.arguments import TokenData
from treering.layers.attention.distributed.ring import ring_local
from treering.layers.attention.distributed.tree import tree_combine
from treering.layers.attention.distributed.tree_schemes import Scheme
from treering.layers.attention.kernels import Geometry, Problem, kernel_for
from treering.layers.attention.mask import Mask
from treering.layers.attention.partial import Partial
from treering.layers.nn.attention import ForwardInfo
from treering.layers.operations.pool import NO_PAGE, PagePool
from treering.layers.parallel.sharding import Plan, array_field

QUERY_TILE = 256
"""Queries that attend together where they are many."""


class PagedAttention(eqx.Module):
    """Attention of new tokens against all that their rows hold, themselves included.

    The new tokens' keys and values are written first, each by the device that owns its position; then each device
    attends over its own slots of the filled pages, and one packed collective joins the partial results.

    Where the plan shards tokens over context, each device has those whose positions it owns. Queries then visit all
    devices, and their partial results return in one message (arXiv 2411.01783): what travels does not grow with what
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
        info: ForwardInfo,
        state: PagePool,
        layer: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], PagePool]:
        """Outputs (split over heads as the output projection takes them in, where heads divide) and the pool.

        Tokens of position -1 are padding: nothing is written for them and their output is 0.
        """
        plan, seq = info.plan, q.shape[1]
        devices = plan.size("context")
        seq_sharded = "context" in plan.axes("seq", seq)
        scheme = head_scheme(plan, q.shape)
        out_dims = "batch seq out_heads head_dim" if scheme == "all_to_all" else "batch seq heads head_dim"
        pool_specs = state.specs(plan)
        kv_spec = plan.spec("batch seq kv_heads head_dim", k.shape)
        rows = plan.axes("batch", q.shape[0])

        kernel = kernel_for(
            Problem(
                platform=jax.default_backend(),
                dtype=q.dtype,
                head_dim=q.shape[3],
                group=q.shape[2] // k.shape[2],
                geometry=Geometry.PAGED,
                segments=False,
            )
        )

        def per_device(q, k, v, keys, values, table, positions, layer):
            rank = lax.axis_index("context")
            own = (
                lax.dynamic_slice_in_dim(positions, rank * q.shape[1], q.shape[1], axis=1) if seq_sharded else positions
            )
            slots = values.shape[3]
            page, slot = _places(own, table, slots, rank, devices)
            # An index past the pool is not written; one of -1 would be its last page.
            keys = keys.at[layer, page, :, :, slot].set(k.astype(keys.dtype), mode="drop")
            values = values.at[layer, page, :, slot].set(v.astype(values.dtype), mode="drop")

            def attend(q, positions):
                with jax.named_scope("cached_attention"):
                    return kernel.forward(q, keys, values, layer, table, positions, rank, devices, mask)

            if not seq_sharded:
                out = tree_combine(attend(q, positions), "context", scheme=scheme).out
            elif self.fresh:
                # As the cache would give them back.
                k, v = (x.astype(keys.dtype).astype(q.dtype) for x in (k, v))
                # Their order fixes where the tokens of fresh rows are; those past a row's end are padding.
                tokens, everyone = (TokenData(None, (x >= 0).astype(jnp.int32), "striped") for x in (own, positions))
                out = ring_local(q, k, v, axis="context", mask=mask, tokens=tokens, all_tokens=everyone).out
            else:
                out = _pass_queries(attend, q, positions, devices)
            return out.astype(q.dtype), keys, values

        out, keys, values = jax.shard_map(
            per_device,
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
        )(q, k, v, state.keys, state.values, self.table, info.positions, jnp.asarray(layer, jnp.int32))
        return out, PagePool(keys, values)


def _pass_queries(
    attend: Callable[[Array, Array], Partial],
    q: Float[Array, "batch local_seq heads head_dim"],
    positions: Int[Array, "batch seq"],
    devices: int,
) -> Float[Array, "batch local_seq heads head_dim"]:
    """Each device's queries over all devices' slots; `positions` are those of all queries, ranks in turn."""
    batch, local_seq, heads, head_dim = q.shape
    q = lax.all_gather(q, "context", axis=2)
    positions = positions.reshape(batch, devices, local_seq).swapaxes(1, 2)
    # Tiles of queries that follow each other in the text, each against the pages up to its newest token's.
    rows = next(n for n in range(min(local_seq, max(QUERY_TILE // devices, 1)), 0, -1) if local_seq % n == 0)

    def tile(x: Array, dims: tuple[int, ...]) -> Array:
        return jnp.moveaxis(x.reshape(batch, local_seq // rows, rows * devices, *dims), 1, 0)

    partial = lax.map(lambda tiles: attend(*tiles), (tile(q, (heads, head_dim)), tile(positions, ())))

    def to_senders(x: Array, dims: tuple[int, ...]) -> Array:
        """Devices where a message to all of them has heads."""
        x = jnp.moveaxis(x, 0, 1).reshape(batch, local_seq, devices, heads, *dims)
        return x.swapaxes(2, 3).reshape(batch, local_seq * heads, devices, *dims)

    partial = Partial(to_senders(partial.out, (head_dim,)), to_senders(partial.lse, ()))
    return tree_combine(partial, "context", scheme="all_to_all").out.reshape(batch, local_seq, heads, head_dim)


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
