"""Partial attention results and the merge that joins them.

Attention over a set of keys is determined by two values per query and head: the output over those keys, and the log of
the sum of their exponentiated scores. Results over disjoint sets of keys merge; the merge is associative and
commutative with an identity, so blockwise, ring and tree attention are folds of one operation in different orders
(arXiv 2408.04093, section 4).
"""

import functools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def statistics_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of softmax statistics for data of `dtype`: float32, or wider."""
    return jnp.promote_types(dtype, jnp.float32)


class Partial(eqx.Module):
    """Attention over some of the keys.

    A row without keys is the identity of the merge: out 0, lse -inf.
    """

    out: Float[Array, "*rows head_dim"]
    """The normalised output over the keys seen."""
    lse: Float[Array, "*rows"]
    """Natural log of the sum of exponentiated scores, float32 or wider."""

    @staticmethod
    def empty(rows: Sequence[int], head_dim: int, dtype: DTypeLike = jnp.float32) -> "Partial":
        """No key seen yet, for `rows` rows: the identity of `merge`."""
        return Partial(jnp.zeros((*rows, head_dim), dtype), jnp.full(tuple(rows), -jnp.inf, statistics_dtype(dtype)))


def weigh(lse: Float[Array, "*rows"], total: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """The weight exp(lse - total) of a part in the total; 0 for an empty part, without NaN in value or gradient."""
    seen = lse > -jnp.inf
    return jnp.where(seen, jnp.exp(jnp.where(seen, lse - jnp.where(seen, total, 0), 0)), 0)


def merge_stacked(parts: Partial) -> Partial:
    """Joins partial results stacked along the first axis, in that order and all at once.

    `parts.out` is `[parts *rows head_dim]`, `parts.lse` `[parts *rows]`. The result has out in the statistics' dtype.
    """
    return _join([Partial(out, lse) for out, lse in zip(parts.out, parts.lse, strict=True)])


def merge(first: Partial, second: Partial) -> Partial:
    """Joins two partial results over disjoint sets of keys; an empty side is the identity."""
    return _join([first, second])


def _join(parts: Sequence[Partial]) -> Partial:
    # Term by term: as a reduction over a stacked axis XLA's CPU backend computes the exponentials again for each
    # element of head_dim, at 30 to 60 times the cost.
    peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, (part.lse for part in parts)))
    peak = jnp.where(peak > -jnp.inf, peak, 0)
    weights = [jnp.exp(part.lse - peak) for part in parts]
    total = functools.reduce(jnp.add, weights)
    some = total > 0
    safe = jnp.where(some, total, 1)
    shares = ((weight / safe)[..., None] * part.out for weight, part in zip(weights, parts, strict=True))
    return Partial(functools.reduce(jnp.add, shares), jnp.where(some, peak + jnp.log(safe), -jnp.inf))


def merge_all(parts: Sequence[Partial]) -> Partial:
    """Joins any number of partial results, in order."""
    return functools.reduce(merge, parts)
