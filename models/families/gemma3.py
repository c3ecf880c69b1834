"""Gemma 3, the text model: five layers that see a window to one that sees all, each kind with rotary angles of its own.

There are norms before and after both attention and MLP, and on each head's query and key. Norms multiply by 1 + weight,
and embeddings are multiplied by the square root of their size.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from treering.configs.gemma import Gemma3Config
from treering.configs.rope import DefaultRope
from treering.layers.attention.mask import Mask
from treering.layers.attention.partial import statistics_dtype
from treering.layers.nn.attention import Attention, ForwardInfo
from treering.layers.nn.embed import Embedding
from treering.layers.nn.linear import Linear
from treering.layers.nn.mlp import SwiGLU
from treering.layers.parallel.sharding import Plan, array_field
from treering.models.families.fields import Fields
from treering.models.families.registry import Family
from treering.models.families.shared import BLOCK, read_shared, tensor_names, write_shared
from treering.models.transformer import Transformer, dim_sizes, init_transformer

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_BLOCK = BLOCK | {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention_out_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_out_norm.weight": "post_feedforward_layernorm.weight",
}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
}
"""Of fields that published files leave out, as transformers has them."""


class OffsetRMSNorm(eqx.Module):
    """`(1 + weight) * x / sqrt(mean(x^2) + eps)`, all in float32 or wider, then rounded to x's dtype."""

    weight: Float[Array, "size"] = array_field(lambda self: (self.dim,))
    dim: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """Normalises the last dim."""
        wide = x.astype(statistics_dtype(x.dtype))
        normalised = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = jnp.broadcast_to(1 + self.weight.astype(wide.dtype), x.shape)
        return (normalised * weight).astype(x.dtype)


class ScaledEmbedding(eqx.Module):
    """An embedding whose vectors are multiplied by the square root of their size; logits are not."""

    table: Any = array_field("vocab embed")
    """An array, or a stored weight, as in `layers.nn.embed.Embedding`."""

    def __call__(
        self, tokens: Int[Array, "batch seq"], plan: Plan, dtype: jnp.dtype
    ) -> Float[Array, "batch seq embed"]:
        """Vectors of `tokens` in `dtype`."""
        vectors = Embedding(self.table)(tokens, plan, dtype)
        # The factor is rounded too: the weights were trained with what bfloat16 makes of it.
        return vectors * jnp.asarray(math.sqrt(vectors.shape[-1]), dtype)

    def unembed(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Logits: the product of each vector with every row of the table."""
        return Embedding(self.table).unembed(x)


class GeGLU(eqx.Module):
    """`down(gelu(gate(x)) * up(x))` (arXiv 2002.05202), with GELU by its tanh formula."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Each position by itself."""
        return self.down(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x))


