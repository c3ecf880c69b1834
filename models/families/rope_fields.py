"""The spellings of rotary embeddings in config.json, of transformers 4 and 5."""

import math
from collections.abc import Mapping
from typing import Any

from treering.configs.errors import UserError
from treering.configs.rope import ROPE_KINDS, DefaultRope, LinearRope, Llama3Rope, RopeConfig, YarnRope
from treering.models.families.fields import Fields

DEFAULT_THETA = 10_000.0


def read_rope(fields: Fields, context_length: int) -> RopeConfig:
    """From `rope_parameters`, `rope_scaling` and `rope_theta`, wherever each part is.

    Raises UserError naming a kind, or a parameter of a kind, that is not supported.
    """
    fields.only("partial_rotary_factor", 1, 1.0)
    fields.only("rope_interleaved", False)
    # transformers lets rope_scaling win where both are given.
    raw = fields.take("rope_parameters", None) or {}
    raw = fields.take("rope_scaling", None) or raw
    outer_theta = fields.number("rope_theta", DEFAULT_THETA)
    outer_original = fields.integer("original_max_position_embeddings", None)
    if not isinstance(raw, Mapping):
        key = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
        raise fields.refused(key, "it must be an object")
    rest = {key: value for key, value in raw.items() if key not in ("type", "rope_type")}
    inner = Fields(rest, f"{fields.name}: rope")
    kind = raw.get("rope_type", raw.get("type", "default")) or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise UserError("it is not supported", field="rope_type", value=kind, works=ROPE_KINDS, file=inner.name)
    theta = float(inner.number("rope_theta", outer_theta))
    if theta <= 0:
        where = inner if "rope_theta" in rest else fields
        raise where.refused("rope_theta", "it must be above 0")
    inner.only("partial_rotary_factor", 1, 1.0)
    original = inner.integer("original_max_position_embeddings", context_length)
    # As in transformers: a value outside the rotary parameters wins over the one inside.
    original = original if outer_original is None else outer_original
    rope = _of_kind(kind, inner, theta, original)
    inner.finish()
    return rope


def _of_kind(kind: str, inner: Fields, theta: float, original: int) -> RopeConfig:
    if kind == "default":
        inner.only("factor", 1, 1.0, why="the default kind has none")
        return DefaultRope(theta=theta)
    factor = float(inner.number("factor"))
    if factor < 1:
        raise inner.refused("factor", "it must be at least 1")
    if kind == "linear":
        return LinearRope(theta=theta, factor=factor)
    if kind == "llama3":
        low, high = float(inner.number("low_freq_factor")), float(inner.number("high_freq_factor"))
        if high <= low:
            raise inner.refused("high_freq_factor", f"it must be above low_freq_factor, {low:g}")
        return Llama3Rope(
            theta=theta,
            factor=factor,
            low_frequency_factor=low,
            high_frequency_factor=high,
            original_context=original,
        )
    scale, scale_all = inner.number("mscale", None), inner.number("mscale_all_dim", None)
    attention_factor = inner.number("attention_factor", None)
    if attention_factor is None:
        both = scale and scale_all
        attention_factor = _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all) if both else _yarn_scale(factor)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_context=original,
        attention_factor=float(attention_factor),
        beta_fast=float(inner.number("beta_fast", 32.0)),
        beta_slow=float(inner.number("beta_slow", 1.0)),
        truncate=inner.flag("truncate", True),
    )


def _yarn_scale(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes it, and the same in the words of transformers 4."""
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    match rope:
        case LinearRope():
            written |= {"factor": rope.factor}
        case Llama3Rope():
            written |= {
                "factor": rope.factor,
                "low_freq_factor": rope.low_frequency_factor,
                "high_freq_factor": rope.high_frequency_factor,
                "original_max_position_embeddings": rope.original_context,
            }
        case YarnRope():
            written |= {
                "factor": rope.factor,
                "original_max_position_embeddings": rope.original_context,
                "attention_factor": rope.attention_factor,
                "beta_fast": rope.beta_fast,
                "beta_slow": rope.beta_slow,
                "truncate": rope.truncate,
            }
    # Readers of transformers 4 look for theta outside the other parameters, which have an older name.
    scaling = {key: value for key, value in written.items() if key != "rope_theta"}
    older = {} if isinstance(rope, DefaultRope) else {"rope_scaling": scaling}
    return {"rope_parameters": written, "rope_theta": rope.theta, **older}
