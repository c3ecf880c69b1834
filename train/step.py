"""One training step: a state and a batch, and the state after them.

state = init_state(model, optimizer, plan)                       # or abstract_state(...), to compile first
step = step_program(state, config, optimizer, plan, steps=1000, batch=8, seq=4096)
state, metrics = step(None, state, shard_batch(batch, plan))           # the state that went in is consumed
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from treering.configs.model import ModelConfig
from treering.configs.precision import DType
from treering.configs.train import OptimizerConfig, Remat, StepConfig
from treering.layers.attention.local import LSE_NAME, OUT_NAME
from treering.layers.nn.attention import ForwardInfo
from treering.layers.nn.gathered_weight import GatheredWeight, cast_matrices, gather_on_use, gradient_slots
from treering.layers.operations.context import ContextAttention
from treering.layers.parallel.program import Program
from treering.layers.parallel.sharding import Plan
from treering.models.families.registry import families
from treering.models.transformer import Stacked, Transformer
from treering.train.data.batch import Batch, abstract_batch, check_batch, split
from treering.train.loss import LossSum, cross_entropy
from treering.train.optim import check_schedule, clip, learning_rate, transformation


class TrainState(eqx.Module):
    """All that a step changes."""

    model: Transformer
    """Blocks stacked, every parameter in `precision.params`: the tree of a checkpoint."""
    optimizer: Any
    """State of the optax transformation; trees of the model's form within it have the model's dims."""
    step: Int[Array, ""]
    """Steps taken, skipped ones included: what the schedule reads."""
    skipped: Int[Array, ""]
    """Steps whose loss or gradient norm was not finite, so that nothing was updated."""
    skipped_in_row: Int[Array, ""]
    """The last steps that were skipped one after the other."""


class Metrics(eqx.Module):
    """The metrics of a step: scalars, the same on every device and process."""

    loss: Float[Array, ""]
    """Mean cross entropy in nats over the trained tokens of the whole batch, without z-loss; 0 if none is trained."""
    tokens: Int[Array, ""]
    """Trained tokens of the whole batch."""
    grad_norm: Float[Array, ""]
    """Norm of all gradients together, before clipping."""
    learning_rate: Float[Array, ""]
    """What this step's update was multiplied by."""
    skipped: Bool[Array, ""]
    """Whether this step was skipped."""
    skipped_in_row: Int[Array, ""]
    """Steps skipped in a row up to and including this one."""


def init_state(model: Transformer, optimizer: OptimizerConfig, plan: Plan, *, params: DType = "float32") -> TrainState:
    """The state before the first step, on the plan's devices, from a model on them, which becomes part of it.

    Raises ValueError for blocks that are not stacked.
    """
    if not isinstance(model.blocks, Stacked):
        raise ValueError("the model's blocks are unrolled: training scans stacked ones (load it without unrolling)")
    model = jax.tree.map(lambda x: x.astype(params), model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    rest = plan.init(
        lambda: _rest(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), optimizer), "parameters"
    )
    return TrainState(model, *rest)


def abstract_state(
    config: ModelConfig, optimizer: OptimizerConfig, plan: Plan, *, params: DType = "float32"
) -> TrainState:
    """Shapes, dtypes and shardings of a state: to compile before weights are read, and to restore onto."""

    def make() -> TrainState:
        model = families()[config.family].init(config, jax.random.key(0))
        model = jax.tree.map(lambda x: x.astype(params), model)
        return TrainState(model, *_rest(model, optimizer))

    return plan.abstract(eqx.filter_eval_shape(make), "parameters")


def _rest(model: Any, optimizer: OptimizerConfig) -> tuple[Any, Array, Array, Array]:
    zero = jnp.zeros((), jnp.int32)
    return transformation(optimizer).init(model), zero, zero, zero


def step_program(
    state: TrainState,
    config: StepConfig,
    optimizer: OptimizerConfig,
    plan: Plan,
    *,
    steps: int,
    batch: int,
    seq: int,
) -> Program:
    """The compiled step: `program(None, state, batch) -> (state, Metrics)`.

    `state` may be abstract. `steps` is the run's length, for the schedule; `batch` the rows of the global batch of all
    accumulation parts; `seq` the window. The batch that the program takes is on the plan's devices in zigzag order over
    context (`train.data.batch.shard_batch`). `program.compiled.memory_analysis()` has its memory.

    Raises ValueError, naming what works, where the batch or the window does not divide over the mesh, or the schedule
    does not fit into the run.
    """
    check_batch(plan, batch=batch, seq=seq, accumulation=config.accumulation)
    check_schedule(optimizer.schedule, steps)
    function = functools.partial(train_step, config=config, optimizer=optimizer, plan=plan, steps=steps)
    return Program(function, None, state, abstract_batch(plan, batch=batch, seq=seq))


