"""`treering train` as a user meets it: what is wrong is one line, before anything is compiled or written."""

import inspect
import json
import re
from pathlib import Path

import pytest

import tiny_run
import treering


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from treering.train.run import loop as run

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a step was compiled")

    monkeypatch.setattr(run, "step_program", never)


def test_a_recipe_that_starts_from_weights_asks_for_them(tmp_path: Path, capsys) -> None:
    assert treering.main(["train", "fine_tune", "--steps", "3"]) == 2
    assert "fine_tune starts from weights that you have: --init-from" in capsys.readouterr().err
    assert treering.main(["train", "fine_tune", f"--init-from={tmp_path / 'none'}"]) == 2
    assert "none does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        treering.main(["train", "fine_tune", "--help"])
    assert stop.value.code == 0 and "--model.context-length" in capsys.readouterr().out


def run_recipe(folder: Path, *options: str, **changes: str) -> int:
    return treering.main(["train", f"{tiny_run.recipe_file(folder, **changes)}:small", *options])


def refused(capsys, folder: Path, *options: str, **changes: str) -> str:
    """The one line that a command is refused with."""
    before = sorted(folder.rglob("*"))
    assert run_recipe(folder, *options, **changes) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("treering train: "), err
    made = {path for path in folder.rglob("*")} - set(before)
    assert not [path for path in made if path.is_relative_to(folder / "run")], "something was written"
    return err


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--learning-rate", "1"], "unknown option --learning-rate: did you mean --optimizer.learning-rate?"),
        (["--optimizer.learnig-rate", "1"], "did you mean --optimizer.learning-rate?"),
        (["--warmup_steps", "1"], "did you mean --optimizer.schedule.warmup-steps?"),
        (["--data.epochs", "3"], "unknown option --data.epochs"),
        (["--steps", "many"], ": --steps many: it must be a whole number\n"),
        (["--watch.profile", "1"], ": --watch.profile 1: it must be 2 values, each a whole number, or None\n"),
        (["--steps", "0"], ": --steps is 0: a run has at least 1"),
        (["--optimizer.kind", "lion"], "'adamw', 'sgd'"),
        (
            ["--data.window", "24", "--mesh.context", "8"],
            "no multiple of 16, which is twice --mesh.context 8: the nearest are 16 and 32",
        ),
        (["--data.window", "128"], ": --data.window 128 is beyond model.context_length 64"),
        (["--data.batch", "12", "--mesh.data", "8"], "batch 12: it must be a multiple of --mesh.data 8"),
        (["--step.accumulation", "3"], "batch 8: it must be a multiple of"),
        (["--mesh.tensor", "3"], "--mesh.tensor 3: it must divide the number of devices, 8"),
        (["--model.heads", "6", "--model.kv-heads", "4"], ": --model.kv-heads 4 does not divide heads 6"),
        (["--data.tokenizer", "nowhere"], "--data.tokenizer nowhere is no folder"),
        (["--data.tokenizer", "None"], "--data.tokenizer is not set"),
        (["--model.vocab", "100"], "--model.vocab 100: a tokenizer of bytes takes at least 258 tokens"),
        (["--data.sources.0.column", "words"], "has no column 'words': its columns are text"),
        (["--data.sources.0.path", "missing.jsonl"], "missing.jsonl does not exist"),
        (["--optimizer.schedule.warmup-steps", "30"], "--optimizer.schedule.warmup-steps 30 in a run of 20 steps"),
        (["--init-from", "nowhere"], "nowhere"),
        (["--folder", f"{__file__}/run"], f"{__file__}/run cannot be made: {__file__} is no folder that can be"),
        (["--data.cache", f"{__file__}/a/b"], f"{__file__}/a/b cannot be made: {__file__} is no folder"),
        (["--init-from", "a", "--resume-from", "b"], ": --init-from and --resume-from are both given"),
        (["--watch.profile", "0", "3"], "--watch.profile (0, 3): it is a first step, from 1 on, and a later one"),
        (["--watch.profile", "3", "21"], "--watch.profile (3, 21) ends beyond the run's 20 steps"),
        (["--data.sources.0.subset", "en"], "train.jsonl: only data sets on the hub have subsets"),
        (["--data.sources.0.unit", "line"], "train.jsonl: it goes with plain text; elsewhere documents are rows"),
        (["--watch.wandb", "project"], "--watch.wandb needs the package wandb"),
        (["--evaluate.buckets", "64", "0"], "they start with 0 and rise"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, capsys, nothing_compiles, options, says) -> None:
    for name in ("train", "test"):
        tiny_run.write_texts(tmp_path / f"{name}.jsonl")
    assert says in refused(capsys, tmp_path, *options)


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (b"", [], "has no rows"),
        (b'{"ids": [5]}\n{"ids": [6]}\n', ["--data.sources.0.column", "ids"], "train.jsonl holds nothing to train on"),
        (
            b'{"ids": [5]}\n{"ids": [6]}\n',
            ["--data.sources.0.column", "ids", "--data.streaming"],
            "train.jsonl holds nothing to train on",
        ),
        (b'{"text": ""}\n{"text": null}\n', [], "every row is empty"),
        (
            b'{"ids": [1, 300]}\n',
            ["--data.sources.0.column", "ids"],
            "TRAIN, line 1 has the token id 300, and the model's vocabulary has 300",
        ),
        (b'{"text": "good"}\n{"text": "b\xffd"}\n', [], "line 2 is no valid UTF-8 (byte 12 of the line)"),
        (
            b'{"text": "good"}\n\n{"text": \n{"text": "good"}\n',
            [],
            "train.jsonl, line 3 is no JSON (Expecting value at",
        ),
        (b'{"text": "good"}\n[1, 2]\n', [], "train.jsonl, line 2 holds '[1, 2]', which is no JSON object: repair or"),
        (b'{"text": "good"}\n{"text": 5}\n', [], "column 'text' of TRAIN, line 2 holds 5: it is neither text nor ids"),
        (
            b'{"text": "good", "parts": [[0, 2]]}\n{"text": "bad", "parts": [[0, 4]]}\n',
            ["--data.sources.0.trained", "parts"],
            "column 'parts' of TRAIN, line 2 holds the range [0, 4] for a text of 3 characters",
        ),
    ],
)
def test_wrong_data_is_one_line(tmp_path, capsys, nothing_compiles, content, options, says) -> None:
    tiny_run.write_texts(tmp_path / "test.jsonl")
    (tmp_path / "train.jsonl").write_bytes(content)
    assert says.replace("TRAIN", str(tmp_path / "train.jsonl")) in refused(capsys, tmp_path, *options)


