"""Command lines from dataclasses, and values from text and JSON: the one module that knows the option parser.

A command's options are a frozen dataclass: fields become `--flags`, nested dataclasses dotted ones, and docstrings the
help. What the user typed is compared with the types of the fields before the parser sees it, so that each mistake is a
`UserError` with the option and its value.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import tyro

from treering.configs.errors import UserError

T = TypeVar("T")
Positional = tyro.conf.Positional


def metavar(name: str) -> Any:
    """What help calls an argument: `source: Positional[Annotated[str, metavar("SRC")]]`."""
    return tyro.conf.arg(metavar=name)


def parse(options: type[T], arguments: list[str], *, program: str, default: T | None = None) -> T:
    """An instance of `options` from command-line arguments, which override the fields of `default`.

    Raises ValueError, in one line, for what does not fit; an unknown flag comes with the nearest known one.
    `--help` prints and exits.
    """
    known = flags_of(options) if default is None else overrides_of(default)
    if "--help" not in arguments and "-h" not in arguments:
        positionals = _read(arguments, known, program)
        wanted = _positionals_of(options) if default is None else {}
        _check_positionals(positionals, wanted, program)
    # With a default, what may be one of several classes keeps the class of the default.
    marker = tyro.conf.FlagCreatePairsOff if default is None else tyro.conf.AvoidSubcommands
    given: dict[str, Any] = {} if default is None else {"default": default}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(options, args=arguments, prog=program, config=(marker,), **given)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        # What a config raises of its own values, the parser prints in a frame, and ends: the error is its context.
        cause: BaseException | None = stop.__context__
        while cause is not None and (cause.__cause__ or cause.__context__) is not None:
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, ValueError):
            raise cause from None
        raise ValueError(f"these options do not fit together: see {program} --help") from None


def flags_of(options: type, prefix: str = "--") -> dict[str, Any]:
    """All flags of an options class, dotted where classes nest, and their types."""
    flags = {}
    hints = typing.get_type_hints(options)
    for name in _fields(options, positional=False):
        flag, hint = prefix + name.replace("_", "-"), hints[name]
        nested = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        flags |= flags_of(hint, flag + ".") if nested else {flag: hint}
    return flags


def overrides_of(value: Any, prefix: str = "--", hint: Any = None) -> dict[str, Any]:
    """All flags that override parts of a config, and their types: dotted names of its fields, and numbers for those of
    tuples. `hint` is the type of a `value` that is not a config."""
    if dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        items = [(field.name, getattr(value, field.name), hints[field.name]) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
        items = [(str(number), item, None) for number, item in enumerate(value)]
    else:
        name = prefix.rstrip(".")
        # A flag that is on can be turned off.
        parent, dot, last = name.rpartition(".")
        negative = f"{parent}.no-{last}" if dot else f"--no-{last.removeprefix('--')}"
        return dict.fromkeys([name, negative] if isinstance(value, bool) else [name], hint)
    flags = {}
    for name, item, its_hint in items:
        flags |= overrides_of(item, f"{prefix}{name.replace('_', '-')}.", its_hint)
    return flags


def _fields(options: type, *, positional: bool) -> list[str]:
    marked = typing.get_type_hints(options, include_extras=True)
    return [
        field.name
        for field in dataclasses.fields(options)
        if (Positional in getattr(marked[field.name], "__metadata__", ())) == positional
    ]


def _positionals_of(options: type) -> dict[str, Any]:
    """Arguments without a flag, in order, as help calls them, and their types."""
    hints = typing.get_type_hints(options, include_extras=True)
    named = {}
    for name in _fields(options, positional=True):
        metavars = [one.metavar for one in hints[name].__metadata__ if getattr(one, "metavar", None)]
        named[metavars[0] if metavars else name.upper()] = typing.get_args(hints[name])[0]
    return named


# Arguments as the user typed them.


def _flag(argument: str) -> str:
    return argument.partition("=")[0].replace("_", "-")


def _read(arguments: list[str], known: Mapping[str, Any], program: str) -> list[str]:
    """The arguments that belong to no flag; raises UserError for flags and values that do not fit."""
    for argument in arguments:
        flag = _flag(argument)
        if flag.startswith("--") and flag not in known and flag != "--":
            near = _nearest(flag, known)
            advice = f"did you mean {near}?" if near else f"see {program} --help"
            raise ValueError(f"unknown option {argument.partition('=')[0]}: {advice}")
    positionals: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag = _flag(argument)
        if flag not in known:
            positionals.append(argument)
            continue
        field = flag.removeprefix("--").replace("-", "_")
        hint, _, equals, value = known[flag], *argument.partition("=")
        if hint is bool:
            if equals or (rest and rest[0] in ("yes", "no", "true", "false", "True", "False", "0", "1")):
                raise UserError(f"{flag} takes no value", field=field, value=value or rest[0])
            continue
        several = typing.get_origin(hint) is tuple or any(
            typing.get_origin(one) is tuple for one in typing.get_args(hint)
        )
        values = [value] if equals else list(itertools.takewhile(lambda one: not one.startswith("--"), rest))
        values = values if several else values[:1]
        rest = rest if equals else rest[len(values) :]
        if not values:
            raise UserError(f"it must be {rule_of(hint)}", field=field, value="without a value")
        if hint is not None and not _fits_text(values, hint):
            given = " ".join(values)
            raise UserError(f"it must be {rule_of(hint)}", field=field, value=given, works=_whole(given, hint))
    return positionals


def _check_positionals(given: list[str], wanted: Mapping[str, Any], program: str) -> None:
    several = any(typing.get_origin(hint) is tuple for hint in wanted.values())
    if missing := list(wanted)[len(given) :]:
        if not several or len(missing) > 1:
            raise ValueError(f"missing {' '.join(missing)}: see {program} --help")
    if len(given) > len(wanted) and not several:
        raise ValueError(f"unexpected argument {given[len(wanted)]}: see {program} --help")


def _nearest(flag: str, known: Iterable[str]) -> str | None:
    """The known flag most like `flag`: by its last word, for one that belongs to another section, or as a whole."""
    words = {name.rpartition(".")[2].removeprefix("--"): name for name in reversed(list(known))}
    word = flag.rpartition(".")[2].removeprefix("--")
    if word in words:
        return words[word]
    whole = difflib.get_close_matches(flag, known, n=1)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
    return whole[0] if whole else words[close[0]] if close else None


# Values and their types.


def _kinds(hint: Any) -> list[Any]:
    """The types that a value may have: those of a union one by one."""
    return list(typing.get_args(hint)) if typing.get_origin(hint) in (typing.Union, types.UnionType) else [hint]


def rule_of(hint: Any, *, none: str = "None") -> str:
    """What a value of this type is, in words; `none` is how None is written."""
    inner = typing.get_args(hint)
    if len(kinds := _kinds(hint)) > 1:
        return ", or ".join(none if one is types.NoneType else rule_of(one) for one in kinds)
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if typing.get_origin(hint) is tuple:
        return f"{'any number of' if ... in inner else len(inner)} values, each {rule_of(inner[0])}"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def _fits_text(values: list[str], hint: Any) -> bool:
    """Whether words of a command line are a value of this type."""
    return any(_is_text_of(values, kind) for kind in _kinds(hint))


def _is_text_of(values: list[str], kind: Any) -> bool:
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        wanted = [inner[0]] * len(values) if ... in inner else list(inner)
        pairs = zip(values, wanted, strict=False)
        return len(values) == len(wanted) and all(_fits_text([one], its) for one, its in pairs)
    if len(values) != 1:
        return False
    (value,) = values
    if typing.get_origin(kind) is typing.Literal:
        return value in map(str, inner)
    if kind is types.NoneType:
        return value == "None"
    if kind in (int, float):
        try:
            kind(value)
        except ValueError:
            return False
    return True


def _whole(given: str, hint: Any) -> list[int]:
    """How a whole number is written that was given as 1e3, or 8.0."""
    with contextlib.suppress(ValueError, OverflowError):
        if int in _kinds(hint) and float(given) == int(float(given)):
            return [int(float(given))]
    return []


def from_json(value: Any, hint: Any) -> Any:
    """A JSON value as a config's field of this type takes it: lists become tuples, whole numbers may be floats.

    Raises UserError, without a field, where it is of another type.
    """
    for kind in _kinds(hint):
        if kind is types.NoneType and value is None:
            return None
        if kind is float and type(value) in (int, float):
            with contextlib.suppress(OverflowError):
                if math.isfinite(number := float(value)):
                    return number
        if kind in (int, bool, str) and type(value) is kind:
            return value
        if typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind):
            return value
        if typing.get_origin(kind) is tuple and isinstance(value, list):
            inner = typing.get_args(kind)[0]
            return tuple(from_json(one, inner) for one in value)
    raise UserError(f"it must be {rule_of(hint, none='null')}", value=value)
