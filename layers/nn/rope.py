"""Rotary position embedding, from positions (arXiv 2104.09864).

Angles are float32 whatever the model computes in: rounding them, or positions above 256, to bfloat16 turns heads by
the wrong angle. Nothing is tabled, so any position works, on any shard.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from treering.configs.rope import DefaultRope, LinearRope, Llama3Rope, RopeConfig, YarnRope


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float[np.ndarray, "pairs"]:
    """Radians per position for each of `head_dim / 2` pairs, float32."""
    # The power in float64, rounded once: numpy's float32 power is off by a bit for one frequency in six, and at
    # position 131071 a bit turns a head by 6e-3.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    base = np.float32(1) / periods
    match rope:
        case DefaultRope():
            return base
        case LinearRope(factor=factor):
            return base / np.float32(factor)
        case Llama3Rope():
            return _llama3(rope, base)
        case YarnRope():
            return _yarn(rope, periods, head_dim)


# The order of operations below is that of the code which models were trained with, so that no bit differs. There a
# number divided by an array is the number times the array's reciprocal.


def _llama3(rope: Llama3Rope, base: np.ndarray) -> np.ndarray:
    one = np.float32(1)
    wavelength = one / base * np.float32(2 * math.pi)
    longest = rope.original_context / rope.low_frequency_factor
    shortest = rope.original_context / rope.high_frequency_factor
    kept = (one / wavelength * np.float32(rope.original_context) - np.float32(rope.low_frequency_factor)) / np.float32(
        rope.high_frequency_factor - rope.low_frequency_factor
    )
    ramp = (1 - kept) * base / rope.factor + kept * base
    scaled = np.where(wavelength > longest, base / rope.factor, np.where(wavelength < shortest, base, ramp))
    return scaled.astype(np.float32)


def _yarn(rope: YarnRope, periods: np.ndarray, head_dim: int) -> np.ndarray:
    def pair_of(turns: float) -> float:
        """The pair that turns this often over the original context."""
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high if high != low else low + 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = 1 - np.clip(ramp, 0, 1)
    one = np.float32(1)
    return (one / (np.float32(rope.factor) * periods) * (1 - kept) + one / periods * kept).astype(np.float32)


def rotate(
    x: Float[Array, "batch seq heads head_dim"], positions: Int[Array, "batch seq"], rope: RopeConfig
) -> Float[Array, "batch seq heads head_dim"]:
    """Turns each pair (i, i + head_dim / 2) of every head by its angle at the token's position.

    Pairs are half a head apart, as in Hugging Face checkpoints; formats that interleave them are permuted on import.
    The result is in x's dtype.
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, x.shape[-1]))
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None, :]
    factor = rope.attention_factor if isinstance(rope, YarnRope) else 1.0
    cosine, sine = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
