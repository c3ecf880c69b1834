"""Cross entropy that never holds the logits of more than a few tokens.

The vocabulary is split over tensor, tokens over the other axes, and a device takes its tokens chunk by chunk. The
gradient is computed in the forward pass, while a chunk's logits exist: three products per chunk, where recomputing them
in the backward pass would take four.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from treering.layers.attention.partial import statistics_dtype
from treering.layers.attention.varying import vary_over, varying_axes
from treering.layers.nn.gathered_weight import GatheredWeight, WeightSharding


class LossSum(eqx.Module):
    """Sums over trained tokens. Divide by their number in the whole batch, not by that of a device or a part."""

    objective: Float[Array, ""]
    """Cross entropy plus z-loss: what is differentiated."""
    cross_entropy: Float[Array, ""]
    """In nats; a constant to gradients."""


def cross_entropy(
    hidden: Float[Array, "batch seq embed"],
    output: GatheredWeight,
    targets: Int[Array, "batch seq"],
    *,
    chunk: int,
    z_loss: float = 0.0,
) -> LossSum:
    """The loss of predicting `targets` from the logits `hidden output^T`, `output` being `[vocab embed]`.

    A negative target is not trained on, whatever its number. Logits, their softmax and the sums are float32 or wider;
    the gradient of `output` is summed in its slot's dtype. `chunk` is the number of tokens per device whose logits
    exist at a time. The z-loss adds z_loss x log(sum of exponentials)^2 per token (arXiv 2204.02311, section 5).
    """
    how = _How(output.sharding, chunk, z_loss, None if output.slot is None else output.slot.dtype)
    objective, nats = _sums(how, hidden, targets, output.value, output.slot)
    return LossSum(objective, lax.stop_gradient(nats))


def token_losses(
    hidden: Float[Array, "batch seq embed"], output: GatheredWeight, targets: Int[Array, "batch seq"], *, chunk: int
) -> Float[Array, "batch seq"]:
    """Cross entropy of each token, 0 where the target is negative; arguments as `cross_entropy`. Has no gradient."""
    return _on_devices(_How(output.sharding, chunk, 0.0, None), hidden, targets, output.value, gradients=False).nats


@dataclass(frozen=True)
class _How:
    """The static part of a loss."""

    sharding: WeightSharding
    chunk: int
    z_loss: float
    wide: jnp.dtype | None
    """The dtype of the output weight's gradient."""


class _Tokens(NamedTuple):
    """What comes of a share of tokens: numbers of each, and the gradients of their objective's sum.

    Arrays, or how they are split.
    """

    nats: Any
    penalty: Any
    d_hidden: Any = None
    d_weight: Any = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(how: _How, hidden: Array, targets: Array, weight: Array, slot: Array | None) -> tuple[Array, Array]:
    return _totals(_on_devices(how, hidden, targets, weight, gradients=False))


def _sums_forward(how: _How, hidden: Array, targets: Array, weight: Array, slot: Array | None) -> tuple:
    tokens = _on_devices(how, hidden, targets, weight, gradients=True)
    return _totals(tokens), (tokens.d_hidden, tokens.d_weight)


def _sums_backward(how: _How, kept: tuple, cotangents: tuple[Array, Array]) -> tuple:
    d_hidden, d_weight = kept
    d_objective, _ = cotangents
    scaled = (d_hidden.astype(d_objective.dtype) * d_objective).astype(d_hidden.dtype)
    return scaled, None, None, None if d_weight is None else d_weight * d_objective.astype(d_weight.dtype)


_sums.defvjp(_sums_forward, _sums_backward)


def _totals(tokens: _Tokens) -> tuple[Array, Array]:
    nats = jnp.sum(tokens.nats)
    return nats + jnp.sum(tokens.penalty), nats


def _on_devices(how: _How, hidden: Array, targets: Array, weight: Array, *, gradients: bool) -> _Tokens:
    plan = how.sharding.plan
    tokens = plan.spec("batch seq", targets.shape)
    rows = PartitionSpec(*tokens, None)
    with_weight = gradients and how.wide is not None
    out_specs = _Tokens(tokens, tokens, rows if gradients else None, how.sharding.sharded if with_weight else None)
    with jax.named_scope("loss"):
        return jax.shard_map(
            functools.partial(_on_device, how, gradients=gradients),
            mesh=plan.mesh,
            in_specs=(rows, tokens, how.sharding.gathered),
            out_specs=out_specs,
        )(hidden, targets, weight)


def _on_device(how: _How, hidden: Array, targets: Array, weight: Array, *, gradients: bool) -> _Tokens:
    """A device's tokens, against its share of the vocabulary."""
    batch, seq, embed = hidden.shape
    count = batch * seq
    chunks = -(-count // how.chunk)
    size = -(-count // chunks)
    padding = chunks * size - count
    h = jnp.pad(hidden.reshape(count, embed), ((0, padding), (0, 0))).reshape(chunks, size, embed)
    t = jnp.pad(targets.reshape(count), (0, padding), constant_values=-1).reshape(chunks, size)
    d_weight = None
    if gradients and how.wide is not None:
        d_weight = vary_over(varying_axes(hidden, targets, weight), jnp.zeros(weight.shape, how.wide))

    def chunk(d_weight, inputs):
        h, t = inputs
        done = _chunk(how, h, t, weight, gradients=gradients)
        return None if d_weight is None else d_weight + done.d_weight, done._replace(d_weight=None)

    d_weight, done = lax.scan(chunk, d_weight, (h, t))
    per_token = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count].reshape(batch, seq, *x.shape[2:]), done)
    return per_token._replace(d_weight=None if d_weight is None else how.sharding.reduce_scatter(d_weight))


def _chunk(how: _How, h: Array, t: Array, weight: Array, *, gradients: bool) -> _Tokens:
    axes = how.sharding.vocab_axes()
    dtype = statistics_dtype(h.dtype)
    logits = lax.dot_general(h, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    places = t - (lax.axis_index(axes) * weight.shape[0] if axes else 0)
    here = lax.broadcasted_iota(t.dtype, logits.shape, 1) == places[:, None]
    peak = jnp.max(logits, axis=1)
    peak = lax.pmax(peak, axes) if axes else peak
    # The barrier keeps XLA from computing the exponentials a second time for their sum.
    weights = lax.optimization_barrier(jnp.exp(logits - peak[:, None]))
    sums = jnp.stack([jnp.sum(weights, axis=1), jnp.sum(jnp.where(here, logits, 0), axis=1)])
    total, target_logit = lax.psum(sums, axes) if axes else sums
    lse = peak + jnp.log(total)
    trained = t >= 0
    nats = jnp.where(trained, lse - target_logit, 0)
    penalty = jnp.where(trained, how.z_loss * lse * lse, 0)
    if not gradients:
        return _Tokens(nats, penalty)
    slope = jnp.where(trained, (1 + 2 * how.z_loss * lse) / total, 0)
    d_logits = weights * slope[:, None] - jnp.where(here & trained[:, None], 1, 0)
    d_logits = lax.optimization_barrier(d_logits.astype(h.dtype))
    d_h = lax.dot_general(d_logits, weight, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
    d_h = (lax.psum(d_h, axes) if axes else d_h).astype(h.dtype)
    if how.wide is None:
        return _Tokens(nats, penalty, d_h)
    d_weight = lax.dot_general(d_logits, h, (((0,), (0,)), ((), ())), preferred_element_type=how.wide)
    return _Tokens(nats, penalty, d_h, d_weight)
