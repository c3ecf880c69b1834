"""Qwen3: the shared architecture, with a norm on each head's query and key."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from configs.qwen import Qwen3Config
from configs.rope import RopeConfig
from layers.attention import Attention, Context
from layers.linear import Linear
from layers.mask import Mask
from layers.norm import RMSNorm
from layers.rope import rotate
from models.families.fields import Fields
from models.families.qwen2 import refuse_windows
from models.families.registry import Family
from models.families.shared import BLOCK, read_shared, tensor_names, write_shared
from models.transformer import Transformer, dim_sizes, init_block, init_transformer

_NORMS = {f"attention.{name}_norm.weight": f"self_attn.{name}_norm.weight" for name in ("q", "k")}


class NormedAttention(eqx.Module):
    """Grouped-query attention whose queries and keys are normalised, head by head, before they are rotated."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    rope: RopeConfig = eqx.field(static=True)
    mask: Mask = eqx.field(static=True)

    @staticmethod
    def init(config: Qwen3Config, *, key: PRNGKeyArray) -> "NormedAttention":
        """With the projections of the shared layer, and norms of one."""
        plain = Attention.init(dim_sizes(config), rope=config.rope, key=key)
        return NormedAttention(
            q=plain.q,
            k=plain.k,
            v=plain.v,
            out=plain.out,
            q_norm=RMSNorm.init("head_dim", config.head_dim, eps=config.norm_eps),
            k_norm=RMSNorm.init("head_dim", config.head_dim, eps=config.norm_eps),
            rope=plain.rope,
            mask=plain.mask,
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, state: Any, layer: Int[Array, ""] | int
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        """The layer's output, and its state after these tokens."""
        q = rotate(self.q_norm(self.q(x)), context.positions, self.rope)
        k = rotate(self.k_norm(self.k(x)), context.positions, self.rope)
        mixed, state = context.attend(q, k, self.v(x), mask=self.mask, context=context, state=state, layer=layer)
        return self.out(mixed), state


def init(config: Qwen3Config, key: PRNGKeyArray) -> Transformer:
    """A model with random weights."""

    def attention(key: PRNGKeyArray) -> NormedAttention:
        return NormedAttention.init(config, key=key)

    return init_transformer(config, [lambda key: init_block(config, attention=attention, key=key)], key=key)


def from_hf(fields: Fields) -> Qwen3Config:
    """config.json to config."""
    refuse_windows(fields)
    fields.only("attention_bias", False)
    return Qwen3Config(**read_shared(fields, head_dim_default=128, kv_heads_default=32))


def to_hf(config: Qwen3Config) -> dict[str, Any]:
    """config to config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **write_shared(config),
        "attention_bias": False,
        "use_sliding_window": False,
    }


def names(config: Qwen3Config) -> Mapping[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return tensor_names(config, BLOCK | _NORMS)


FAMILY = Family(
    name="qwen3",
    config_class=Qwen3Config,
    init=init,
    model_types=("qwen3",),
    from_hf=from_hf,
    to_hf=to_hf,
    names=names,
)
