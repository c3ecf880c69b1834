"""What every attention function requires of its arguments."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from treering.layers.attention.mask import Mask


def check_mask(mask: Any) -> None:
    """Raises ValueError, naming what to pass instead, where `mask` is not a `Mask`."""
    if isinstance(mask, Mask):
        return
    if hasattr(mask, "shape"):
        raise ValueError(
            f"mask is an array of shape {mask.shape}: it must be a Mask. Pass documents and padding as segments, "
            "the order of tokens as positions, and the rest as Mask(causal=..., window=...)"
        )
    raise ValueError(f"mask {mask!r}: it must be a Mask, such as Mask() (causal) or Mask(causal=False) (every key)")


def divisors(size: int) -> str:
    """The numbers that divide `size`, for error messages."""
    return ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)


def check_shapes(q: Array, k: Array, v: Array) -> None:
    """Raises ValueError where q, k and v are not floating, hold nothing, or do not fit each other."""
    for name, x, dims in (("q", q, "batch seq"), ("k", k, "batch kv_seq kv"), ("v", v, "batch kv_seq kv")):
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {x.shape}: it must be [{dims}{'_' if name != 'q' else ' '}heads head_dim]"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}: it must be floating, such as bfloat16 or float32")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: every dim must be at least 1")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape}: both must be [batch kv_seq kv_heads head_dim]")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} [batch seq heads head_dim] must share batch and head_dim")
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise ValueError(
            f"kv_heads {kv_heads} does not divide heads {heads}: each key head serves an equal group of query heads "
            f"(kv_heads that work: {divisors(heads)})"
        )


def check_token_data(name: str, x: Array | None, batch: int, length: int) -> None:
    """Raises ValueError where positions or segments are not one per token, or not int32 or int64."""
    if x is None:
        return
    if x.shape != (batch, length):
        dims = "[batch kv_seq]" if name.startswith("kv") else "[batch seq]"
        raise ValueError(f"{name} has shape {x.shape}: it must be {dims}, here {(batch, length)}")
    if x.dtype not in (jnp.int32, jnp.int64):
        raise ValueError(f"{name} has dtype {x.dtype}: it must be int32 or int64")
