"""Loss on held-out rows, by position in the document."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from treering.configs.train import StepConfig
from treering.layers.nn.gathered_weight import cast_matrices, gather_on_use
from treering.layers.parallel.program import Program
from treering.layers.parallel.sharding import Plan
from treering.models.transformer import Transformer
from treering.train.data.batch import Batch, abstract_batch, check_batch
from treering.train.loss import token_losses
from treering.train.step import hidden_states, output_weight


class LossSums(eqx.Module):
    """Cross entropy and trained tokens by the position of a token in its document. A bucket's mean is loss / tokens."""

    loss: Float[Array, "buckets"]
    tokens: Int[Array, "buckets"]


def empty_sums(plan: Plan, buckets: int) -> LossSums:
    """Nothing summed yet, on every device."""
    whole = NamedSharding(plan.mesh, PartitionSpec())
    return jax.jit(lambda: LossSums(jnp.zeros(buckets), jnp.zeros(buckets, jnp.int32)), out_shardings=whole)()


def evaluation_program(
    model: Transformer, config: StepConfig, plan: Plan, *, batch: int, seq: int, edges: tuple[int, ...]
) -> Program:
    """`program(model, sums, batch) -> sums`, with the batch's tokens added; the sums that went in are consumed.

    `edges` ascend from 0: bucket i holds positions from `edges[i]` up to `edges[i + 1]`, the last one all beyond. The
    batch is on devices as for training (`train.data.batch.shard_batch`); `model` may be abstract.

    Raises ValueError, naming what works, where the batch or the window does not divide over the mesh.
    """
    check_batch(plan, batch=batch, seq=seq)
    function = functools.partial(add_losses, config=config, plan=plan, edges=edges)
    return Program(function, model, empty_sums(plan, len(edges)), abstract_batch(plan, batch=batch, seq=seq))


def add_losses(
    model: Transformer, sums: LossSums, batch: Batch, *, config: StepConfig, plan: Plan, edges: tuple[int, ...]
) -> LossSums:
    """The sums with a batch's tokens added."""
    with jax.default_matmul_precision(config.precision.matmul):
        model = gather_on_use(cast_matrices(model, jnp.dtype(config.precision.compute)), None, plan)
        hidden = hidden_states(model, batch, config, plan)
        losses = token_losses(hidden, output_weight(model), batch.targets, chunk=config.loss_chunk)
    bucket = jnp.searchsorted(jnp.asarray(edges), batch.positions, side="right") - 1
    # One sum per bucket over all devices' tokens; a scatter would gather the tokens first.
    here = (bucket[..., None] == jnp.arange(len(edges))[None, None]) & (batch.targets >= 0)[..., None]
    added = LossSums(
        jnp.sum(jnp.where(here, losses[..., None], 0), axis=(0, 1)), jnp.sum(here, axis=(0, 1), dtype=jnp.int32)
    )
    whole = NamedSharding(plan.mesh, PartitionSpec())
    return jax.tree.map(lambda old, new: jax.lax.with_sharding_constraint(old + new, whole), sums, added)
