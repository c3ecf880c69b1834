"""Train and serve Llama-family language models on sequences that no device can hold.

The front door: `treering COMMAND ...`, and the names that most people import, each loaded when it is asked for. The
folders beside this file are links to those of the repository, so that `treering` is the one name that is installed.
"""

import importlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0.dev0"
PACKAGES = ("configs", "layers", "models", "infer", "train")
EXPORTS = {
    "AttentionMesh": "layers",
    "Mask": "layers",
    "TokenData": "layers",
    "dense_attention": "layers",
    "gather_attention": "layers",
    "local_attention": "layers",
    "ring_attention": "layers",
    "tree_attention": "layers",
}
"""Name: the package that it is imported from when it is first used."""

if not_links := [name for name in PACKAGES if not (Path(__file__).parent / name).is_dir()]:
    raise ImportError(
        f"{Path(__file__).parent} lacks the links {', '.join(not_links)} to the repository's folders: check it out "
        "again where links are allowed (on Windows: developer mode, and git config core.symlinks true)"
    )


def __getattr__(name: str) -> Any:
    if name in PACKAGES:
        return importlib.import_module(f"treering.{name}")
    if name in EXPORTS:
        return getattr(importlib.import_module(f"treering.{EXPORTS[name]}"), name)
    raise AttributeError(f"module 'treering' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *PACKAGES, *EXPORTS})


COMMANDS = {
    "convert": ("models.commands.convert", "turn a Hugging Face or Meta folder, or a GGUF file, into a checkpoint"),
    "export": ("models.commands.export", "turn a checkpoint into a Hugging Face folder"),
    "generate": ("infer.commands.generate", "generate text from a checkpoint, on any mesh"),
    "chat": ("infer.commands.chat", "talk with a model in the terminal"),
    "train": ("train.commands.train", "train by a recipe, on any mesh; alone: list the recipes"),
    "verify": ("models.commands.verify", "compare a checkpoint with what transformers computes (needs torch)"),
    "zoo": ("models.commands.zoo", "list the published sizes"),
    "check": ("models.commands.check", "run our checks on a size or a family of your own"),
    "plot": ("train.commands.plot", "draw the loss of a run, and its loss by position"),
}
"""Name: the module of `treering` whose `main(arguments)` runs it, and what it does."""
PLUGIN = (
    "--plugin FILE.py  a file that registers families of your own (docs/add-a-model.md), for every command but plot"
)


def usage() -> str:
    """What `treering --help` prints."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        f"usage: treering COMMAND ...\n\n{lines}\n\n{PLUGIN}\n\n`treering COMMAND --help` lists a command's options; "
        "`treering --version` tells the versions."
    )


def versions() -> str:
    """What `treering --version` prints."""
    return f"treering {__version__} (jax {importlib.metadata.version('jax')}, Python {platform.python_version()})"


def without_plugins(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments without each `--plugin FILE`, and those files; ValueError for one without a file."""
    rest, files = [], []
    left = iter(arguments)
    for argument in left:
        flag, equals, file = argument.partition("=")
        if flag != "--plugin":
            rest.append(argument)
            continue
        files.append(file if equals else next(left, ""))
        if not files[-1] or files[-1].startswith("-"):
            raise ValueError("--plugin needs a file: --plugin my_family.py")
    return rest, files


def keep_compiled() -> None:
    """Has JAX keep compiled programs between runs: compiling takes most of a short run's time.

    In `~/.cache/treering/compiled`, or where JAX_COMPILATION_CACHE_DIR says (empty for nowhere).
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = stands = os.path.abspath(os.path.join(caches, "treering", "compiled"))
    while not os.path.exists(stands):
        stands = os.path.dirname(stands)
    # JAX makes the folder when it has something to keep, and warns at each program where it cannot.
    if os.path.isdir(stands) and os.access(stands, os.W_OK):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)


def console_script() -> int:
    """The command `treering` as a process of its own: `main`, and what a failed write leaves stays quiet to the end."""
    importlib.import_module("treering.models.checkpoint.quiet").quiet_orbax()
    return main()


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    A user's mistake (ValueError, or a path that cannot be read or written) is one plain line on standard error and
    status 2. TREERING_TRACEBACK=1 shows where it was raised.
    """
    # Outside of what handles errors, so that their frames, and what is unfinished in them, are freed while it is quiet.
    with importlib.import_module("treering.models.checkpoint.quiet").quiet_orbax():
        return _run(arguments)


def _run(arguments: list[str] | None) -> int:
    # Without PyTorch transformers prints a line about it, unless this is set before it is imported.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        print(versions())
        return 0
    try:
        if name not in COMMANDS:
            raise ValueError(f"unknown command {name!r}: the commands are {', '.join(COMMANDS)}")
        keep_compiled()
        if name != "plot":
            # Before the command's own options are read: a recipe of the user's may need what it registers.
            rest, files = without_plugins(rest)
            for file in files:
                importlib.import_module("treering.models.families.plugin").load_plugin(file)
            if {"-h", "--help"} & set(rest):
                print(PLUGIN, end="\n\n")
        status = importlib.import_module(f"treering.{COMMANDS[name][0]}").main(rest) or 0
        sys.stdout.flush()  # here a closed pipe can still be answered
        return status
    except BrokenPipeError:
        # Who reads standard output has had enough, as `head` does: nothing to tell, and nothing left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except (ValueError, OSError) as error:
        if os.environ.get("TREERING_TRACEBACK"):
            raise
        errors = importlib.import_module("treering.configs.errors")
        if isinstance(error, errors.UserError):
            message = errors.word(error, errors.as_option)
        elif isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {error.strerror}"
        else:
            message = str(error)
        print(f"treering{' ' + name if name in COMMANDS else ''}: {' '.join(message.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
