"""The KV cache: a pool of pages, sharded over the context axis.

Token t of a row is on context device t mod p, in that device's local slot t // p, so every device holds an equal
part of every row at every length. A page is the same `page_len` local slots on all p devices: `page_len * p`
consecutive tokens. A row's page table says which pages of the pool it has, so rows of any length share it and no
program depends on which pages a row was given. Keys are stored rotated.

The order in memory within a page is known to this module and the kernels of paged attention alone: `kv_heads head_dim
kv_seq` for keys, `kv_heads kv_seq head_dim` for values.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from treering.layers.parallel.sharding import Plan, array_field

NO_PAGE = 2**31 - 1
"""A page past every pool, which is neither read nor written."""


class PagePool(eqx.Module):
    """Keys and values of all layers of one block of the pattern."""

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

        def per_device(keys, values, source, target):
            return tuple(pool.at[:, target[0]].set(pool[:, source[0]]) for pool in (keys, values))

        copy = jax.shard_map(per_device, mesh=plan.mesh, in_specs=(*specs, rows, rows), out_specs=specs)
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
        `tokens` is a size that `token_divisor` divides. One all-to-all reorders the tokens.
        """
        devices = plan.size("context")
        local = tokens // devices

        def per_device(keys, values, layer, pages, length):
            k, v = (pool.at[layer, pages[0]].get(mode="fill", fill_value=0) for pool in (keys, values))
            k, v = k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)
            both = jnp.stack([x.reshape(-1, *x.shape[2:])[:local] for x in (k, v)])
            own = jnp.arange(local) * devices + lax.axis_index("context") < length
            both = jnp.where(own[:, None, None], both, 0)
            both = both.reshape(2, devices, local // devices, *both.shape[2:])
            both = lax.all_to_all(both, "context", 1, 1).swapaxes(1, 2).reshape(2, local, *both.shape[3:])
            # From the group that has the row to all; as integers, since -0.0 + 0.0 is 0.0.
            bits = lax.bitcast_convert_type(both, jnp.dtype(f"int{8 * both.dtype.itemsize}"))
            return tuple(lax.bitcast_convert_type(lax.psum(bits, ("data", "fsdp")), both.dtype))

        row = plan.spec("kv_seq kv_heads head_dim", (tokens, *self.values.shape[2::2]))
        return jax.shard_map(
            per_device,
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

        def per_device(key_pool, value_pool, layer, pages, keys, values):
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
            per_device,
            mesh=plan.mesh,
            in_specs=(*specs, PartitionSpec(), plan.spec("batch row_pages", pages.shape), row, row),
            out_specs=specs,
        )(self.keys, self.values, layer, pages, keys, values)
        return PagePool(*written)


def token_divisor(plan: Plan) -> int:
    """What divides the tokens of a row that is read or written in the order of its text: each device of the context
    axis then has as many for every other."""
    return plan.size("context") ** 2


class DecodeState(eqx.Module):
    """All that changes while rows of text grow."""

    pools: tuple[Any, ...]
    """One state per block of the pattern (for attention a `PagePool`), stacked over layers."""
    table: Int[Array, "batch row_pages"] = array_field("batch row_pages")
    lengths: Int[Array, "batch"] = array_field("batch")
    """Tokens that each row holds."""
