"""The table of token embeddings, looked up by ids and multiplied with to give logits."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from treering.layers.nn.linear import project
from treering.layers.parallel.sharding import Plan, array_field


class Embedding(eqx.Module):
    """One vector per token."""

    table: Any = array_field("vocab embed")
    """An array, or a stored weight with methods `take` and `matmul`."""

    @staticmethod
    def init(vocab: int, embed: int, *, std: float = 0.02, key: PRNGKeyArray) -> "Embedding":
        """Normal vectors."""
        return Embedding(std * jax.random.normal(key, (vocab, embed)))

    def __call__(
        self, tokens: Int[Array, "batch seq"], plan: Plan, dtype: jnp.dtype
    ) -> Float[Array, "batch seq embed"]:
        """Vectors of `tokens` in `dtype`."""
        if isinstance(self.table, jax.Array):
            return lookup(self.table, tokens, plan, dtype)
        return self.table.take(tokens).astype(dtype)

    def unembed(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Logits: the product of each vector with every row of the table."""
        return project(x, self.table) if isinstance(self.table, jax.Array) else self.table.matmul(x)


def lookup(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "batch seq"], plan: Plan, dtype: jnp.dtype
) -> Float[Array, "batch seq embed"]:
    """The rows of a table at `tokens`, in `dtype`.

    Where the vocabulary is sharded, each device looks up the ids that it holds and one sum joins them: no device ever
    gathers the vocabulary. Over an axis that shards tokens too, the sum is a reduce-scatter.
    """
    axes = plan.axes("vocab", table.shape[0], "parameters")
    if not axes:
        return jnp.take(table, tokens, axis=0, mode="clip").astype(dtype)
    batch, seq = (plan.axes(dim, size) for dim, size in zip(("batch", "seq"), tokens.shape, strict=True))
    scattered = tuple(axis for axis in seq if axis in axes)
    summed = tuple(axis for axis in axes if axis not in scattered)

    def per_device(table, ids):
        local = ids - jax.lax.axis_index(axes) * table.shape[0]
        held = (local >= 0) & (local < table.shape[0])
        found = jnp.take(table, jnp.where(held, local, 0), axis=0, mode="clip").astype(dtype)
        found = jnp.where(held[..., None], found, 0)
        if scattered:
            found = jax.lax.psum_scatter(found, scattered, scatter_dimension=1, tiled=True)
        return jax.lax.psum(found, summed) if summed else found

    return jax.shard_map(
        per_device,
        mesh=plan.mesh,
        in_specs=(
            PartitionSpec(axes, None),
            PartitionSpec(batch, tuple(axis for axis in seq if axis not in scattered)),
        ),
        out_specs=PartitionSpec(batch, seq, None),
    )(table, tokens)
