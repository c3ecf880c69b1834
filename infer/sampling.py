"""Choosing the next token, row by row, on device.

The order is that of Hugging Face's processors and warpers: bias, repetition, presence and frequency penalties, then
temperature, top-k, top-p, min-p. A row's draw depends on its own seed and how many tokens it has drawn, so neither its
neighbours nor the mesh change it.
"""

from typing import TYPE_CHECKING, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from treering.layers.parallel.sharding import Plan, array_field

Kind = Literal["greedy", "temperature", "full"]
"""What a batch needs: argmax alone, temperature in addition, or everything. The first two never gather the logits."""


# On the devices, or on their way there.
if TYPE_CHECKING:
    AnyArray = Array
else:
    AnyArray = jax.Array | np.ndarray


class SamplingRows(eqx.Module):
    """Each row's settings and what it has seen."""

    seed: UInt32[AnyArray, "batch"] = array_field("batch")
    temperature: Float[AnyArray, "batch"] = array_field("batch")
    top_k: Int[AnyArray, "batch"] = array_field("batch")
    """0 for all."""
    top_p: Float[AnyArray, "batch"] = array_field("batch")
    min_p: Float[AnyArray, "batch"] = array_field("batch")
    repetition_penalty: Float[AnyArray, "batch"] = array_field("batch")
    presence_penalty: Float[AnyArray, "batch"] = array_field("batch")
    frequency_penalty: Float[AnyArray, "batch"] = array_field("batch")
    bias: Float[AnyArray, "batch vocab"] = array_field("batch vocab")
    prompted: Bool[AnyArray, "batch vocab"] = array_field("batch vocab")
    """Whether the prompt holds a token."""
    counts: Int[AnyArray, "batch vocab"] = array_field("batch vocab")
    """How often a token was drawn."""

    @staticmethod
    def neutral(batch: int, vocab: int) -> "SamplingRows":
        """Greedy rows without penalties."""
        zeros, ones = jnp.zeros(batch), jnp.ones(batch)
        return SamplingRows(
            seed=jnp.zeros(batch, jnp.uint32),
            temperature=zeros,
            top_k=jnp.zeros(batch, jnp.int32),
            top_p=ones,
            min_p=zeros,
            repetition_penalty=ones,
            presence_penalty=zeros,
            frequency_penalty=zeros,
            bias=jnp.zeros((batch, vocab)),
            prompted=jnp.zeros((batch, vocab), bool),
            counts=jnp.zeros((batch, vocab), jnp.int32),
        )


def draw(
    logits: Float[Array, "batch vocab"],
    rows: SamplingRows,
    drawn: Int[Array, "batch"],
    kind: Kind,
    plan: Plan,
) -> Int[Array, "batch"]:
    """The next token of each row, where `drawn` tokens came before. Temperature 0 takes the most likely.

    A draw is the argmax of perturbed scores (Gumbel), so it needs no more messages than greedy choice.
    """
    scores = logits.astype(jnp.float32)
    if kind == "greedy":
        return argmax(scores, plan)
    if kind == "full":
        # Sorting takes whole rows: the one place where logits are gathered.
        whole = plan.sharding("batch", scores.shape[:1]).spec
        scores = lax.with_sharding_constraint(scores, jax.NamedSharding(plan.mesh, PartitionSpec(*whole, None)))
        scores = penalise(scores, rows)
    sampled = rows.temperature > 0
    warm = scores / jnp.where(sampled, rows.temperature, 1)[:, None]
    if kind == "full":
        warm = keep_min_p(keep_top_p(keep_top_k(warm, rows.top_k), rows.top_p), rows.min_p)
    keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(rows.seed, drawn)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:]))(keys)
    chosen = jnp.where(sampled[:, None], warm + plan.constrain(noise, "batch vocab"), scores)
    return argmax(plan.constrain(chosen, "batch vocab"), plan)


