"""Folders that get their names when they are complete, written by one process at a time."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


def partial_folder(path: Path) -> Path:
    """Where the folder `path` is while it is being written."""
    return path.with_name(path.name + ".partial")


@contextlib.contextmanager
def written_beside(path: str | Path, check: Callable[[], None]) -> Iterator[Path]:
    """The folder `path`.partial, locked, in which the caller writes everything before it renames it.

    It may hold what an earlier process left. `check` raises ValueError where `path` holds something that may not be
    replaced. A ValueError of the caller's removes the folder; an OSError about it names `path` instead.
    """
    path = Path(path)
    check()
    partial = partial_folder(path)
    made = [folder for folder in partial.parents if not folder.exists()]
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(partial, f"another process writes {path}: wait for it, or choose another destination"):
            try:
                check()  # again: another process may have been here before
                yield partial
            except ValueError as error:
                if str(partial.resolve()) in str(error):  # how tensorstore reports a full disk
                    number = re.search(r"os_error_code='(\d+)'", str(error))
                    raise OSError(int(number[1]) if number else 5, str(error), str(partial)) from error
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except ValueError:
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: not ours
                folder.rmdir()
        raise
    except OSError as error:
        if error.errno and str(error.filename).startswith(str(partial)):
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextlib.contextmanager
def exclusive_lock(path: Path, message: str) -> Iterator[None]:
    """Raises ValueError, with this `message`, where another process has locked the file or folder `path`, or renamed
    it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor))
        except BlockingIOError:
            alone = False
        except OSError:  # a file system without locks
            alone = True
        if not alone:
            raise ValueError(message)
        yield
    finally:
        os.close(descriptor)


def empty(folder: Path) -> None:
    """Removes everything in a folder."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def check_creatable(path: Path) -> None:
    """Raises ValueError where `path` is not a folder that can be written to, and cannot become one."""
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{path} cannot be created: {parent} is not a folder that can be written to")
