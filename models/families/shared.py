"""What the families' config.json and tensor names have in common."""

from typing import Any

from treering.configs.errors import UserError
from treering.configs.model import ModelConfig
from treering.models.families.fields import Fields
from treering.models.families.rope_fields import read_rope, write_rope

BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
"""Names inside one block: ours, and Hugging Face's."""


def tensor_names(config: ModelConfig, block: dict[str, str], places: int = 1) -> dict[str, str]:
    """All names of a model whose pattern has `places` blocks of the parameters `block`.

    The blocks of an incomplete last period are not stacked, so their names hold the layer's number.
    """
    names = {"embed.table": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not config.tie_embeddings:
        names["output.weight"] = "lm_head.weight"
    places = min(places, config.layers)
    whole = config.layers // places * places
    stacks = {f"blocks.places.{place}": "{layer}" for place in range(places)}
    stacks |= {f"blocks.rest.{layer - whole}": str(layer) for layer in range(whole, config.layers)}
    for stack, layer in stacks.items():
        names |= {f"{stack}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in block.items()}
    return names


def read_shared(
    fields: Fields,
    *,
    head_dim_default: int | None = None,
    kv_heads_default: int | None = None,
    activation: str = "silu",
) -> dict[str, Any]:
    """The fields of `ModelConfig`, with the defaults that transformers gives them.

    Those of some families are numbers; None means embed / heads, and as many key heads as query heads.
    Raises UserError for a quantised model and an activation other than `activation`.
    """
    quantised = fields.take("quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(
            "quantised weights are not read here: use the folder of the unquantised model",
            field="quantization_config",
            value=method,
            file=fields.name,
        )
    fields.only("hidden_act", activation)
    fields.only("mlp_bias", False)
    embed, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", head_dim_default)
    if head_dim is None:
        if embed % heads:
            raise fields.refused(
                "hidden_size",
                f"it is not a multiple of {fields.called('num_attention_heads')}, {heads}, and there is no "
                f"{fields.called('head_dim')}",
            )
        head_dim = embed // heads
    context_length = fields.count("max_position_embeddings")
    return {
        "vocab": fields.count("vocab_size"),
        "embed": embed,
        "layers": fields.count("num_hidden_layers"),
        "heads": heads,
        "kv_heads": _kv_heads(fields, heads, kv_heads_default),
        "head_dim": head_dim,
        "mlp": fields.count("intermediate_size"),
        "context_length": context_length,
        "norm_eps": float(fields.number("rms_norm_eps", 1e-6)),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "rope": read_rope(fields, context_length),
    }


def _kv_heads(fields: Fields, heads: int, default: int | None) -> int:
    # null means as many as query heads in every family.
    absent = "num_key_value_heads" not in fields.raw and default is not None
    return fields.count("num_key_value_heads", default if absent else heads)


def write_shared(config: ModelConfig, *, activation: str = "silu") -> dict[str, Any]:
    """The fields of config.json that `read_shared` reads, as transformers 5 writes them."""
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": activation,
        **write_rope(config.rope),
    }
