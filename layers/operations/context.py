"""The attention operation of training: keys from all of the context axis, documents apart."""

from typing import Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from treering.configs.train import ContextParallel
from treering.layers.attention.distributed.arguments import TokenData
from treering.layers.attention.distributed.gather import gather_local
from treering.layers.attention.distributed.ring import ring_local
from treering.layers.attention.mask import Mask
from treering.layers.nn.attention import ForwardInfo
from treering.layers.parallel.sharding import Plan

ORDER = "zigzag"
"""The order of tokens over the context axis while training: causal attention costs every device the same."""


class ContextAttention(eqx.Module):
    """A `layers.nn.attention.AttentionOperation` by a ring or a gather over context, for tokens in zigzag order.

    Where each document is one run of its row's tokens, causality follows the order of tokens, whatever the positions
    say. So the order fixes which blocks can see each other, and segments only take pairs away.
    """

    segments: Int[Array, "batch kv_seq"]
    """Documents of all of a row's tokens, on every device of the context axis: gathered once, not in each layer."""
    algorithm: ContextParallel = eqx.field(static=True)

    @staticmethod
    def over(segments: Int[Array, "batch seq"], algorithm: ContextParallel, plan: Plan) -> "ContextAttention":
        """The operation for a batch whose tokens belong to `segments`."""
        rows = jax.sharding.NamedSharding(plan.mesh, _rows(plan, segments))
        return ContextAttention(jax.lax.with_sharding_constraint(segments, rows), algorithm)

    def __call__(
        self,
        q: Float[Array, "batch seq heads head_dim"],
        k: Float[Array, "batch seq kv_heads head_dim"],
        v: Float[Array, "batch seq kv_heads head_dim"],
        *,
        mask: Mask,
        info: ForwardInfo,
        state: Any,
        layer: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Any]:
        """Outputs in q's dtype; there is no state to change."""
        plan = info.plan
        queries = plan.spec("batch seq heads head_dim", q.shape)
        keys = plan.spec("batch kv_seq kv_heads head_dim", k.shape)
        attend = {"ring": ring_local, "gather": gather_local}[self.algorithm]

        def per_device(q, k, v, segments, all_segments):
            tokens, everyone = (TokenData(None, x, ORDER) for x in (segments, all_segments))
            return attend(q, k, v, axis="context", mask=mask, tokens=tokens, all_tokens=everyone).out

        out = jax.shard_map(
            per_device,
            mesh=plan.mesh,
            in_specs=(queries, keys, keys, plan.spec("batch seq", q.shape[:2]), _rows(plan, self.segments)),
            out_specs=queries,
        )(q, k, v, info.segments, self.segments)
        return out, state


def _rows(plan: Plan, segments: Array) -> PartitionSpec:
    """Rows sharded as those of a batch, replicated over their tokens."""
    return PartitionSpec(plan.axes("batch", segments.shape[0]) or None, None)
