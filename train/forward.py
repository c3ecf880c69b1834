"""The model's forward pass over a batch, as training and evaluation run it."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from treering.configs.train import Remat, StepConfig
from treering.layers.attention.local import LSE_NAME, OUT_NAME
from treering.layers.nn.attention import Context
from treering.layers.nn.gathered_weight import TrainedWeight
from treering.layers.operations.context import ContextAttention
from treering.layers.parallel.sharding import Plan
from treering.models.transformer import Transformer
from treering.train.data.batch import Batch


def run(model: Transformer, batch: Batch, config: StepConfig, plan: Plan) -> Float[Array, "batch seq embed"]:
    """Final hidden states of a batch, in the compute dtype; the model's matrices are `TrainedWeight`s."""
    context = Context(
        positions=batch.positions,
        segments=batch.segments,
        attend=ContextAttention.over(batch.segments, config.attention, plan),
        plan=plan,
        remat=rematerialised(config.remat),
    )
    hidden, _ = model(batch.tokens, context, dtype=jnp.dtype(config.precision.compute))
    return hidden


def output_weight(model: Transformer) -> TrainedWeight:
    """The matrix `vocab embed` that turns hidden states into logits."""
    if model.output is None:
        return model.embed.table
    assert model.output.bias is None and model.output.lora is None, "the loss multiplies with a plain matrix"
    return model.output.weight


def rematerialised(remat: Remat):
    """What wraps the function of a period of blocks so that the backward pass computes it again; None for nothing.

    A scan needs no guard against common subexpressions: its backward pass is another loop.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return None
    policy = policies.nothing_saveable if remat == "full" else policies.save_only_these_names(OUT_NAME, LSE_NAME)
    return functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
