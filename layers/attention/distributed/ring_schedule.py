"""What a device computes at one step of a ring.

Under plain causality in zigzag order every step after the first costs every rank the same two blocks, and neither
needs a mask. Rank r holds chunks r and 2 p - 1 - r, its early and late half; the keys that come from rank c are chunks
c and 2 p - 1 - c. Chunk c < p comes before every late half, so (late queries, early keys) is full. Of the rest, if
c < r the early queries see the early keys, and nothing else; if c > r the late queries see the late keys.

                keys of rank c:   early  late              early  late
    queries    early               full     -                 -     -
    of rank r  late                full     -               full  full
                                   c < r                      c > r
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from treering.layers.attention.distributed.token_layout import Tokens
from treering.layers.attention.kernels import BlockMask
from treering.layers.attention.mask import BlockClass, Mask

T = TypeVar("T")

_Q_BATCH, _Q_SEQ = 0, 3
_KV_BATCH, _KV_SEQ = 1, 3


class FullStep:
    """All queries of a device with all keys that it holds at this step.

    Arrays of queries are `[batch kv_heads group seq ...]`, of packed keys and values `[2 batch kv_heads seq head_dim]`.
    """

    def __init__(self, pairs: BlockMask):
        self.pairs = pairs

    def queries(self, x: Array) -> Array:
        """What the kernel takes of an array of queries."""
        return x

    def keys(self, kv: Array) -> Array:
        """What the kernel takes of keys and values."""
        return kv

    def join_queries(self, join: Callable[[T, T], T], whole: T, part: T) -> T:
        """`whole`, joined with the kernel's result where that belongs."""
        return join(whole, part)

    def join_keys(self, join: Callable[[Array, Array], Array], whole: Array, part: Array) -> Array:
        return join(whole, part)


class ZigzagStep(FullStep):
    """Zigzag's two full blocks after the first step, side by side in the batch: (late, early) and (`half`, `half`)."""

    def __init__(self, half: Int[Array, ""]):
        super().__init__(BlockMask(BlockClass.FULL))
        self.q_halves, self.kv_halves = (1, half), (0, half)

    def queries(self, x: Array) -> Array:
        return _take(x, self.q_halves, _Q_SEQ, _Q_BATCH)

    def keys(self, kv: Array) -> Array:
        return _take(kv, self.kv_halves, _KV_SEQ, _KV_BATCH)

    def join_queries(self, join: Callable[[T, T], T], whole: T, part: T) -> T:
        return _join(join, whole, part, self.q_halves, _Q_SEQ, _Q_BATCH)

    def join_keys(self, join: Callable[[Array, Array], Array], whole: Array, part: Array) -> Array:
        return _join(join, whole, part, self.kv_halves, _KV_SEQ, _KV_BATCH)


class RingSchedule:
    """The steps of a ring: at step s a device holds the keys of the rank s before its own."""

    def __init__(self, tokens: Tokens, mask: Mask, axis: str, local_seq: int):
        self.tokens, self.mask, self.axis, self.local_seq = tokens, mask, axis, local_seq
        self.branch_free = tokens.order == "zigzag" and mask.causal and mask.window is None and tokens.fixed()

    def first(self) -> FullStep:
        """With the device's own keys."""
        if self.branch_free:
            return FullStep(BlockMask(BlockClass.DIAGONAL))
        return self.later(0)

    def later(self, step: int | Int[Array, ""]) -> FullStep:
        """With the keys after `step` sends."""
        rank, p = lax.axis_index(self.axis), lax.axis_size(self.axis)
        if self.branch_free:
            return ZigzagStep((step > rank).astype(jnp.int32))
        return FullStep(self.tokens.pairs(self.mask, self.axis, self.local_seq, (rank - step) % p))


def _half(x: Array, half: int | Int[Array, ""], seq_dim: int) -> Array:
    size = x.shape[seq_dim] // 2
    return lax.dynamic_slice_in_dim(x, half * size, size, seq_dim)


def _take(x: Array, halves: tuple, seq_dim: int, batch_dim: int) -> Array:
    return jnp.concatenate([_half(x, half, seq_dim) for half in halves], axis=batch_dim)


def _join(join: Callable[[T, T], T], whole: T, part: T, halves: tuple, seq_dim: int, batch_dim: int) -> T:
    # One after the other: both parts may belong to the same half.
    for n, half in enumerate(halves):
        mine = jax.tree.map(lambda x: jnp.split(x, len(halves), batch_dim)[n], part)  # noqa: B023
        joined = join(jax.tree.map(lambda x: _half(x, half, seq_dim), whole), mine)  # noqa: B023
        put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, half * y.shape[seq_dim], seq_dim)  # noqa: B023, E731
        whole = jax.tree.map(put, whole, joined)
    return whole
