"""Families of the user's own, from one file outside this repository."""

from pathlib import Path

from treering.configs.user_file import import_file
from treering.models.families import families


def load_plugin(path: str | Path) -> None:
    """Imports a file that calls `register_family`.

    Raises ValueError where it cannot be imported, registers nothing, or registers a name that is taken.
    """
    before = set(families())
    _, new = import_file(path)
    if new and set(families()) == before:
        raise ValueError(
            f"{path} registers no family: a plugin calls treering.models.families.register_family(Family(...))"
        )
