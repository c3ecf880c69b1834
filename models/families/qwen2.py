"""Qwen2 and Qwen2.5: the shared architecture, with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from treering.configs.qwen import Qwen2Config
from treering.layers.attention.mask import Mask
from treering.layers.nn.attention import Attention
from treering.layers.nn.linear import Linear
from treering.models.families.fields import Fields
from treering.models.families.registry import Family
from treering.models.families.shared import BLOCK, read_shared, tensor_names, write_shared
from treering.models.transformer import Transformer, dim_sizes, init_block, init_transformer

_BIASES = {f"attention.{name}.bias": f"self_attn.{name}_proj.bias" for name in ("q", "k", "v")}


def init(config: Qwen2Config, key: PRNGKeyArray) -> Transformer:
    """A model with random weights; biases are zero."""
    sizes = dim_sizes(config)
    sizes["out_heads"] = sizes["heads"]

    def attention(key: PRNGKeyArray) -> Attention:
        q_key, k_key, v_key, out_key = jax.random.split(key, 4)
        return Attention(
            q=Linear.init("embed -> heads head_dim", sizes, bias=True, key=q_key),
            k=Linear.init("embed -> kv_heads head_dim", sizes, bias=True, key=k_key),
            v=Linear.init("embed -> kv_heads head_dim", sizes, bias=True, key=v_key),
            out=Linear.init("out_heads head_dim -> embed", sizes, key=out_key),
            rope=config.rope,
            mask=Mask(),
        )

    return init_transformer(config, [lambda key: init_block(config, attention=attention, key=key)], key=key)


def from_hf(fields: Fields) -> Qwen2Config:
    """config.json to config."""
    refuse_windows(fields)
    fields.only("use_mrope", False)
    return Qwen2Config(**read_shared(fields, kv_heads_default=32))


def refuse_windows(fields: Fields) -> None:
    """Raises UserError where a window is on: Qwen's files have fields for one, which no published dense model uses."""
    fields.only("use_sliding_window", False)
    for name in ("sliding_window", "max_window_layers"):
        fields.take(name, None)
    kinds = fields.take("layer_types", None)
    if kinds is not None and (not isinstance(kinds, list) or set(kinds) - {"full_attention"}):
        raise fields.refused("layer_types", "only 'full_attention' is supported, in each layer")


def to_hf(config: Qwen2Config) -> dict[str, Any]:
    """config to config.json."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **write_shared(config),
        "use_sliding_window": False,
    }


def names(config: Qwen2Config) -> Mapping[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return tensor_names(config, BLOCK | _BIASES)


FAMILY = Family(
    name="qwen2",
    config_class=Qwen2Config,
    init=init,
    model_types=("qwen2",),
    from_hf=from_hf,
    to_hf=to_hf,
    names=names,
)
