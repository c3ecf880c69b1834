"""A linear map between named dims."""

import dataclasses
import math
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from treering.layers.attention.partial import statistics_dtype
from treering.layers.parallel.sharding import array_field


class StoredWeight(Protocol):
    """What a weight that is not a plain array must do (a quantised one, say): multiply by itself."""

    def matmul(self, x: Array) -> Array:
        """`x` `[*rows in]` times the weight: `[*rows out]`, in x's dtype."""
        ...


class InputsFirst(eqx.Module):
    """A weight stored `[*in_dims *out_dims]`. A `StoredWeight`.

    XLA on CPU packs a weight again for each product with more than one row. In this order that takes half the time.
    """

    value: Float[Array, "..."] = array_field(lambda self: (*self.in_dims, *self.out_dims))
    in_dims: tuple[str, ...] = eqx.field(static=True)
    out_dims: tuple[str, ...] = eqx.field(static=True)

    def matmul(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        """`x` times the weight, its in dims and out dims each taken as one."""
        weight = self.value.reshape(x.shape[-1], -1).astype(x.dtype)
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())))


class Linear(eqx.Module):
    """`y = x W^T + b`, over any number of input and output dims.

    The weight keeps its full rank, output dims first, `[*out_dims *in_dims]`, so that heads stay visible to sharding
    and checkpoints convert without a transpose.
    """

    weight: Any = array_field(lambda self: (*self.out_dims, *self.in_dims))
    """An array, or a `StoredWeight`."""
    bias: Float[Array, "..."] | None = array_field(lambda self: self.out_dims)
    lora: Any
    """A low-rank update: a module from `[*rows *in]` to `[*rows *out]`, added to the result; or None."""
    in_dims: tuple[str, ...] = eqx.field(static=True)
    out_dims: tuple[str, ...] = eqx.field(static=True)
    out_shape: tuple[int, ...] = eqx.field(static=True)

    @staticmethod
    def init(dims: str, sizes: dict[str, int], *, bias: bool = False, std: float = 0.02, key: PRNGKeyArray) -> "Linear":
        """A map such as `Linear.init("embed -> heads head_dim", sizes, key=key)` with normal weights."""
        source, target = (tuple(side.split()) for side in dims.split("->"))
        out_shape = tuple(sizes[dim] for dim in target)
        shape = out_shape + tuple(sizes[dim] for dim in source)
        return Linear(
            weight=std * jax.random.normal(key, shape),
            bias=jnp.zeros(out_shape) if bias else None,
            lora=None,
            in_dims=source,
            out_dims=target,
            out_shape=out_shape,
        )

    def inputs_first(self) -> "Linear":
        """The same map with its weight stored in dims first; also of maps stacked over layers.

        A `StoredWeight` stays as it is.
        """
        if not isinstance(self.weight, jax.Array):
            return self
        dims = range(self.weight.ndim)
        first = self.weight.ndim - len(self.in_dims)
        stacked = first - len(self.out_dims)
        weight = self.weight.transpose(*dims[:stacked], *dims[first:], *dims[stacked:first])
        return dataclasses.replace(self, weight=InputsFirst(weight, self.in_dims, self.out_dims))

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Maps `[*rows *in_dims]` to `[*rows *out_dims]` in x's dtype."""
        rows = x.shape[: x.ndim - len(self.in_dims)]
        flat = x.reshape(*rows, math.prod(x.shape[len(rows) :]))
        if isinstance(self.weight, jax.Array):
            # As [out in] at the product: XLA on CPU copies a weight of higher rank that is contracted in place.
            y = project(flat, self.weight.reshape(math.prod(self.out_shape), flat.shape[-1]))
        else:
            y = self.weight.matmul(flat)
        y = y.reshape(*rows, *self.out_shape)
        if self.bias is not None:
            # In the wide dtype, for the sake of the bias's gradient: it is a sum over all tokens.
            wide = statistics_dtype(x.dtype)
            y = (y.astype(wide) + jnp.broadcast_to(self.bias.astype(wide), y.shape)).astype(x.dtype)
        if self.lora is not None:
            y = y + self.lora(x)
        return y


def project(x: Float[Array, "*rows in"], weight: Float[Array, "out in"]) -> Float[Array, "*rows out"]:
    """`x W^T` in x's dtype; the weight is cast to it."""
    return jax.lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))
