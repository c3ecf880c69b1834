"""Mistral: the shared architecture, with attention over a window of positions."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import PRNGKeyArray

from treering.configs.mistral import MistralConfig
from treering.layers.attention.mask import Mask
from treering.layers.nn.attention import Attention
from treering.models.families.fields import Fields
from treering.models.families.registry import Family
from treering.models.families.shared import BLOCK, read_shared, tensor_names, write_shared
from treering.models.transformer import Transformer, dim_sizes, init_block, init_transformer


def init(config: MistralConfig, key: PRNGKeyArray) -> Transformer:
    """A model with random weights."""

    def attention(key: PRNGKeyArray) -> Attention:
        return Attention.init(dim_sizes(config), rope=config.rope, mask=Mask(window=config.window), key=key)

    return init_transformer(config, [lambda key: init_block(config, attention=attention, key=key)], key=key)


def from_hf(fields: Fields) -> MistralConfig:
    """config.json to config."""
    # The first release's window holds where the field is absent; later ones write null.
    window = fields.integer("sliding_window", None if "sliding_window" in fields.raw else 4096)
    return MistralConfig(**read_shared(fields, kv_heads_default=8), window=window)


def to_hf(config: MistralConfig) -> dict[str, Any]:
    """config to config.json."""
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **write_shared(config),
        "sliding_window": config.window,
    }


def names(config: MistralConfig) -> Mapping[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return tensor_names(config, BLOCK)


FAMILY = Family(
    name="mistral",
    config_class=MistralConfig,
    init=init,
    model_types=("mistral",),
    from_hf=from_hf,
    to_hf=to_hf,
    names=names,
)
