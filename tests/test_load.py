"""Models are run from where they lie, and are the same as after a conversion."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import tiny
import treering
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.model import load_model, named_leaves
from treering.models.conversion.convert import convert
from treering.models.conversion.load import open_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Beside each other: a checkpoint, the folder it was made of, and a GGUF file of the same model."""
    config = tiny.LLAMA | {"vocab_size": 300}
    tiny.save_byte_level(tiny.write_folder(tmp_path / "hf", config))
    tiny.write_gguf(tmp_path / "model.gguf", config, metadata=tiny.gguf_tokenizer_metadata("gpt2"))
    convert(tmp_path / "hf", tmp_path / "checkpoint")
    return tmp_path


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_parameters_are_those_of_a_conversion_and_lie_as_they_do(
    folder: Path, mesh: Callable[..., Mesh], dtype: str | None
) -> None:
    plan = Plan(mesh(context=4, tensor=2), "decode")
    right = named_leaves(load_model(folder / "checkpoint", plan, dtype))
    for name in ("checkpoint", "hf", "model.gguf"):
        opened = open_model(folder / name)
        found = named_leaves(opened.load(plan, dtype))
        assert found.keys() == right.keys()
        for path, array in found.items():
            assert array.dtype == right[path].dtype and array.sharding == right[path].sharding, path
            assert np.array_equal(np.asarray(array), np.asarray(right[path])), path
        whole = [path for path, array in found.items() if "weight" in path and array.sharding.is_fully_replicated]
        assert all("norm" in path for path in whole)
        assert opened.tokenizer().encode("Paris") == tiny.byte_level_tokenizer().encode("Paris").ids


def test_generate_takes_what_is_not_converted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for name in ("hf", "model.gguf"):
        options = ["--prompt", "The capital", "--json", "--max-new-tokens", "4"]
        assert treering.main(["generate", str(folder / name), *options]) == 0
        answers.append(json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"])
    assert answers[0] == answers[1] and len(answers[0]) == 4


def test_what_cannot_be_run_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(name: str, words: str) -> None:
        assert treering.main(["generate", str(folder / name), "--prompt", "x"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert words in said and said.startswith("treering generate: "), said

    (folder / "hf" / "tokenizer.json").rename(folder / "tokenizer.json")
    refused("hf", "has no tokenizer next to it")
    (folder / "tokenizer.json").rename(folder / "hf" / "tokenizer.json")
    file = folder / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused("hf", "is truncated")
    config = folder / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"colour": "red"}))
    refused("hf", "is truncated")
    file.unlink()
    refused("hf", "holds no weights")
    (folder / "checkpoint" / "model.json").unlink()
    refused("checkpoint", "is unfinished")
    refused("Org/Model", "does not exist: give a checkpoint, a Hugging Face folder, a Meta folder or a GGUF file (to t")
    refused("Org/Model", "names on the Hugging Face hub are not downloaded")


def test_paths_through_a_parent_folder_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "beside").mkdir()
    monkeypatch.chdir(folder / "beside")
    convert("../hf", "../beside/made")
    assert treering.main(["export", "../beside/made", "../beside/back"]) == 0
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), ("data", "fsdp", "context", "tensor"))
    found, right = (
        named_leaves(open_model(path).load(Plan(mesh, "decode"), None)) for path in ("../beside/made", "../checkpoint")
    )
    assert all(np.array_equal(found[path], array) for path, array in right.items())


def cut(file: Path) -> None:
    os.truncate(file, 100)


def spoil(file: Path) -> None:
    file.write_text("{")


@pytest.mark.parametrize(
    ("damage", "file", "told"),
    [
        (
            cut,
            "embed.table/0.0",
            r"damaged or incomplete: convert or copy it again \(embed.table/0.0 holds 100 bytes instead",
        ),
        (Path.unlink, "embed.table/0.0", "damaged or incomplete.*No such file.*embed.table/0.0"),
        (shutil.rmtree, "embed.table", "missing embed.table"),
        (Path.unlink, "embed.table/.zarray", "damaged or incomplete.*No such file.*embed.table/.zarray"),
        (spoil, "embed.table/.zarray", "embed.table/.zarray does not describe an array"),
        (lambda file: file.write_text("[]"), "embed.table/.zarray", "embed.table/.zarray does not describe an array"),
    ],
)
def test_damaged_weights_are_told_once(
    folder: Path, mesh: Callable[..., Mesh], capfd: pytest.CaptureFixture[str], damage: Any, file: str, told: str
) -> None:
    """Without the errors of many reads that fail together, which their library prints from threads of its own."""
    damage(folder / "checkpoint" / "weights" / file)
    capfd.readouterr()
    with pytest.raises(ValueError, match=told):
        open_model(folder / "checkpoint").load(Plan(mesh(), "decode"), None)
    assert capfd.readouterr().err == ""
    assert treering.main(["export", str(folder / "checkpoint"), str(folder / "back")]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_run_is_not_a_model_but_has_some(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="run is a training run without a checkpoint"):
        open_model(folder / "run")
    for step in ("9", "10", "11.orbax-checkpoint-tmp"):
        shutil.copytree(folder / "checkpoint", folder / "run" / "checkpoints" / step / "model")
    newest = folder / "run" / "checkpoints" / "10" / "model"
    for command in ("export", "convert", "verify"):
        assert treering.main([command, str(folder / "run"), str(folder / "new")]) == 2
        told = f"treering {command}: {folder / 'run'} is a training run: its newest checkpoint is {newest}\n"
        assert capsys.readouterr().err == told
    with pytest.raises(ValueError, match=f"10 is a step of a training run: its checkpoint is {newest}"):
        open_model(newest.parent)


def test_text_that_is_no_unicode_is_refused(folder: Path) -> None:
    tokenizer = open_model(folder / "checkpoint").tokenizer()
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(ValueError, match=r"the text holds '\\udcff' at character 1, which is not a character"):
            encode("a\udcff")
