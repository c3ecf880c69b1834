"""Command lines from dataclasses: the one module that knows the option parser.

A command's options are a frozen dataclass: fields become `--flags`, nested dataclasses dotted ones, and docstrings the
help.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import typing
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
        flag = argument.partition("=")[0].replace("_", "-")
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
        raise ValueError(_one_line(said.getvalue(), known, program)) from None


def flags_of(options: type, prefix: str = "--") -> list[str]:
    """All flags of an options class, dotted where classes nest."""
    flags = []
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        name = prefix + field.name.replace("_", "-")
        hint: Any = hints[field.name]
        flags += flags_of(hint, name + ".") if isinstance(hint, type) and dataclasses.is_dataclass(hint) else [name]
    return flags


def overrides_of(value: Any, prefix: str = "--") -> list[str]:
    """All flags that override parts of a config: dotted names of its fields, and numbers for those of tuples."""
    if dataclasses.is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        name = prefix.rstrip(".")
        # A flag that is on can be turned off.
        parent, dot, last = name.rpartition(".")
        negative = f"{parent}.no-{last}" if dot else f"--no-{last.removeprefix('--')}"
        return [name, negative] if isinstance(value, bool) else [name]
    return [flag for name, item in items for flag in overrides_of(item, f"{prefix}{name.replace('_', '-')}.")]


def _nearest(flag: str, known: list[str]) -> str | None:
    """The known flag most like `flag`: by its last word, for one that stands in another section, or as a whole."""
    words = {name.rpartition(".")[2].removeprefix("--"): name for name in reversed(known)}
    word = flag.rpartition(".")[2].removeprefix("--")
    if word in words:
        return words[word]
    whole = difflib.get_close_matches(flag, known, n=1)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
    return whole[0] if whole else words[close[0]] if close else None


def _one_line(box: str, known: list[str], program: str) -> str:
    """The parser's framed message, without its frame and the pointer to its help."""
    lines = [re.sub(r"[─╭╮╰╯│]", " ", line).strip() for line in box.splitlines()]
    text = " ".join(line for line in lines if line)
    if "Missing from" in text:
        missing = [flag for flag in known if re.search(rf"{re.escape(flag)}(?![\w.-])", text)]
        return f"missing {' '.join(missing) or 'an argument'}: see {program} --help"
    text = re.split(r"Argument helptext|For full helptext", text)[0]
    text = re.sub(r"^(Value error|Invalid choice|Unrecognized options|Parsing error)\s+", "", text)
    return re.sub(r"\s+", " ", text).strip()
