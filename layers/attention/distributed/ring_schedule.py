"""What a device computes at one step of a ring, and how results and gradients of the steps join.

A kernel says which of two schedules it wants (`layers.attention.kernels.Kernel.branch_free`):

- By positions: all queries with all keys at hand, in one call; the kernel finds out from positions which tiles meet.
- Branch-free: blocks whose geometry the order of tokens fixes, so that every device runs the same calls. In contiguous
  and striped order a step is one block, a band at a distance that follows from the two ranks. In zigzag order rank r
  holds chunks r and 2 p - 1 - r of the sequence, its early and late half, and the keys that come from rank c are chunks
  c and 2 p - 1 - c. Chunk c < p comes before every late half, so (late queries, early keys) is full under causality. Of
  the rest, if c < r the early queries see the early keys, and nothing else; if c > r the late queries see the late
  keys:

                keys of rank c:   early  late              early  late
    queries    early               full     -                 -     -
    of rank r  late                full     -               full  full
                                   c < r                      c > r

  So every step after the first costs every rank the same two blocks, which run next to each other in the batch.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from treering.layers.attention.distributed.token_layout import TokenLayout
from treering.layers.attention.kernels import NO_WINDOW, BlockMask, Geometry
from treering.layers.attention.mask import Mask

T = TypeVar("T")
Half = int | Int[Array, ""]

_Q_BATCH, _Q_SEQ = 0, 3
_KV_BATCH, _KV_SEQ = 1, 3


class FullStep:
    """All queries of a device with all keys that it holds at this step.

    Arrays of queries are `[batch kv_heads group seq ...]`, of packed keys and values `[2 batch kv_heads seq head_dim]`.
    """

    def __init__(self, block: BlockMask):
        self.block = block

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
        """The same for gradients of keys and values."""
        return join(whole, part)


class ZigzagStep(FullStep):
    """Blocks of halves in zigzag order, next to each other in the batch: `q_halves` meet `kv_halves`, one by one."""

    def __init__(self, block: BlockMask, q_halves: Sequence[Half], kv_halves: Sequence[Half]):
        super().__init__(block)
        self.q_halves, self.kv_halves = tuple(q_halves), tuple(kv_halves)

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

    def __init__(self, tokens: TokenLayout, mask: Mask, axis: str, local_seq: int, *, branch_free: bool):
        self.tokens, self.axis, self.local_seq, self.mask = tokens, axis, local_seq, mask
        self.branch_free = branch_free and tokens.positions is None
        self.p = lax.axis_size(axis)
        self.window = mask.window if mask.window is not None and mask.window < local_seq * self.p else None

    def first(self) -> FullStep:
        """With the device's own keys."""
        if self.branch_free and self.mask.causal and self.tokens.order == "zigzag":
            rank = lax.axis_index(self.axis)
            if self.window is None:
                return FullStep(BlockMask(Geometry.DIAGONAL, **self.tokens.segments_with(rank)))
            # Each half with itself, and the late queries with the early keys.
            return self._halves(rank, (0, 1, 1), (0, 1, 0), (0, 0, 2 * self.p - 1 - 2 * rank))
        return self.later(0)

    def later(self, step: int | Int[Array, ""]) -> FullStep:
        """With the keys after `step` sends."""
        rank, p = lax.axis_index(self.axis), self.p
        source = (rank - step) % p
        if not self.branch_free:
            return FullStep(self.tokens.block(self.mask, self.axis, self.local_seq, source))
        if not self.mask.causal:
            return FullStep(BlockMask(Geometry.FULL, **self.tokens.segments_with(source)))
        if self.tokens.order == "zigzag":
            half = jnp.asarray(step > rank).astype(jnp.int32)
            return self._halves(source, (1, half), (0, half), (2 * p - 1 - rank - source, jnp.abs(rank - source)))
        if self.tokens.order == "contiguous":
            band = self._band((rank - source) * self.local_seq, 1)
        else:
            band = self._band(rank - source, p)
        return FullStep(BlockMask(Geometry.BAND, band[None], **self.tokens.segments_with(source)))

    def _band(self, distance: int | Int[Array, ""], stride: int) -> Int[Array, "2"]:
        """Where query 0 is `distance` tokens after key 0, and neighbours on both sides are `stride` tokens apart."""
        distance = jnp.asarray(distance, jnp.int32)
        low = NO_WINDOW if self.window is None else -((self.window - 1 - distance) // stride)
        return jnp.stack([jnp.asarray(low, jnp.int32), distance // stride])

    def _halves(
        self, source: Int[Array, ""], q_halves: Sequence[Half], kv_halves: Sequence[Half], chunks: Sequence[Half]
    ) -> ZigzagStep:
        """Blocks of halves that are so many `chunks` apart."""
        segments = self.tokens.segments_with(source)
        if segments:
            segments = {
                "q_segments": _take(segments["q_segments"], q_halves, 1, 0),
                "kv_segments": _take(segments["kv_segments"], kv_halves, 1, 0),
            }
        if self.window is None:
            return ZigzagStep(BlockMask(Geometry.FULL, **segments), q_halves, kv_halves)
        rows = segments["q_segments"].shape[0] // len(q_halves) if segments else self.tokens.batch
        bands = jnp.stack([self._band(apart * (self.local_seq // 2), 1) for apart in chunks])
        block = BlockMask(Geometry.BAND, jnp.repeat(bands, rows, axis=0), **segments)
        return ZigzagStep(block, q_halves, kv_halves)


def _half(x: Array, half: Half, seq_dim: int) -> Array:
    size = x.shape[seq_dim] // 2
    return lax.dynamic_slice_in_dim(x, half * size, size, seq_dim)


def _take(x: Array, halves: Sequence[Half], seq_dim: int, batch_dim: int) -> Array:
    return jnp.concatenate([_half(x, half, seq_dim) for half in halves], axis=batch_dim)


def _join(join: Callable[[T, T], T], whole: T, part: T, halves: tuple, seq_dim: int, batch_dim: int) -> T:
    # One after the other: several parts may belong to the same half.
    for n, half in enumerate(halves):
        mine = jax.tree.map(lambda x: jnp.split(x, len(halves), batch_dim)[n], part)  # noqa: B023
        joined = join(jax.tree.map(lambda x: _half(x, half, seq_dim), whole), mine)  # noqa: B023
        put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, half * y.shape[seq_dim], seq_dim)  # noqa: B023, E731
        whole = jax.tree.map(put, whole, joined)
    return whole
