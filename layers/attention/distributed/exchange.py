"""Partial results on the wire: out and lse in one message, by one collective, and their cotangents back."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from treering.layers.attention.partial import Partial


@dataclass(frozen=True)
class Route:
    """How one packed message travels, and how its cotangent travels back."""

    axis: str
    gather: bool
    """One copy to every device, else a part of the heads to each."""
    groups: tuple[tuple[int, ...], ...] | None = None

    def _groups(self) -> list[list[int]] | None:
        return None if self.groups is None else [list(group) for group in self.groups]

    def send(self, message: Shaped[Array, "batch seq heads lanes"]) -> Shaped[Array, "parts batch seq shared lanes"]:
        if self.gather:
            return lax.all_gather(message, self.axis, to="invarying")
        return lax.all_to_all(message[None], self.axis, 3, 0, tiled=True, axis_index_groups=self._groups())

    def send_back(
        self, message: Shaped[Array, "parts batch seq shared lanes"]
    ) -> Shaped[Array, "batch seq heads lanes"]:
        if self.gather:
            return lax.dynamic_index_in_dim(message, lax.axis_index(self.axis), keepdims=False)
        return lax.all_to_all(message, self.axis, 0, 3, tiled=True, axis_index_groups=self._groups())[0]


def pack(part: Partial) -> Shaped[Array, "*rows lanes"]:
    """One array of out and lse. Where their dtypes differ both travel as integers, which no compiler pass rounds."""
    if part.out.dtype == part.lse.dtype:
        return jnp.concatenate([part.out, part.lse[..., None]], axis=-1)
    lane = jnp.dtype(f"uint{8 * part.out.dtype.itemsize}")
    return jnp.concatenate([lax.bitcast_convert_type(x, lane) for x in (part.out, part.lse)], axis=-1)


def unpack(message: Shaped[Array, "*rows lanes"], out_dtype: jnp.dtype, lse_dtype: jnp.dtype) -> Partial:
    """What `pack` made one array of."""
    if out_dtype == lse_dtype:
        return Partial(message[..., :-1], message[..., -1])
    lanes = jnp.dtype(lse_dtype).itemsize // jnp.dtype(out_dtype).itemsize
    out, lse = message[..., :-lanes], message[..., -lanes:]
    return Partial(lax.bitcast_convert_type(out, out_dtype), lax.bitcast_convert_type(lse, lse_dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def exchange(part: Partial, route: Route) -> Partial:
    """The parts that reach this device along `route`, in rank order: out `[parts batch seq shared head_dim]`.

    Reverse-mode gradients only: a bitcast has none, so the way back is stated.
    """
    return unpack(route.send(pack(part)), part.out.dtype, part.lse.dtype)


def _exchange_forward(part: Partial, route: Route) -> tuple[Partial, None]:
    return exchange(part, route), None


def _exchange_backward(route: Route, _: None, cotangent: Partial) -> tuple[Partial]:
    back = route.send_back(pack(cotangent))
    return (unpack(back, cotangent.out.dtype, cotangent.lse.dtype),)


exchange.defvjp(_exchange_forward, _exchange_backward)
