"""Rotary embeddings as GGUF files describe them, as fields of config.json."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treering.configs.errors import UserError
from treering.configs.rope import DefaultRope, Llama3Rope
from treering.layers.nn.rope import inverse_frequencies

FREQUENCIES = "rope_freqs.weight"
"""A tensor of what each frequency is divided by: how llama.cpp stores Llama 3.1's rule."""
_ORIGINAL_CONTEXTS = (8192, *(2**power for power in range(5, 21)))
"""The published models' first."""


def read_rope(path: Path, raw: dict[str, Any], prefix: str, divisors: np.ndarray | None) -> None:
    """Replaces the keys `{prefix}rope.*` of `raw` by `rope_scaling`; `divisors` are the values of `FREQUENCIES`.

    Raises ValueError for a kind that is not known, and for divisors that no known rule gives.
    """
    scaling = f"{prefix}rope.scaling."
    kind = raw.pop(scaling + "type", "none")
    linear = raw.pop(f"{prefix}rope.scale_linear", 1.0)
    raw.pop(scaling + "finetuned", None)
    found: dict[str, Any] = {
        ours: raw.pop(scaling + theirs)
        for theirs, ours in (
            ("factor", "factor"),
            ("original_context_length", "original_max_position_embeddings"),
            ("attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        )
        if scaling + theirs in raw
    }
    if divisors is not None and not np.all(divisors == 1):
        if kind != "none" or linear != 1:
            raise UserError(
                f"only one of it and the tensor {FREQUENCIES} is read", field=scaling + "type", value=kind, file=path
            )
        raw["rope_scaling"] = _llama3(path, raw, divisors)
    elif kind == "yarn":
        if "attention_factor" in found and isinstance(found.get("factor"), float):
            # In GGUF it multiplies what the rule gives; in config.json it replaces it.
            found["attention_factor"] *= 0.1 * math.log(found["factor"]) + 1
        raw["rope_scaling"] = {"rope_type": "yarn", **found}
    elif kind == "linear" or linear != 1:
        raw["rope_scaling"] = {"rope_type": "linear", "factor": found.get("factor", linear)}
    elif kind != "none":
        raise UserError(
            "it is not supported", field=scaling + "type", value=kind, works=("none", "linear", "yarn"), file=path
        )


def _llama3(path: Path, raw: Mapping[str, Any], divisors: np.ndarray) -> dict[str, Any]:
    """The parameters of Llama 3.1's rule that give these divisors."""
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    theta = raw.get("rope_theta", 10_000.0)
    if divisors.shape != (head_dim // 2,):
        raise ValueError(
            f"{path} holds {FREQUENCIES} of shape {divisors.shape}: a head has {head_dim // 2} frequencies"
        )
    plain = inverse_frequencies(DefaultRope(theta=theta), head_dim)
    for original in _ORIGINAL_CONTEXTS:
        rope = Llama3Rope(
            theta=theta,
            factor=float(divisors.max()),
            low_frequency_factor=1.0,
            high_frequency_factor=4.0,
            original_context=original,
        )
        if np.allclose(plain / inverse_frequencies(rope, head_dim), divisors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": rope.factor,
                "low_freq_factor": rope.low_frequency_factor,
                "high_freq_factor": rope.high_frequency_factor,
                "original_max_position_embeddings": original,
            }
    raise ValueError(
        f"{path} holds a {FREQUENCIES} that Llama 3.1's rule does not give: convert the Hugging Face folder instead"
    )
