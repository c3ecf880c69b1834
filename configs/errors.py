"""Mistakes of users, as data: what each is about, and one function that words it for the place where it is read."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_ABSENT: Any = object()


class UserError(ValueError):
    """A value that the user gave, and why it cannot be.

    Raise it where a setting or a field of a file is at fault; where no single one is, a plain ValueError does.
    """

    def __init__(
        self,
        rule: str,
        *,
        field: str | None = None,
        value: Any = _ABSENT,
        works: Iterable[object] = (),
        file: str | Path | None = None,
        line: int | None = None,
    ):
        """`rule` is what holds of the value, as the end of a sentence: "it must be at least 1".

        `field` is a setting's dotted name in the words of the configs, such as "data.window", or a field of `file` in
        that file's words. `works` are values that would do; `line` counts from 1.
        """
        self.rule, self.field, self.value, self.works = rule, field, value, tuple(works)
        self.file, self.line = file, line
        super().__init__(rule)

    @property
    def has_value(self) -> bool:
        """Whether the value is known: an option may have none."""
        return self.value is not _ABSENT

    def at(
        self, file: str | Path, line: int | None = None, rename: Callable[[str], str] = lambda field: field
    ) -> "UserError":
        """The same mistake, made in a file that calls its fields by names of its own."""
        field = None if self.field is None else rename(self.field)
        return UserError(self.rule, field=field, value=self.value, works=self.works, file=file, line=line)

    def inside(self, prefix: str) -> "UserError":
        """The same mistake, of a config that is the field `prefix` of another."""
        field = None if self.field is None else f"{prefix}.{self.field}"
        return UserError(self.rule, field=field, value=self.value, works=self.works, file=self.file, line=self.line)

    def __str__(self) -> str:
        return word(self)


def as_option(field: str) -> str:
    """A setting as the command line has it: `--data.block-windows` for `data.block_windows`."""
    return "--" + field.replace("_", "-")


def word(error: UserError, name: Callable[[str], str] = str) -> str:
    """A mistake on one line: where, what, its value, the rule, and what would work.

    `name` says what a setting is called where the line is read: `as_option` on a command line. A field of a file has
    the name that it has there, in quotes.
    """
    parts = []
    if error.file is not None:
        parts.append(f"{error.file}, line {error.line}" if error.line is not None else f"{error.file}")
    if error.field is not None:
        called = name(error.field) if error.file is None else f'"{error.field}"'
        parts.append(f"{called} {error.value}" if error.has_value else called)
    works = f" (works: {', '.join(map(str, error.works))})" if error.works else ""
    return ": ".join([*parts, error.rule + works])
