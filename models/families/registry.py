"""What a family of models is, and the one table of families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import PRNGKeyArray

from treering.configs.errors import UserError
from treering.configs.model import ModelConfig
from treering.configs.zoo import ZOO
from treering.models.families.fields import Fields
from treering.models.files import read_json
from treering.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Family:
    """All that the rest of the project needs to know of a family."""

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
    """Our parameter paths to Hugging Face tensor names, with `{layer}` for the number of the layer."""
    inside: tuple[str, ...] = ()
    """The `model_type` values of larger models whose `text_config` is of this family, and whose text model is read."""
    sizes: Mapping[str, ModelConfig] = field(default_factory=dict)
    """Sizes with the names under which `treering zoo` lists them; those of this repository are in `configs.zoo`."""


_THEIRS = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "context_length": "max_position_embeddings",
    "window": "sliding_window",
    "period": "sliding_window_pattern",
    "local_theta": "rope_local_base_freq",
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

    Raises FileNotFoundError where there is none, ValueError for what is not supported.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    fields = Fields(read_json(file), str(file))
    config = config_of(fields)
    fields.finish()
    return config


def config_of(fields: Fields) -> ModelConfig:
    """The architecture of a config.json; raises ValueError for what is not supported.

    Errors about a config's own fields name those of the file that they were read from.
    """
    family = family_of(fields)
    try:
        return family.from_hf(fields)
    except UserError as error:
        if error.file is not None:
            raise
        raise error.at(fields.name, rename=lambda name: fields.called(_THEIRS.get(name, name))) from error
    except ValueError as error:  # a plugin's own
        raise ValueError(f"{fields.name}: {error}") from error


def family_of(fields: Fields) -> Family:
    """The family of a config.json; raises UserError listing the supported model types."""
    model_type = fields.take("model_type", None)
    for family in _FAMILIES.values():
        if model_type in family.model_types:
            return family
    known = sorted(name for family in _FAMILIES.values() for name in family.model_types + family.inside)
    raise fields.refused("model_type", "it is not supported, and --plugin FILE adds a family", works=known)
