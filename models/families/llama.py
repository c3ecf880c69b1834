"""Llama: the shared architecture, the same in every layer."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import PRNGKeyArray

from treering.configs.llama import LlamaConfig
from treering.models.families.fields import Fields
from treering.models.families.registry import Family
from treering.models.families.shared import BLOCK, read_shared, tensor_names, write_shared
from treering.models.transformer import Transformer, init_block, init_transformer


def init(config: LlamaConfig, key: PRNGKeyArray) -> Transformer:
    """A model with random weights."""
    return init_transformer(config, [lambda key: init_block(config, key=key)], key=key)


def from_hf(fields: Fields) -> LlamaConfig:
    """config.json to config."""
    fields.only("attention_bias", False)
    fields.only("sliding_window", why="Llama attends to all of its context")
    # It splits products to repeat the rounding of a run on several devices; the result is the same but for rounding.
    fields.take("pretraining_tp", 1)
    return LlamaConfig(**read_shared(fields))


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """config to config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **write_shared(config),
        "attention_bias": False,
        "mlp_bias": False,
    }


def names(config: LlamaConfig) -> Mapping[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return tensor_names(config, BLOCK)


FAMILY = Family(
    name="llama",
    config_class=LlamaConfig,
    init=init,
    model_types=("llama",),
    from_hf=from_hf,
    to_hf=to_hf,
    names=names,
)