class SandwichBlock(eqx.Module):
    """Attention and an MLP, each between two norms and added to the residual."""

    attention_norm: OffsetRMSNorm
    attention: Attention
    attention_out_norm: OffsetRMSNorm
    mlp_norm: OffsetRMSNorm
    mlp: GeGLU
    mlp_out_norm: OffsetRMSNorm

    def __call__(
        self, x: Float[Array, "batch seq embed"], info: ForwardInfo, state: Any, layer: Int[Array, ""] | int
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        """The residual after this block, and the block's state after these tokens."""
        mixed, state = self.attention(self.attention_norm(x), info, state, layer)
        x = x + self.attention_out_norm(mixed)
        x = x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
        return info.plan.constrain(x, "batch seq embed"), state


def init(config: Gemma3Config, key: PRNGKeyArray) -> Transformer:
    """A model with random weights; norms have weights of zero."""
    pattern = [functools.partial(_block, config, local) for local in [True] * (config.period - 1) + [False]]
    model = init_transformer(config, pattern, key=key)
    return eqx.tree_at(
        lambda model: (model.embed, model.norm),
        model,
        (ScaledEmbedding(model.embed.table), _norm(config, "embed")),
    )


def _block(config: Gemma3Config, local: bool, key: PRNGKeyArray) -> SandwichBlock:
    attention_key, mlp_key = jax.random.split(key)
    scale = config.query_scalar**-0.5
    attention = Attention.init(
        dim_sizes(config),
        rope=DefaultRope(theta=config.local_theta) if local else config.rope,
        mask=Mask(window=config.window, scale=scale) if local else Mask(scale=scale),
        norm=functools.partial(_norm, config, "head_dim"),
        key=attention_key,
    )
    mlp = SwiGLU.init(dim_sizes(config), key=mlp_key)
    return SandwichBlock(
        attention_norm=_norm(config, "embed"),
        attention=attention,
        attention_out_norm=_norm(config, "embed"),
        mlp_norm=_norm(config, "embed"),
        mlp=GeGLU(mlp.gate, mlp.up, mlp.down),
        mlp_out_norm=_norm(config, "embed"),
    )


def _norm(config: Gemma3Config, dim: str) -> OffsetRMSNorm:
    return OffsetRMSNorm(jnp.zeros(dim_sizes(config)[dim]), dim, config.norm_eps)


def from_hf(fields: Fields) -> Gemma3Config:
    """config.json to config."""
    fields = fields.with_defaults(_DEFAULTS)
    fields.only("attention_bias", False)
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", False)
    fields.only("final_logit_softcapping")
    fields.only("attn_logit_softcapping")
    fields.take("cache_implementation", None)
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    # transformers 5 writes the rotary parameters of each kind of layer; earlier files those of the global ones.
    ropes = fields.take("rope_parameters", None)
    if isinstance(ropes, Mapping) and set(ropes) <= {_LOCAL, _GLOBAL}:
        local = Fields(ropes.get(_LOCAL) or {}, f"{fields.name}: rope of {_LOCAL}")
        local.only("rope_type", "default", why="layers with a window are not scaled")
        local_theta = local.number("rope_theta", local_theta)
        local.finish()
        fields = fields.with_values(rope_parameters=ropes.get(_GLOBAL))
    shared = read_shared(fields, activation="gelu_pytorch_tanh")
    return Gemma3Config(
        **shared,
        window=fields.integer("sliding_window", 4096),
        period=_period(fields, shared["layers"]),
        local_theta=float(local_theta),
        query_scalar=fields.integer("query_pre_attn_scalar", 256),
    )


def _period(fields: Fields, layers: int) -> int:
    """How many layers one global layer is after the last; raises UserError where the kinds do not repeat."""
    pattern = fields.integer("_sliding_window_pattern", fields.integer("sliding_window_pattern", 6))
    kinds = fields.take("layer_types", None)
    if kinds is None:
        return pattern
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.refused("layer_types", f"it must be a list of {layers} strings")
    period = kinds.index(_GLOBAL) + 1 if _GLOBAL in kinds else max(pattern, layers + 1)
    if kinds != _kinds(period, layers):
        raise fields.refused(
            "layer_types", f"only runs of {_LOCAL!r} of equal length, each with one {_GLOBAL!r} after it, are supported"
        )
    return period


def _kinds(period: int, layers: int) -> list[str]:
    return [_LOCAL if (layer + 1) % period else _GLOBAL for layer in range(layers)]


def to_hf(config: Gemma3Config) -> dict[str, Any]:
    """config to config.json."""
    shared = write_shared(config, activation="gelu_pytorch_tanh")
    local = {"rope_type": "default", "rope_theta": config.local_theta}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **shared,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {_GLOBAL: shared["rope_parameters"], _LOCAL: local},
        "rope_local_base_freq": config.local_theta,
        "attention_bias": False,
        "query_pre_attn_scalar": config.query_scalar,
        "sliding_window": config.window,
        "sliding_window_pattern": config.period,
        "layer_types": _kinds(config.period, config.layers),
    }


def names(config: Gemma3Config) -> Mapping[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return tensor_names(config, _BLOCK, places=config.period)


FAMILY = Family(
    name="gemma3",
    config_class=Gemma3Config,
    init=init,
    model_types=("gemma3_text",),
    inside=("gemma3",),
    from_hf=from_hf,
    to_hf=to_hf,
    names=names,
)