def train_step(
    kept: None,
    state: TrainState,
    batch: Batch,
    *,
    config: StepConfig,
    optimizer: OptimizerConfig,
    plan: Plan,
    steps: int,
) -> tuple[TrainState, Metrics]:
    """The state after a batch. Nothing but `step` and the counts changes where the loss or the norm is not finite."""
    with jax.default_matmul_precision(config.precision.matmul):
        total, tokens, gradients = batch_gradients(state.model, batch, config, plan)
    count = jnp.maximum(tokens, 1)
    gradients = jax.tree.map(lambda g: g / count.astype(g.dtype), gradients)
    norm = optax.tree.norm(gradients)
    parameters: Any = state.model
    clipped = clip(gradients, norm, optimizer.clip_norm)
    direction, after = transformation(optimizer).update(clipped, state.optimizer, parameters)
    rate = learning_rate(optimizer, state.step, steps)
    model = jax.tree.map(lambda p, d: (p - rate.astype(d.dtype) * d).astype(p.dtype), parameters, direction)

    skip = ~(jnp.isfinite(total.objective) & jnp.isfinite(norm))
    model, after = jax.tree.map(
        lambda old, new: jnp.where(skip, old, new), (state.model, state.optimizer), (model, after)
    )
    in_row = jnp.where(skip, state.skipped_in_row + 1, 0)
    state = TrainState(model, after, state.step + 1, state.skipped + skip, in_row)
    # States leave a program as they entered it, or the next call would not fit.
    state = jax.tree.map(jax.lax.with_sharding_constraint, state, plan.shardings(state, "parameters"))
    loss = total.cross_entropy / count.astype(total.cross_entropy.dtype)
    return state, Metrics(loss, tokens, norm, rate, skip, in_row)


def batch_gradients(
    model: Transformer, batch: Batch, config: StepConfig, plan: Plan
) -> tuple[LossSum, Int[Array, ""], Transformer]:
    """Loss sums, trained tokens and gradients of the sum of the objective, over all tokens of a batch.

    Gradients are summed in `precision.reduce` over devices and parts, and split as parameters are.
    """
    precision = config.precision
    wide = jnp.promote_types(precision.reduce, jnp.float32)
    lowered, slots = cast_matrices(model, jnp.dtype(precision.compute)), gradient_slots(model, wide)

    def objective(slots: Transformer, part: Batch) -> tuple[Array, LossSum]:
        whole = gather_on_use(lowered, slots, plan)
        hidden = hidden_states(whole, part, config, plan)
        total = cross_entropy(hidden, output_weight(whole), part.targets, chunk=config.loss_chunk, z_loss=config.z_loss)
        return total.objective, total

    def gradients(part: Batch) -> tuple[LossSum, Transformer]:
        gradients, total = jax.grad(objective, has_aux=True)(slots, part)
        gradients = jax.tree.map(lambda g: g.astype(wide), gradients)
        return total, jax.tree.map(jax.lax.with_sharding_constraint, gradients, plan.shardings(gradients, "parameters"))

    tokens = jnp.sum(batch.targets >= 0, dtype=jnp.int32)
    if config.accumulation == 1:
        total, sums = gradients(batch)
        return total, tokens, sums

    def add(sums: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradients(part)), None

    parts = split(batch, config.accumulation, plan)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradients, jax.tree.map(lambda x: x[0], parts))
    )
    (total, sums), _ = jax.lax.scan(add, zeros, parts)
    return total, tokens, sums


def hidden_states(model: Transformer, batch: Batch, config: StepConfig, plan: Plan) -> Float[Array, "batch seq embed"]:
    """Final hidden states of a batch, in the compute dtype; the model's matrices are `GatheredWeight`s."""
    info = ForwardInfo(
        positions=batch.positions,
        segments=batch.segments,
        attend=ContextAttention.over(batch.segments, config.attention, plan),
        plan=plan,
        remat=rematerialised(config.remat),
    )
    hidden, _ = model(batch.tokens, info, dtype=jnp.dtype(config.precision.compute))
    return hidden


def output_weight(model: Transformer) -> GatheredWeight:
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
