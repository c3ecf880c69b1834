"""What the published sizes need."""

import math

from treering.configs.model import ModelConfig
from treering.models.families import named_sizes


def parameter_count(config: ModelConfig) -> int:
    """Numbers in the model's weights; tied embeddings count once."""
    from treering.models.checkpoint.model import abstract_model, named_leaves

    return sum(math.prod(leaf.shape) for leaf in named_leaves(abstract_model(config)).values())


def table() -> str:
    """One line per size, those of plugins last: name, parameters, context, and bytes of keys and values per token in a
    bfloat16 cache."""
    rows = [("name", "parameters", "context", "KV bytes per token")]
    for name, config in named_sizes().items():
        rows.append(
            (
                name,
                f"{parameter_count(config):,}",
                f"{config.context_length:,}",
                f"{config.kv_bytes_per_token(2):,}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )
    return "\n".join(lines)
