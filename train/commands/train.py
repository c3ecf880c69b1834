"""`treering train RECIPE [--dotted.override VALUE]`: runs a recipe, or lists those there are."""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treering.configs.cli import parse
from treering.configs.llama import LLAMA_3_2_1B
from treering.configs.model import ModelConfig
from treering.configs.recipes import RECIPES
from treering.configs.run import RunConfig
from treering.configs.user_file import find_in_file


def main(arguments: list[str]) -> int:
    """Runs the command."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *overrides = arguments
    if name.startswith("-"):
        raise ValueError(f"the recipe comes first: treering train RECIPE {' '.join(arguments)}")
    recipe = find_recipe(name)
    weights = starting_weights(name, overrides) if inspect.signature(recipe).parameters else ()
    config = parse(RunConfig, overrides, program=f"treering train {name}", default=recipe(*weights))
    from treering.train.run.loop import Stopped, train

    try:
        train(config)
    except Stopped as stopped:
        print(f"treering train: {stopped}", file=sys.stderr)
        return stopped.status
    return 0


def listing() -> str:
    """The recipes, with what each says of itself."""
    lines = ["usage: treering train RECIPE [--dotted.override VALUE ...]", ""]
    for name, recipe in RECIPES.items():
        lines += [name, *(f"    {line.strip()}" for line in (recipe.__doc__ or "").strip().splitlines()), ""]
    lines += [
        "A recipe of your own: treering train path/to/recipes.py:NAME, a function that returns a RunConfig. One with",
        "two parameters, as fine_tune, is given the path of --init-from and the configuration of the model there.",
        "`treering train RECIPE --help` lists every option with the recipe's value.",
    ]
    return "\n".join(lines)


def starting_weights(name: str, overrides: list[str]) -> tuple[str, ModelConfig]:
    """What `--init-from` names, and its model; an example of both where only help is asked for.

    Raises ValueError without `--init-from`, and what `open_model` raises.
    """
    from treering.models.conversion.load import open_model
    from treering.train.run.folder import weights_of

    given = [value for flag, value in zip(overrides, overrides[1:], strict=False) if flag == "--init-from"]
    given += [argument.partition("=")[2] for argument in overrides if argument.startswith("--init-from=")]
    if given:
        return given[-1], open_model(weights_of(given[-1])).config
    if {"-h", "--help"} & set(overrides):
        return "WEIGHTS", LLAMA_3_2_1B
    raise ValueError(f"{name} starts from weights that you have: --init-from CHECKPOINT, HF_FOLDER or FILE.gguf")


def find_recipe(name: str) -> Callable[..., RunConfig]:
    """A recipe of ours by its name, or one of the user's as FILE:NAME.

    Raises ValueError where there is none.
    """
    if name in RECIPES:
        return RECIPES[name]
    path, colon, _ = name.rpartition(":")
    if not colon:
        if name.endswith(".py"):
            raise ValueError(f"{name} names a file and no recipe in it: {name}:NAME")
        raise ValueError(f"unknown recipe {name!r}: the recipes are {', '.join(RECIPES)}, or path/to/recipes.py:NAME")
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file: a recipe of your own is path/to/recipes.py:NAME")
    found = find_in_file(name, "recipe", callable)

    @functools.wraps(found)
    def checked(*weights: Any) -> RunConfig:
        config = found(*weights)
        if not isinstance(config, RunConfig):
            raise ValueError(f"{name} returns a {type(config).__name__}: a recipe returns a configs.run.RunConfig")
        return config

    return checked
