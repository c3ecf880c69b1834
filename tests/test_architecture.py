"""The two walks of docs/architecture.md, compared with a real trace: the files between a command and the product of
queries with keys, in order."""

import re
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tiny
import tiny_run
import treering

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


class Reached(Exception):
    """The product was called for; `files` were on the stack."""

    def __init__(self, files: list[str]):
        super().__init__(files)
        self.files = files


def stack() -> list[str]:
    """The files of ours on the stack, outermost first, each where it comes first."""
    found = []
    for frame in traceback.extract_stack():
        path = Path(frame.filename).resolve()
        if (
            path.is_file()
            and path.is_relative_to(ROOT)
            and not path.is_relative_to(ROOT / "tests")
            and ".venv" not in path.parts
        ):
            found.append(str(path.relative_to(ROOT)))
    return list(dict.fromkeys(found))


def walk(monkeypatch: pytest.MonkeyPatch, product: tuple[object, str], kernel: str, arguments: list[str]) -> list[str]:
    """The files from the command line to the first `product` in the file `kernel`, where the command is ended."""
    module, name = product
    real: Callable = getattr(module, name)

    def watched(*args, **kwargs):
        if (files := stack())[-1] == kernel:
            raise Reached(files)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, watched)
    with pytest.raises(Reached) as reached:
        treering.main(arguments)
    return reached.value.files


def told(command: str) -> list[str]:
    """The files of the walk whose table comes first after the command is named in a heading of the page."""
    section = next(part for part in PAGE.split("\n## ") if command in part.partition("\n")[0])
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [re.findall(r"`([\w/.]+\.py)`", row.split("|")[2])[0] for row in rows]


def test_the_walk_of_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["generate", str(tiny.llama_checkpoint(tmp_path)), "--prompt", "The capital", "--mesh.context", "8"]
    files = walk(monkeypatch, (jnp, "einsum"), "layers/attention/kernels/paged_xla.py", arguments)
    assert files == told("treering generate")
    assert len(files) <= 8


def test_the_walk_of_a_training_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train", f"{tiny_run.recipe_file(tmp_path)}:small", "--mesh.context", "4"]
    files = walk(monkeypatch, (jax.lax, "dot_general"), "layers/attention/kernels/xla.py", arguments)
    assert files == told("treering train")
    assert len(files) <= 10
