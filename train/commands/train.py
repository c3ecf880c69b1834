"""`treering train RECIPE [--dotted.override VALUE]`: runs a recipe, or lists the recipes."""

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treering.configs.cli import parse
from treering.configs.data import Source
from treering.configs.errors import UserError
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
    default = with_further_sources(recipe(*weights), overrides)
    try:
        config = parse(RunConfig, overrides, program=f"treering train {name}", default=default)
    except UserError as error:
        # A model's config does not know that it is the field `model` here.
        of_model = error.file is None and error.field in {field.name for field in dataclasses.fields(default.model)}
        raise error.inside("model") if of_model else error from None
    check_paths(config)
    from treering.train.run.loop import Stopped, train

    try:
        train(config)
    except Stopped as stopped:
        print(f"treering train: {stopped}", file=sys.stderr)
        return stopped.status
    return 0


def listing() -> str:
    """The recipes, with their docstrings."""
    lines = ["usage: treering train RECIPE [--dotted.override VALUE ...]", ""]
    for name, recipe in RECIPES.items():
        lines += [name, *(f"    {line.strip()}" for line in (recipe.__doc__ or "").strip().splitlines()), ""]
    lines += [
        "A recipe of your own: treering train path/to/recipes.py:NAME, a function that returns a RunConfig. One with",
        "two parameters, such as fine_tune, gets the path of --init-from and the configuration of the model there.",
        "`treering train RECIPE --help` lists every option with the recipe's value. --data.held-out.0.path FILE adds",
        "held-out data, and --data.sources.1.path FILE a second source.",
    ]
    return "\n".join(lines)


def starting_weights(name: str, overrides: list[str]) -> tuple[str, ModelConfig]:
    """What `--init-from` names, and its model; an example of both for `--help`.

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
    rule = f"{name} needs the weights that it starts from"
    raise UserError(rule, field="init_from", works=["CHECKPOINT", "HF_FOLDER", "FILE.gguf"])


def with_further_sources(config: RunConfig, overrides: list[str]) -> RunConfig:
    """The config with an empty source for each that only the overrides name: `--data.held-out.0.path`, where the recipe
    has no held-out data, or `--data.sources.1.path` after one source.

    Raises ValueError for a number that is not the next.
    """
    data = config.data
    for name in ("sources", "held_out"):
        option = f"--data.{name}".replace("_", "-")
        flags = [argument.partition("=")[0].replace("_", "-") for argument in overrides]
        if option in flags:
            raise ValueError(f"{option} is not an option: give the path of a source, such as {option}.0.path FILE")
        matches = [match for flag in flags if (match := re.match(rf"{option}\.(\d+)\.", flag))]
        sources: tuple[Source, ...] = getattr(data, name)
        for number in sorted({int(match[1]) for match in matches}):
            if number > len(sources):
                works = [f"{option}.{len(sources)}.path"]
                raise UserError("the sources are numbered without a gap", field=f"data.{name}.{number}", works=works)
            if number == len(sources):
                sources += (Source(path=""),)
        data = dataclasses.replace(data, **{name: sources})
    return dataclasses.replace(config, data=data)


def check_paths(config: RunConfig) -> None:
    """Raises ValueError for a source without a path."""
    for name in ("sources", "held_out"):
        for number, source in enumerate(getattr(config.data, name)):
            if not source.path:
                raise UserError("give the path of this source", field=f"data.{name}.{number}.path")


def find_recipe(name: str) -> Callable[..., RunConfig]:
    """A recipe of ours by its name, or one of the user's as FILE:NAME.

    Raises ValueError where there is none.
    """
    if name in RECIPES:
        return RECIPES[name]
    path, colon, _ = name.rpartition(":")
    if not colon:
        if name.endswith(".py"):
            raise ValueError(f"{name} is a file: name a recipe in it, {name}:NAME")
        raise ValueError(f"unknown recipe {name!r}: the recipes are {', '.join(RECIPES)}, or path/to/recipes.py:NAME")
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file: a recipe of your own is path/to/recipes.py:NAME")
    found = find_in_file(name, "recipe", callable)

    @functools.wraps(found)
    def checked(*weights: Any) -> RunConfig:
        config = found(*weights)
        if not isinstance(config, RunConfig):
            kind = type(config).__name__
            raise ValueError(
                f"{name} returns a value of type {kind}: a recipe returns a treering.configs.run.RunConfig"
            )
        return config

    return checked
