"""Which keys a query sees: one definition for every attention algorithm.

A mask has a static part, `Mask`, known when a program is built, and a data part, the positions and segments of queries
and keys. Segment 0 is padding and an empty cache slot has position -1: neither is ever seen, and a padding query sees
nothing.

Pairs of a block of queries and a block of keys fall into the classes of `BlockClass`, which follow from the blocks'
`Bounds` when the program runs (`classify`), and blocks that nobody sees cost nothing. Where the order of tokens fixes
which pairs see each other, `layers.attention.kernels.Geometry` says so instead.
"""

import enum
import math
from dataclasses import dataclass
from numbers import Integral

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True, kw_only=True)
class Mask:
    """The static part of a mask, and what shapes the scores."""

    causal: bool = True
    """Whether a query sees only keys at its own position and before."""
    window: int | None = None
    """How many positions a query sees, its own included; None for all."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    scale: float | None = None
    """What scores are multiplied by; None for 1 / sqrt(head_dim)."""

    def __post_init__(self):
        if self.window is not None and not (isinstance(self.window, Integral) and self.window < 2**31):
            raise ValueError(f"window {self.window}: it must be an integer below 2**31 (None for no window)")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window {self.window}: a window holds at least the query's own position (None for no window)"
            )
        if self.window is not None and not self.causal:
            raise ValueError(f"window {self.window} without causal: a window looks back from the query's position")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap {self.softcap}: it must be above 0 and finite (None for no cap)")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale {self.scale}: it must be finite (None for 1 / sqrt(head_dim))")
        # NumPy's float64 would widen float32 scores where float64 is on.
        for name in ("softcap", "scale"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))

    def score_scale(self, head_dim: int) -> float:
        """The factor on scores for heads of `head_dim`."""
        return head_dim**-0.5 if self.scale is None else self.scale


def visible(
    mask: Mask,
    q_positions: Int[Array, "*batch q"],
    kv_positions: Int[Array, "*batch k"],
    q_segments: Int[Array, "*batch q"] | None = None,
    kv_segments: Int[Array, "*batch k"] | None = None,
) -> Bool[Array, "*batch q k"]:
    """True where a query sees a key."""
    q, k = q_positions[..., :, None], kv_positions[..., None, :]
    seen = jnp.broadcast_to(k >= 0, jnp.broadcast_shapes(q.shape, k.shape))
    if mask.causal:
        seen &= k <= q
    if mask.window is not None:
        seen &= q - k < mask.window
    if q_segments is not None and kv_segments is not None:
        seen &= same_segment(q_segments, kv_segments)
    return seen


def same_segment(q_segments: Int[Array, "*batch q"], kv_segments: Int[Array, "*batch k"]) -> Bool[Array, "*batch q k"]:
    """True where a query and a key belong to one document."""
    return (q_segments[..., :, None] == kv_segments[..., None, :]) & (q_segments[..., :, None] > 0)


class BlockClass(enum.IntEnum):
    """What a mask does to a pair of a query block and a key block."""

    EMPTY = 0
    """No query sees a key: nothing to compute."""
    FULL = 1
    """Every query sees every key: nothing to mask."""
    MIXED = 2
    """Some pairs are seen; `visible` says which."""


_FAR = 2**30
"""Beyond every position and segment, with room to subtract in int32."""


class Bounds(eqx.Module):
    """The least and greatest position and segment of each block's tokens, padding and empty slots left out.

    A block without a token has lows above highs. `complete` is False where a block holds padding or empty slots.
    """

    position_low: Int[Array, "*blocks"]
    position_high: Int[Array, "*blocks"]
    segment_low: Int[Array, "*blocks"]
    segment_high: Int[Array, "*blocks"]
    complete: Bool[Array, "*blocks"]

    @staticmethod
    def of(
        positions: Int[Array, "*blocks block"], segments: Int[Array, "*blocks block"] | None, *, slots: bool
    ) -> "Bounds":
        """Bounds over the last dim; with `slots` a negative position is an empty slot (keys), not a token."""
        real = positions >= 0 if slots else jnp.ones_like(positions, bool)
        if segments is None:
            segments = jnp.ones_like(positions)
        real &= segments > 0

        def low(x):
            return jnp.min(jnp.where(real, x, _FAR), axis=-1)

        def high(x):
            return jnp.max(jnp.where(real, x, -_FAR), axis=-1)

        return Bounds(low(positions), high(positions), low(segments), high(segments), jnp.all(real, axis=-1))

    @staticmethod
    def of_segments(segments: Int[Array, "*blocks block"]) -> "Bounds":
        """Bounds where positions do not matter: all are 0."""
        return Bounds.of(jnp.zeros_like(segments), segments, slots=False)


def classify(mask: Mask, q: Bounds, kv: Bounds) -> Int[Array, "*blocks"]:
    """The `BlockClass` of each pair of blocks, EMPTY, FULL or MIXED, by bounds that broadcast with each other.

    Bounds can only err towards MIXED: a block whose documents interleave with another's is computed under its mask.
    """
    empty = (kv.position_low > kv.position_high) | (q.position_low > q.position_high)
    empty |= (q.segment_high < kv.segment_low) | (kv.segment_high < q.segment_low)
    one_document = (q.segment_low == q.segment_high) & (kv.segment_low == kv.segment_high)
    full = q.complete & kv.complete & one_document & (q.segment_low == kv.segment_low)
    if mask.causal:
        empty |= kv.position_low > q.position_high
        full &= kv.position_high <= q.position_low
    if mask.window is not None:
        empty |= q.position_low - mask.window >= kv.position_high
        full &= q.position_high - mask.window < kv.position_low
    return jnp.where(empty, int(BlockClass.EMPTY), jnp.where(full, int(BlockClass.FULL), int(BlockClass.MIXED)))


def worse(first: Int[Array, "*blocks"], second: Int[Array, "*blocks"]) -> Int[Array, "*blocks"]:
    """The class of blocks of which two conditions say EMPTY, FULL or MIXED, where both must hold."""
    empty = (first == BlockClass.EMPTY) | (second == BlockClass.EMPTY)
    full = (first == BlockClass.FULL) & (second == BlockClass.FULL)
    return jnp.where(empty, int(BlockClass.EMPTY), jnp.where(full, int(BlockClass.FULL), int(BlockClass.MIXED)))
