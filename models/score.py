"""Logits of a whole text at once, with attention from its definition: for comparing models, not for speed."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from treering.layers.attention import Context
from treering.layers.dense import dense_attention
from treering.layers.mask import Mask
from treering.layers.sharding import Plan
from treering.models.transformer import Transformer


def text_logits(model: Transformer, plan: Plan, ids: list[int]) -> Float[np.ndarray, "seq vocab"]:
    """Logits after each of the tokens `ids`, computed in float32."""
    tokens = jnp.asarray(ids, jnp.int32)[None]
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None]
    context = Context(positions=positions, segments=None, attend=_dense, plan=plan)
    with jax.default_matmul_precision("highest"):
        return np.asarray(_forward(model, tokens, context))[0]


def _dense(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    mask: Mask,
    context: Context,
    state: Any,
    layer: Int[Array, ""] | int,
) -> tuple[Float[Array, "batch seq heads head_dim"], Any]:
    return dense_attention(q, k, v, mask=mask, positions=context.positions, segments=context.segments), state


@eqx.filter_jit
def _forward(model: Transformer, tokens: Array, context: Context) -> Array:
    hidden, _ = model(tokens, context, dtype=jnp.dtype("float32"))
    return model.unembed(hidden, context)
