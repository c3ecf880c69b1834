"""Command lines from dataclasses: the one module that knows the option parser.

A command's options are a frozen dataclass: fields become `--flags`, nested dataclasses dotted ones, and docstrings the
help.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import tyro

T = TypeVar("T")
Positional = tyro.conf.Positional


def parse(options: type[T], arguments: list[str], *, program: str, default: T | None = None) -> T:
    """An instance of `options` from command-line arguments, which override the fields of `default`.

    Raises ValueError, in one line, for what does not fit; an unknown flag comes with the nearest known one.
    `--help` prints and exits.
    """
    known = flags_of(options) if default is None else overrides_of(default)
    for argument in arguments:
        flag = _flag(argument)
        if flag.startswith("--") and flag not in known and flag not in ("--", "--help"):
            near = _nearest(flag, known)
            advice = f"did you mean {near}?" if near else f"see {program} --help"
            raise ValueError(f"unknown option {argument.partition('=')[0]}: {advice}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if default is None:
                return tyro.cli(options, args=arguments, prog=program, config=(tyro.conf.FlagCreatePairsOff,))
            return tyro.cli(
                options,
                args=arguments,
                prog=program,
                default=default,
                # What may be one of several classes keeps the class of the default.
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(_one_line(said.getvalue(), known, arguments, program)) from None


def as_typed(message: str, arguments: list[str]) -> str:
    """`message` with the flags that the user typed in place of the fields that they set: --max-new-tokens for
    max_new_tokens. A field whose name is a plain word is known only at the beginning, and one in quotes is another."""
    for flag in map(_flag, arguments):
        words = flag.removeprefix("--").split(".")
        for name in (".".join(words[first:]) for first in range(len(words) if flag.startswith("--") else 0)):
            field = re.escape(name).replace(r"\-", "[_-]")
            place = rf"^{field}(?=[ :])" if name.isalpha() else rf'(?<![\w./"-]){field}(?![\w/-]|\.\w)'
            message = re.sub(place, flag, message)
    return message


def _flag(argument: str) -> str:
    return argument.partition("=")[0].replace("_", "-")


def flags_of(options: type, prefix: str = "--") -> dict[str, Any]:
    """All flags of an options class, dotted where classes nest, and their types."""
    flags = {}
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        name = prefix + field.name.replace("_", "-")
        hint: Any = hints[field.name]
        nested = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        flags |= flags_of(hint, name + ".") if nested else {name: hint}
    return flags


def overrides_of(value: Any, prefix: str = "--", hint: Any = None) -> dict[str, Any]:
    """All flags that override parts of a config, and their types: dotted names of its fields, and numbers for those of
    tuples. `hint` is the type of a `value` that is no config."""
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


def _nearest(flag: str, known: Iterable[str]) -> str | None:
    """The known flag most like `flag`: by its last word, for one that stands in another section, or as a whole."""
    words = {name.rpartition(".")[2].removeprefix("--"): name for name in reversed(list(known))}
    word = flag.rpartition(".")[2].removeprefix("--")
    if word in words:
        return words[word]
    whole = difflib.get_close_matches(flag, known, n=1)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
    return whole[0] if whole else words[close[0]] if close else None


def _one_line(box: str, known: Mapping[str, Any], arguments: list[str], program: str) -> str:
    """The parser's framed message, without its frame and the pointer to its help, and in our words where it is of the
    type of a value."""
    # The frame is of ASCII where standard error is.
    lines = [re.sub(r"[─╭╮╰╯│]|^[+|]|[+|]$|-{3,}", " ", line.strip()).strip() for line in box.splitlines()]
    text = " ".join(line for line in lines if line)
    if "Missing from" in text:
        missing = [flag for flag in known if re.search(rf"{re.escape(flag)}(?![\w.-])", text)]
        return f"missing {' '.join(missing) or 'an argument'}: see {program} --help"
    text = re.split(r"Argument helptext|For full helptext", text)[0]
    text = re.sub(r"^(Value error|Invalid choice|Parsing error|Missing argument)\s+", "", text)
    if found := re.match(r"Unrecognized options (?:Unrecognized options: )?(\S+)", text):
        return _unexpected(found[1], known, arguments, program)
    found = re.search(r"^Error parsing (--[\w.-]+):|for argument '(--[\w.-]+)'", text)
    flag = str(found[1] or found[2]) if found else ""
    if flag in known:
        given = " ".join(_values(flag, known[flag], arguments))
        return f"{flag} {given or 'without a value'}: it must be {_rule(known[flag])}{_whole(given, known[flag])}"
    # What a config says of its own values.
    return re.sub(r"^Error parsing [\w.-]+: ", "", re.sub(r"\s+", " ", text).strip())


def _unexpected(word: str, known: Mapping[str, Any], arguments: list[str], program: str) -> str:
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag = _flag(before if argument == word else argument)
        if word in (argument, argument.partition("=")[2]) and known.get(flag) is bool:
            return f"{flag} {word}: {flag} takes no value"
    return f"unexpected argument {word}: see {program} --help"


def _values(flag: str, hint: Any, arguments: list[str]) -> list[str]:
    """What the user gave a flag, the last time."""
    places = [place for place, argument in enumerate(arguments) if _flag(argument) == flag]
    if not places:
        return []
    _, equals, value = arguments[places[-1]].partition("=")
    following = itertools.takewhile(lambda argument: not argument.startswith("--"), arguments[places[-1] + 1 :])
    return [value] if equals else list(following)[: None if "tuple" in str(hint) else 1]


def _rule(hint: Any) -> str:
    """What a value of this type is, in words."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return ", or ".join("None" if one is types.NoneType else _rule(one) for one in inner)
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if typing.get_origin(hint) is tuple:
        return f"{'any number of' if ... in inner else len(inner)} values, each {_rule(inner[0])}"
    return {int: "a whole number", float: "a number", str: "a text"}.get(hint, getattr(hint, "__name__", str(hint)))


def _whole(given: str, hint: Any) -> str:
    """How a whole number is written that was given as 1e3, or 8.0."""
    with contextlib.suppress(ValueError, OverflowError):
        if "int" in str(hint) and float(given) == int(float(given)) and given != str(int(float(given))):
            return f", such as {int(float(given))}"
    return ""
