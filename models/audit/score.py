"""Logits of a whole text at once, with attention from its definition: for comparing models, not for speed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from treering.layers.nn.attention import ForwardInfo
from treering.layers.operations.dense import dense_operation
from treering.layers.parallel.sharding import Plan
from treering.models.transformer import Transformer


def text_logits(model: Transformer, plan: Plan, ids: list[int]) -> Float[np.ndarray, "seq vocab"]:
    """Logits after each of the tokens `ids`, computed in float32."""
    tokens = jnp.asarray(ids, jnp.int32)[None]
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None]
    info = ForwardInfo(positions=positions, segments=None, attend=dense_operation, plan=plan)
    with jax.default_matmul_precision("highest"):
        return np.asarray(_forward(model, tokens, info))[0]


@eqx.filter_jit
def _forward(model: Transformer, tokens: Array, info: ForwardInfo) -> Array:
    hidden, _ = model(tokens, info, dtype=jnp.dtype("float32"))
    return model.unembed(hidden, info)
