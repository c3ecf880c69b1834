"""What a family of models is, and the one table of families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import PRNGKeyArray

from configs.model import ModelConfig
from models.families.fields import Fields
from models.transformer import Transformer


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


_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Adds a family; raises ValueError for a name or model_type that is taken."""
    for other in _FAMILIES.values():
        taken = set(family.model_types) & set(other.model_types)
        if family.name == other.name or taken:
            raise ValueError(f"family {family.name!r}: {sorted(taken) or family.name!r} belongs to {other.name!r}")
    _FAMILIES[family.name] = family


def families() -> Mapping[str, Family]:
    """The registered families by name."""
    return _FAMILIES


def family_of(fields: Fields) -> Family:
    """The family of a config.json; raises ValueError listing the supported model types."""
    model_type = fields.take("model_type", None)
    for family in _FAMILIES.values():
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in _FAMILIES.values() for name in family.model_types))
    raise ValueError(f"{fields.name} has model_type {model_type!r}: the supported ones are {known}")
