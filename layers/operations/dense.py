"""The attention operation from its definition: for comparing models, not for speed."""

from typing import Any

from jaxtyping import Array, Float, Int

from treering.layers.attention.dense import dense_attention
from treering.layers.attention.mask import Mask
from treering.layers.nn.attention import ForwardInfo


def dense_operation(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    mask: Mask,
    info: ForwardInfo,
    state: Any,
    layer: Int[Array, ""] | int,
) -> tuple[Float[Array, "batch seq heads head_dim"], Any]:
    """A `layers.nn.attention.AttentionOperation` on one device, with every score in memory."""
    return dense_attention(q, k, v, mask=mask, positions=info.positions, segments=info.segments), state
