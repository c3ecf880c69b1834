"""The config that a user names: of a module, a file, a config.json, or the zoo."""

import importlib
from pathlib import Path

from treering.configs.model import ModelConfig
from treering.configs.user_file import find_in_file
from treering.models.families import named_sizes, read_hf_config

_PACKAGE = Path(__file__).parents[2]
"""The folder that is imported as `treering`."""


def find_entry(name: str) -> ModelConfig:
    """The config that `MODULE:CONFIG`, `path/to/file.py:CONFIG`, a config.json or a size of the zoo names.

    Raises ValueError, or FileNotFoundError, where there is none.
    """
    if name in named_sizes():
        return named_sizes()[name]
    module, colon, attribute = name.rpartition(":")
    if not colon:
        if Path(name).exists() or name.endswith(".json"):
            return read_hf_config(name)
        raise ValueError(
            f"{name} is not a size of the zoo: give one, MODULE:CONFIG, path/to/file.py:CONFIG, or a config.json"
        )
    if module.endswith(".py"):
        found = find_in_file(name, "config")
    else:
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{name} cannot be imported: {error}{_advice(module, attribute)}") from None
    if not isinstance(found, ModelConfig):
        raise ValueError(f"{name} is a {type(found).__name__}: a config is an instance of a ModelConfig")
    return found


def _advice(module: str, attribute: str) -> str:
    """Another name for what a module that cannot be imported may mean: one of this package, or a file."""
    file = Path(module.replace(".", "/") + ".py")
    if (_PACKAGE / file).is_file():
        return f" (did you mean treering.{module}:{attribute}?)"
    return f" (did you mean {file}:{attribute}?)" if file.is_file() else ""
