"""Qwen3: the shared architecture, with a norm on each head's query and key."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import PRNGKeyArray

from treering.configs.qwen import Qwen3Config
from treering.layers.nn.attention import Attention
from treering.layers.nn.norm import RMSNorm
from treering.models.families.fields import Fields
from treering.models.families.qwen2 import refuse_windows
from treering.models.families.registry import Family
from treering.models.families.shared import BLOCK, read_shared, tensor_names, write_shared
from treering.models.transformer import Transformer, dim_sizes, init_block, init_transformer

_NORMS = {f"attention.{name}_norm.weight": f"self_attn.{name}_norm.weight" for name in ("q", "k")}


def init(config: Qwen3Config, key: PRNGKeyArray) -> Transformer:
    """A model with random weights."""

    def norm() -> RMSNorm:
        return RMSNorm.init("head_dim", config.head_dim, eps=config.norm_eps)

    def attention(key: PRNGKeyArray) -> Attention:
        return Attention.init(dim_sizes(config), rope=config.rope, norm=norm, key=key)

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
