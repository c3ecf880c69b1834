"""What a family of models is, and the one table of families."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import PRNGKeyArray

from treering.configs.model import ModelConfig
from treering.configs.zoo import ZOO
from treering.models.families.fields import Fields
from treering.models.files import read_json
from treering.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Family:
    """All that the rest of the project needs of a family."""

    name: str
    config_class: type[ModelConfig]
    init: Callable[[Any, PRNGKeyArray], Transformer]
    """A model with random weights, from a config and a key."""
    model_types: tuple[str, ...]
    """The `model_type` values of config.json that mean this family."""
    from_hf: Callable[[Fields], ModelConfig]
    """config.json to config; raises ValueError for what it does not support."""
    to_hf: Callable[[Any], dict[str, Any]]
    """config to config.json."""
    names: Callable[[Any], Mapping[str, str]]
    """Our parameter paths to Hugging Face tensor names, `{layer}` standing for the layer's number."""
    inside: tuple[str, ...] = ()
    """The `model_type` values of larger models whose `text_config` is of this family, and whose text model is read."""
    sizes: Mapping[str, ModelConfig] = field(default_factory=dict)
    """Sizes with the names under which `treering zoo` lists them; those of this repository stand in `configs.zoo`."""


_THEIRS = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp": "intermediate_size",
    "context_length": "max_position_embeddings",
    "window": "sliding_window",
    "period": "sliding_window_pattern",
    "query_scalar": "query_pre_attn_scalar",
}
"""Fields of configs and of config.json, where the two have other names."""
_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Adds a family; raises ValueError for a name, a model_type or the name of a size that is taken."""
    if family.config_class.family != family.name:
        raise ValueError(
            f"family {family.name!r}: its config class {family.config_class.__name__} names the family "
            f"{family.config_class.family!r}, which must be the same"
        )
    for other in _FAMILIES.values():
        if family.name == other.name:
            raise ValueError(f"family {family.name!r} is registered already: choose another name")
        if taken := sorted({*family.model_types, *family.inside} & {*other.model_types, *other.inside}):
            raise ValueError(
                f"family {family.name!r}: the model_type {', '.join(taken)} is that of the family {other.name!r}: "
                "choose another"
            )
    if taken := sorted(set(family.sizes) & set(named_sizes())):
        raise ValueError(f"family {family.name!r}: the zoo has a size {', '.join(taken)} already: choose another name")
    _FAMILIES[family.name] = family


def families() -> Mapping[str, Family]:
    """The registered families by name."""
    return _FAMILIES


def named_sizes() -> Mapping[str, ModelConfig]:
    """All named sizes: those of the zoo, and those that registered families bring."""
    return {**ZOO, **{name: size for family in _FAMILIES.values() for name, size in family.sizes.items()}}


def read_hf_config(path: str | Path) -> ModelConfig:
    """The architecture that a config.json (or the folder that holds it) describes.

    Raises FileNotFoundError where there is none, ValueError for what it says that is not supported.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    fields = Fields(read_json(file), str(file))
    config = config_of(fields)
    fields.finish()
    return config


def config_of(fields: Fields) -> ModelConfig:
    """The architecture of a config.json; raises ValueError for what it says that is not supported.

    What a config refuses by the names of its own fields is told by those of the file.
    """
    try:
        return family_of(fields).from_hf(fields)
    except ValueError as error:
        if fields.name in str(error):
            raise

        def theirs(name: re.Match[str]) -> str:
            known = _THEIRS.get(name[0], name[0])
            return fields.keys.get(known, known)

        # A field stands before its value.
        message = re.sub(r"\b[a-z_]+(?= (?:is )?-?\d| that work)", theirs, str(error))
        raise ValueError(f"{fields.name}: {message}") from error


def family_of(fields: Fields) -> Family:
    """The family of a config.json; raises ValueError listing the supported model types."""
    model_type = fields.take("model_type", None)
    for family in _FAMILIES.values():
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in _FAMILIES.values() for name in family.model_types + family.inside))
    raise ValueError(
        f"{fields.name} has model_type {model_type!r}: the supported ones are {known} (--plugin FILE adds one)"
    )