def test_weights_and_folders_that_do_not_fit_are_one_line(tmp_path, capsys, nothing_compiles) -> None:
    from treering.configs.llama import TINY
    from treering.models.checkpoint.record import Record

    tiny_run.tiny_run(tmp_path)
    other = tmp_path / "other"
    (other / "weights").mkdir(parents=True)
    record = Record(config=TINY, dtype="float32", fingerprint="", source={})
    (other / "model.json").write_text(record.to_json())
    said = refused(capsys, tmp_path, "--init-from", str(other))
    assert "another architecture than this run's model" in said and "embed 64 instead of 32" in said

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("")
    assert "exists and holds no run" in refused(capsys, tmp_path)
    from treering.configs.run import flat

    (tmp_path / "run" / "config.json").write_text(json.dumps(flat(tiny_run.tiny_run(tmp_path))))
    said = refused(capsys, tmp_path, "--optimizer.learning-rate", "0.5", "--mesh.context", "2")
    assert "holds a run of another config: --optimizer.learning-rate is 0.003 there and 0.5 here. Choose" in said
    assert "type is OptimizerConfig" not in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tiny_from_scrach", "unknown recipe 'tiny_from_scrach': the recipes are"),
        ("nowhere.py:small", "nowhere.py is no file"),
        ("--steps", "the recipe comes first"),
    ],
)
def test_recipes_that_are_not_there_are_one_line(capsys, name, says) -> None:
    assert treering.main(["train", name]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_users_file_is_told_what_is_wrong_with_it(tmp_path, capsys) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def small():\n    return 5\n\ndef broken(:\n")
    assert treering.main(["train", f"{path}:small"]) == 2
    assert "cannot be imported: SyntaxError" in capsys.readouterr().err
    path.write_text("def small():\n    return 5\n")
    assert treering.main(["train", f"{path}:other"]) == 2
    assert "has no recipe 'other': it has small" in capsys.readouterr().err
    assert treering.main(["train", f"{path}:small"]) == 2
    assert "returns a int: a recipe returns a configs.run.RunConfig" in capsys.readouterr().err


def test_train_alone_lists_the_recipes_with_what_each_says(capsys) -> None:
    from treering.configs.recipes import RECIPES

    assert treering.main(["train"]) == 0
    out = capsys.readouterr().out
    for name, recipe in RECIPES.items():
        assert re.search(rf"^{name}$", out, re.MULTILINE) and f"treering train {name}" in (recipe.__doc__ or "")


def test_every_recipe_can_be_overridden_and_says_its_command() -> None:
    from treering.configs.cli import overrides_of, parse
    from treering.configs.recipes import RECIPES
    from treering.configs.run import RunConfig

    for name, recipe in RECIPES.items():
        takes_weights = bool(inspect.signature(recipe).parameters)
        config = recipe("weights", tiny_run.MODEL) if takes_weights else recipe()
        assert f"treering train {name}" in recipe.__doc__ and ("--init-from" in recipe.__doc__) == takes_weights
        assert parse(RunConfig, [], program=name, default=config) == config
        changed = parse(RunConfig, ["--steps", "7", "--model.rope.theta", "5e5"], program=name, default=config)
        assert changed.steps == 7 and changed.model.rope.theta == 5e5
        assert len(overrides_of(config)) > 50
