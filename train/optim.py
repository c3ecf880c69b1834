"""Optimizers and learning-rate schedules, through optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from treering.configs.errors import UserError
from treering.configs.train import OptimizerConfig, ScheduleConfig
from treering.layers.parallel.sharding import dims_of, is_matrix


def transformation(config: OptimizerConfig) -> optax.GradientTransformation:
    """From gradients to the direction of an update, which `learning_rate` scales: subtract it from the parameters.

    Matrices decay, recognised by their declared dims: stacked norms and biases over heads do not. As in torch, AdamW
    adds the decay to the direction and SGD adds it to the gradient.
    """
    decay = optax.add_decayed_weights(config.weight_decay, decayed) if config.weight_decay else optax.identity()
    if config.kind == "sgd":
        memory = optax.trace(config.momentum) if config.momentum else optax.identity()
        return optax.chain(decay, memory)
    return optax.chain(optax.scale_by_adam(config.b1, config.b2, config.eps), decay)


def decayed(model: Any) -> Any:
    """The same tree with True for the arrays that decay."""
    return jax.tree.map(is_matrix, dims_of(model))


def clip(gradients: Any, norm: Float[Array, ""], limit: float | None) -> Any:
    """The gradients, whose norm over all of them is `norm`, scaled down to norm `limit` where they exceed it."""
    if limit is None:
        return gradients
    factor = jnp.where(norm > limit, limit / jnp.where(norm > limit, norm, 1), 1)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)


def check_schedule(config: ScheduleConfig, steps: int) -> None:
    """Raises ValueError where a schedule does not fit into a run of `steps`."""
    decay = config.decay_steps or 0
    if decay > steps:
        rule = f"it must be at most {steps}, the steps of the run"
        raise UserError(rule, field="optimizer.schedule.decay_steps", value=decay)
    if config.warmup_steps + decay > steps:
        rest = f" without the {decay} of optimizer.schedule.decay_steps" if decay else ""
        rule = f"it must be at most {steps - decay}, the steps of the run{rest}"
        raise UserError(rule, field="optimizer.schedule.warmup_steps", value=config.warmup_steps)


def learning_rate(config: OptimizerConfig, step: Int[Array, ""], steps: int) -> Float[Array, ""]:
    """The rate of step `step` (the first is 0) in a run of `steps`.

    The warm-up's step s has (s + 1) / warmup_steps of the peak. Then cosine and linear decay, to `final_share` of it at
    the last step; wsd does so over its last `decay_steps`. Beyond the run's end the rate stays.
    """
    schedule = config.schedule
    check_schedule(schedule, steps)
    warmup, last = schedule.warmup_steps, steps - 1
    share = jnp.float32(1)
    if schedule.kind in ("cosine", "linear"):
        fallen = _between(step, warmup, max(last, warmup + 1))
        part = (1 - jnp.cos(jnp.pi * fallen)) / 2 if schedule.kind == "cosine" else fallen
        share = 1 - (1 - schedule.final_share) * part
    if schedule.decay_steps is not None:
        share = 1 - (1 - schedule.final_share) * _between(step, last - schedule.decay_steps, last)
    if warmup:
        share = jnp.where(step < warmup, (step + 1) / jnp.float32(warmup), share)
    return (config.learning_rate * share).astype(jnp.float32)


def _between(step: Int[Array, ""], start: int, end: int) -> Float[Array, ""]:
    """How far `step` is from `start` to `end`, from 0 to 1."""
    return jnp.clip((step - start).astype(jnp.float32) / (end - start), 0, 1)
