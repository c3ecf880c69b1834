"""Small files that others wrote: checked before they are read, and named in errors; and copies of them."""

import json
import shutil
from pathlib import Path
from typing import Any


def check_file(path: Path) -> None:
    """Raises for a file that does not exist, is empty, or is a Git LFS pointer."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.stat().st_size:
        raise ValueError(f"{path} is an empty file")
    check_no_pointer(path)


def check_no_pointer(path: Path) -> None:
    """Raises ValueError for a Git LFS pointer in place of a file."""
    with path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            raise ValueError(f"{path} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises with one line where it is missing or something else."""
    check_file(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a JSON {type(raw).__name__} instead of an object")
    return raw


def copy_folder(source: Path, target: Path) -> None:
    """Copies what a folder holds into `target`, which may exist. Modes are those of new files, not those of `source`:
    a temporary folder's is private."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        (copy_folder if entry.is_dir() else shutil.copyfile)(entry, target / entry.name)


def listing(names: list[str], limit: int = 8) -> str:
    """Names for an error message, the first few of them."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
