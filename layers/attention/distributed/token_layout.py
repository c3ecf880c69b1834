"""Positions and segments of a sequence sharded over a mesh axis, and which keys of a rank a device's queries see."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from treering.layers.attention.checks import check_token_data
from treering.layers.attention.distributed.arguments import TokenData
from treering.layers.attention.kernels import BlockMask, Geometry
from treering.layers.attention.mask import Mask
from treering.layers.attention.order import Order, order_divisor, order_positions, rank_positions
from treering.layers.attention.varying import vary_over


class TokenLayout(eqx.Module):
    """Positions and segments of a device's tokens and of all ranks' tokens, ranks in turn.

    Without positions the order fixes them; without segments the sequence is one document without padding.
    """

    order: Order = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    positions: Int[Array, "batch local_seq"] | None = None
    kv_positions: Int[Array, "batch seq"] | None = None
    segments: Int[Array, "batch local_seq"] | None = None
    kv_segments: Int[Array, "batch seq"] | None = None

    @staticmethod
    def of_device(
        axis: str,
        batch: int,
        local_seq: int,
        tokens: TokenData | None,
        all_tokens: TokenData | None = None,
        length: int | None = None,
    ) -> "TokenLayout":
        """Inside `shard_map`, for a device's `[batch local_seq]` tokens. What is given per device is gathered here.

        `length` is the number of tokens before the padding at a contiguous sequence's end. Raises ValueError where
        shapes do not fit, or a rank's part of them cannot be in the order.
        """
        tokens, everyone = tokens or TokenData(), all_tokens or TokenData()
        order, p = tokens.order, lax.axis_size(axis)
        if order_divisor(order, p) > p and local_seq % 2:
            raise ValueError(f"seq {local_seq} per device in {order} order: it must be even (two chunks)")

        def completed(name: str) -> tuple[Array | None, Array | None]:
            mine, all_ranks = getattr(tokens, name), getattr(everyone, name)
            if mine is None:
                if all_ranks is not None:
                    raise ValueError(f"{name} of all_tokens without those of tokens: the queries' are needed too")
                return None, None
            check_token_data(name, mine, batch, local_seq)
            if all_ranks is None:
                all_ranks = lax.all_gather(vary_over(frozenset({axis}), mine), axis, axis=1, tiled=True)
            check_token_data(f"kv_{name}", all_ranks, batch, local_seq * p)
            return mine, all_ranks

        positions, kv_positions = completed("positions")
        segments, kv_segments = completed("segments")
        if length is not None and positions is None and segments is None:
            own = rank_positions(order, p, lax.axis_index(axis), local_seq)
            segments = jnp.broadcast_to(own < length, (batch, local_seq)).astype(jnp.int32)
            every = order_positions(order, p, local_seq * p)
            kv_segments = jnp.broadcast_to(every < length, (batch, local_seq * p)).astype(jnp.int32)
        return TokenLayout(order, batch, positions, kv_positions, segments, kv_segments)

    def segments_with(self, source: Int[Array, ""] | None) -> dict[str, Any]:
        """`q_segments` and `kv_segments` of a block with the keys of rank `source`, or of all (None); {} without."""
        if self.segments is None or self.kv_segments is None:
            return {}
        size = self.segments.shape[1]
        kv_segments = self.kv_segments if source is None else _of_rank(self.kv_segments, source, size)
        return {"q_segments": self.segments, "kv_segments": kv_segments}

    def block(self, mask: Mask, axis: str, local_seq: int, source: Int[Array, ""] | None) -> BlockMask:
        """A device's queries with the keys of rank `source`, or of all ranks in turn (None), by positions."""
        segments = self.segments_with(source)
        if self.positions is None and not mask.causal:
            return BlockMask(Geometry.FULL, **segments)
        p = lax.axis_size(axis)
        q_positions, kv_positions = self.positions, self.kv_positions
        if q_positions is None:
            q_positions = rank_positions(self.order, p, lax.axis_index(axis), local_seq)[None]
            if source is None:
                kv_positions = order_positions(self.order, p, p * local_seq)[None]
            else:
                kv_positions = rank_positions(self.order, p, source, local_seq)[None]
        elif source is not None and kv_positions is not None:
            kv_positions = _of_rank(kv_positions, source, local_seq)
        return BlockMask(Geometry.POSITIONS, None, q_positions, kv_positions, **segments)


def _of_rank(x: Int[Array, "batch seq"], rank: Int[Array, ""], local_seq: int) -> Int[Array, "batch local_seq"]:
    return lax.dynamic_slice_in_dim(x, rank * local_seq, local_seq, 1)
