"""Python files of the user's own: families, sizes, recipes."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_PREFIX = "_file_of_the_user_"


def import_file(path: str | Path) -> tuple[ModuleType, bool]:
    """The module at `path`, and whether it was imported now: a file that does not change is imported once.

    It can import files next to it, after everything that is installed; and later files can import it by its name.
    Raises ValueError for what is not a Python file, or cannot be imported.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    status = path.stat()
    version = f"{path.resolve()}:{status.st_mtime_ns}:{status.st_size}"
    name = _PREFIX + hashlib.sha256(version.encode()).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name], False
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the module they are in
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # The user's own code.
        del sys.modules[name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if _free(path):
        sys.modules[path.stem] = module  # an import by its name does not run it again
    return module, True


def _free(path: Path) -> bool:
    """Whether the file's name means no module but this file, or an earlier one of the user's."""
    held = sys.modules.get(path.stem)
    if held is not None or not path.stem.isidentifier():
        return held is not None and held.__name__.startswith(_PREFIX)
    found = importlib.util.find_spec(path.stem)
    return found is None or found.origin == str(path.resolve())


def find_in_file(name: str, what: str, fits: Callable[[object], bool] = lambda _: True) -> Any:
    """What `FILE.py:NAME` names; `what` says what that should be, for errors, and `fits` whether a value can be it.

    Raises ValueError where the file or the name is not there, or its value does not fit.
    """
    path, _, attribute = name.rpartition(":")
    module, _ = import_file(path)
    if not hasattr(module, attribute) or not fits(getattr(module, attribute)):
        names = [key for key, value in vars(module).items() if not key.startswith("_") and fits(value)]
        raise ValueError(f"{path} has no {what} {attribute!r}: it has {', '.join(names) or 'none'}")
    return getattr(module, attribute)