def penalise(scores: Float[Array, "batch vocab"], rows: SamplingRows) -> Float[Array, "batch vocab"]:
    """Bias added; tokens of prompt and answer divided by the repetition penalty (multiplied where negative); tokens of
    the answer lowered by the presence penalty, and by the frequency penalty times their number."""
    scores = scores + rows.bias
    seen = rows.prompted | (rows.counts > 0)
    penalty = jnp.broadcast_to(rows.repetition_penalty[:, None], scores.shape)
    scores = jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)
    scores = scores - rows.presence_penalty[:, None] * (rows.counts > 0)
    return scores - rows.frequency_penalty[:, None] * rows.counts


def keep_top_k(scores: Float[Array, "batch vocab"], k: Int[Array, "batch"]) -> Float[Array, "batch vocab"]:
    """-inf below the k-th highest score, ties with it kept; 0 keeps all."""
    vocab = scores.shape[-1]
    ascending = jnp.sort(scores, axis=-1)
    threshold = jnp.take_along_axis(ascending, (vocab - jnp.clip(k, 1, vocab))[:, None], axis=-1)
    return jnp.where((k[:, None] > 0) & (scores < threshold), -jnp.inf, scores)


def keep_top_p(scores: Float[Array, "batch vocab"], p: Float[Array, "batch"]) -> Float[Array, "batch vocab"]:
    """The fewest most likely tokens whose probabilities reach `p`, the one that crosses it included; at least one."""
    order = jnp.argsort(scores, axis=-1)
    below = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(scores, order, axis=-1), axis=-1), axis=-1)
    dropped = (below <= 1 - p[:, None]) & (p[:, None] < 1)
    dropped = dropped.at[:, -1].set(False)
    rows = jnp.arange(scores.shape[0])[:, None]
    return jnp.where(jnp.zeros_like(dropped).at[rows, order].set(dropped), -jnp.inf, scores)


def keep_min_p(scores: Float[Array, "batch vocab"], p: Float[Array, "batch"]) -> Float[Array, "batch vocab"]:
    """Tokens at least `p` times as likely as the most likely."""
    probabilities = jax.nn.softmax(scores, axis=-1)
    return jnp.where(probabilities < p[:, None] * jnp.max(probabilities, axis=-1, keepdims=True), -jnp.inf, scores)


def argmax(scores: Float[Array, "batch vocab"], plan: Plan) -> Int[Array, "batch"]:
    """The token of the highest score, the lowest id among equals.

    Each device finds its own best; one small all-gather of (score, id) pairs decides, so the scores never leave their
    devices.
    """
    axes = plan.axes("vocab", scores.shape[-1])
    rows = plan.spec("batch", scores.shape[:1])

    def per_device(local):
        best = jnp.argmax(local, axis=-1)
        value = jnp.take_along_axis(local, best[:, None], axis=-1)[:, 0].astype(jnp.float32)
        token = (best + lax.axis_index(axes) * local.shape[-1]).astype(jnp.int32)
        pairs = jnp.stack([lax.bitcast_convert_type(value, jnp.int32), token])
        pairs = lax.all_gather(pairs, axes, to="invarying")
        values, tokens = lax.bitcast_convert_type(pairs[:, 0], jnp.float32), pairs[:, 1]
        first = jnp.argmax(values, axis=0)
        return jnp.take_along_axis(tokens, first[None], axis=0)[0]

    if not axes:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return jax.shard_map(per_device, mesh=plan.mesh, in_specs=PartitionSpec(*rows, axes), out_specs=rows)(scores)


def log_probabilities(
    logits: Float[Array, "batch vocab"], tokens: Int[Array, "batch"], top: int
) -> tuple[Float[Array, "batch"], Float[Array, "batch top"], Int[Array, "batch top"]]:
    """Of the raw distribution, before any penalty or temperature: the log-probability of `tokens`, and the `top`
    most likely tokens with theirs."""
    table = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    values, ids = lax.top_k(table, top)
    return jnp.take_along_axis(table, tokens[:, None], axis=-1)[:, 0], values, ids
