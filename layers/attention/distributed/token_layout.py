"""Positions and segments of a sequence sharded over a mesh axis, and the `BlockMask` of a rank's queries and keys."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from treering.layers.attention.checks import check_token_data
from treering.layers.attention.kernels import BlockMask
from treering.layers.attention.mask import BlockClass, Mask
from treering.layers.attention.order import Order, order_divisor, order_positions, rank_positions
from treering.layers.attention.varying import vary_over


class Tokens(eqx.Module):
    """Positions and segments of a device's tokens and of all ranks' tokens, ranks in turn.

    Without arrays the order fixes the positions, and the sequence is one document.
    """

    order: Order = eqx.field(static=True)
    length: int | None = eqx.field(static=True, default=None)
    """Tokens before the padding at the sequence's end (contiguous order); None for all."""
    positions: Int[Array, "batch local_seq"] | None = None
    kv_positions: Int[Array, "batch seq"] | None = None
    segments: Int[Array, "batch local_seq"] | None = None
    kv_segments: Int[Array, "batch seq"] | None = None

    @staticmethod
    def of_device(
        axis: str,
        *,
        batch: int,
        local_seq: int,
        order: Order,
        length: int | None,
        positions: Array | None,
        kv_positions: Array | None,
        segments: Array | None,
        kv_segments: Array | None,
    ) -> "Tokens":
        """Inside `shard_map`, for a device's `[batch local_seq]` tokens. What is given per device is gathered here.

        Raises ValueError where shapes do not fit, or a rank's part of them cannot be in `order`.
        """
        p = lax.axis_size(axis)
        if order_divisor(order, p) > p and local_seq % 2:
            raise ValueError(f"seq {local_seq} per device in {order} order: it must be even (two chunks)")
        all_ranks = local_seq * p

        def completed(name, mine, everyone):
            if mine is None:
                if everyone is not None:
                    raise ValueError(f"kv_{name} without {name}: the queries' are needed too")
                return None, None
            check_token_data(name, mine, batch, local_seq)
            if everyone is None:
                everyone = lax.all_gather(vary_over(frozenset({axis}), mine), axis, axis=1, tiled=True)
            check_token_data(f"kv_{name}", everyone, batch, all_ranks)
            return mine, everyone

        return Tokens(
            order,
            length,
            *completed("positions", positions, kv_positions),
            *completed("segments", segments, kv_segments),
        )

    def fixed(self) -> bool:
        """Whether the order alone gives all positions: no documents, no padding, no positions of their own."""
        return self.length is None and self.positions is None and self.segments is None

    def pairs(self, mask: Mask, axis: str, local_seq: int, source: Int[Array, ""] | None) -> BlockMask:
        """A device's queries with the keys of rank `source`, or with those of all ranks in turn (None)."""
        if self.fixed() and not mask.causal:
            return BlockMask(BlockClass.FULL)
        p = lax.axis_size(axis)
        q_positions, kv_positions = self.positions, self.kv_positions
        if q_positions is None:
            q_positions = rank_positions(self.order, p, lax.axis_index(axis), local_seq)[None]
            if source is None:
                kv_positions = order_positions(self.order, p, p * local_seq)[None]
            else:
                kv_positions = rank_positions(self.order, p, source, local_seq)[None]
            if self.length is not None:
                kv_positions = jnp.where(kv_positions < self.length, kv_positions, -1)
        elif source is not None and kv_positions is not None:
            kv_positions = _of_rank(kv_positions, source, local_seq)
        kv_segments = self.kv_segments
        if kv_segments is not None and source is not None:
            kv_segments = _of_rank(kv_segments, source, local_seq)
        return BlockMask(BlockClass.MIXED, q_positions, kv_positions, self.segments, kv_segments)


def _of_rank(x: Int[Array, "batch seq"], rank: Int[Array, ""], local_seq: int) -> Int[Array, "batch local_seq"]:
    return lax.dynamic_slice_in_dim(x, rank * local_seq, local_seq, 1)
