"""Choosing the next token from logits that stay split over the vocabulary."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from layers.sharding import Plan


def argmax(logits: Float[Array, "batch vocab"], plan: Plan) -> Int[Array, "batch"]:
    """The token of the highest logit, the lowest id among equals.

    Each device finds its own best; one small all-gather of (value, id) pairs decides, so the logits never leave their
    devices.
    """
    axes = plan.axes("vocab", logits.shape[-1])
    if not axes:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    rows = plan.spec("batch", logits.shape[:1])

    def island(local):
        best = jnp.argmax(local, axis=-1)
        value = jnp.take_along_axis(local, best[:, None], axis=-1)[:, 0]
        token = (best + lax.axis_index(axes) * local.shape[-1]).astype(jnp.int32)
        wide = value.astype(jnp.float32)
        pairs = jnp.stack([lax.bitcast_convert_type(wide, jnp.int32), token])
        pairs = lax.all_gather(pairs, axes, to="invarying")
        values, tokens = lax.bitcast_convert_type(pairs[:, 0], jnp.float32), pairs[:, 1]
        first = jnp.argmax(values, axis=0)
        return jnp.take_along_axis(tokens, first[None], axis=0)[0]

    return jax.shard_map(island, mesh=plan.mesh, in_specs=PartitionSpec(*rows, axes), out_specs=PartitionSpec(*rows))(
        logits
    )


def sample(
    logits: Float[Array, "batch vocab"], key: PRNGKeyArray, temperature: Float[Array, "batch"] | None, plan: Plan
) -> Int[Array, "batch"]:
    """A draw from softmax(logits / temperature), row by row; temperature 0, or None for all rows, takes the argmax.

    The draw is the argmax of perturbed logits (Gumbel), so it needs no more messages than greedy choice, and the same
    key draws the same token on every mesh.
    """
    logits = logits.astype(jnp.float32)
    if temperature is None:
        return argmax(logits, plan)
    noise = plan.constrain(jax.random.gumbel(key, logits.shape), "batch vocab")
    heat = jnp.broadcast_to(temperature[:, None], logits.shape)
    drawn = jnp.where(heat > 0, logits / jnp.where(heat > 0, heat, 1) + noise, logits)
    return argmax(drawn, plan)
