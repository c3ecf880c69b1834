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
    assert "--init-from: fine_tune needs the weights that it starts from (works: CHECKPOINT," in capsys.readouterr().err
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
        (["--steps", "0"], ": --steps 0: it must be at least 1\n"),
        (["--optimizer.kind", "lion"], "'adamw', 'sgd'"),
        (
            ["--data.window", "24", "--mesh.context", "8"],
            ": --data.window 24: it must be a multiple of 16, twice mesh.context (works: 16, 32)\n",
        ),
        (["--data.window", "128"], ": --data.window 128: it must be at most model.context_length 64;"),
        (
            ["--data.batch", "12", "--mesh.data", "8"],
            ": --data.batch 12: it must be a multiple of mesh.data 8 x mesh.fsdp 1 x",
        ),
        (["--step.accumulation", "3"], ": --data.batch 8: it must be a multiple of"),
        (["--mesh.tensor", "3"], "--mesh.tensor 3: it must divide the number of devices, 8"),
        (["--model.heads", "6", "--model.kv-heads", "4"], ": --model.kv-heads 4: it must divide the 6 query heads,"),
        (["--data.tokenizer", "nowhere"], ": --data.tokenizer nowhere: it is not a folder (works: a folder with a"),
        (["--data.tokenizer", "None"], ": --data.tokenizer None: random weights have no tokenizer (works:"),
        (["--model.vocab", "100"], ": --model.vocab 100: it must be at least 258 for tokenizer bytes"),
        (
            ["--data.sources.0.column", "words"],
            ": --data.sources.0.column words: TRAIN has no such column (works: text)\n",
        ),
        (
            ["--data.sources.0.path", "missing.jsonl"],
            ": --data.sources.0.path missing.jsonl: it does not exist: give a file",
        ),
        (["--optimizer.schedule.warmup-steps", "30"], ": --optimizer.schedule.warmup-steps 30: it must be at most 20"),
        (["--init-from", "nowhere"], "nowhere"),
        (["--folder", f"{__file__}/run"], f"{__file__}/run cannot be created: {__file__} is not a folder that"),
        (["--data.cache", f"{__file__}/a/b"], f"{__file__}/a/b cannot be created: {__file__} is not a folder"),
        (["--init-from", "a", "--resume-from", "b"], ": --init-from a: it excludes resume_from"),
        (["--watch.profile", "0", "3"], ": --watch.profile 0 3: it must be a step from 1 on, and a later one"),
        (["--watch.profile", "3", "21"], ": --watch.profile 3 21: it must end within the run, at step 20"),
        (["--data.sources.0.subset", "en"], ": --data.sources.0.subset en: only data sets on the hub have subsets"),
        (
            ["--data.sources.0.unit", "line"],
            ": --data.sources.0.unit line: it needs plain text: elsewhere documents are",
        ),
        (["--watch.wandb", "project"], ": --watch.wandb project: it needs the package wandb: pip install wandb"),
        (["--evaluate.buckets", "64", "0"], ": --evaluate.buckets 64 0: they must start with 0 and ascend"),
        (["--data.sources.0.weight", "0"], ": --data.sources.0.weight 0.0: it must be a finite number above 0"),
        (
            ["--data.held-out.0.column", "words"],
            ": --data.held-out.0.column words: TEST has no such column (works: text)",
        ),
        (["--data.held-out.1.path", "none.jsonl"], ": --data.held-out.1.path none.jsonl: it does not exist"),
        (["--data.sources.1.weight", "2"], ": --data.sources.1.path: give the path of this source\n"),
        (
            ["--data.sources.3.path", "a"],
            ": --data.sources.3: the sources are numbered without a gap (works: --data.so",
        ),
        (["--data.held_out.1.pth", "a"], "unknown option --data.held_out.1.pth: did you mean --data.held-out.1.path?"),
        (["--data.held-out", "a"], ": --data.held-out is not an option: give the path of a source, such as"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, capsys, nothing_compiles, options, says) -> None:
    for name in ("train", "test"):
        tiny_run.write_texts(tmp_path / f"{name}.jsonl")
    for name in ("train", "test"):
        says = says.replace(name.upper(), str(tmp_path / f"{name}.jsonl"))
    assert says in refused(capsys, tmp_path, *options)


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (b"", [], "TRAIN: it has no rows in split train"),
        (b'{"ids": [5]}\n{"ids": [6]}\n', ["--data.sources.0.column", "ids"], "TRAIN: it has nothing to train on"),
        (
            b'{"ids": [5]}\n{"ids": [6]}\n',
            ["--data.sources.0.column", "ids", "--data.streaming"],
            "TRAIN: it has nothing to train on",
        ),
        (b'{"text": ""}\n{"text": null}\n', [], 'TRAIN: "text": every row is empty'),
        (
            b'{"ids": [1, 300]}\n',
            ["--data.sources.0.column", "ids"],
            'TRAIN, line 1: "ids" 300: it must be a token id of the model\'s vocabulary, 0 to 299',
        ),
        (b'{"text": "good"}\n{"text": "b\xffd"}\n', [], "TRAIN, line 2: it is not valid UTF-8 (byte 12 of the line)"),
        (
            b'{"text": "good"}\n\n{"text": \n{"text": "good"}\n',
            [],
            "TRAIN, line 3: it is not JSON (Expecting value at",
        ),
        (b'{"text": "good"}\n[1, 2]\n', [], "TRAIN, line 2: it must be a JSON object, and is '[1, 2]': repair"),
        (b'{"text": "good"}\n{"text": 5}\n', [], 'TRAIN, line 2: "text" 5: it must be text, or a list of token'),
        (
            b'{"text": "good", "parts": [[0, 2]]}\n{"text": "bad", "parts": [[0, 4]]}\n',
            ["--data.sources.0.trained", "parts"],
            'TRAIN, line 2: "parts" [0, 4]: it must be a range [first, end] within the text\'s 3 characters',
        ),
    ],
)
def test_wrong_data_is_one_line(tmp_path, capsys, nothing_compiles, content, options, says) -> None:
    tiny_run.write_texts(tmp_path / "test.jsonl")
    (tmp_path / "train.jsonl").write_bytes(content)
    assert says.replace("TRAIN", str(tmp_path / "train.jsonl")) in refused(capsys, tmp_path, *options)


def test_sources_are_added_on_the_command_line() -> None:
    from treering.configs.cli import parse
    from treering.configs.data import Source
    from treering.configs.recipes import fine_tune
    from treering.configs.run import RunConfig
    from treering.train.commands.train import with_further_sources

    recipe = fine_tune("weights", tiny_run.MODEL)
    assert with_further_sources(recipe, ["--data.sources.0.path", "a", "--steps", "7"]) == recipe
    options = [
        *("--data.sources.0.path", "a.jsonl", "--data.sources.1.path=b.jsonl", "--data.sources.1.weight", "2"),
        *("--data.held-out.1.path", "d.jsonl", "--data.held_out.0.path", "c.jsonl", "--data.held-out.1.unit", "line"),
    ]
    config = parse(RunConfig, options, program="train", default=with_further_sources(recipe, options))
    assert config.data.sources == (Source(path="a.jsonl"), Source(path="b.jsonl", weight=2.0))
    assert config.data.held_out == (Source(path="c.jsonl"), Source(path="d.jsonl", unit="line"))


def test_weights_and_folders_that_do_not_fit_are_one_line(tmp_path, capsys, nothing_compiles) -> None:
    from treering.configs.llama import TINY
    from treering.models.checkpoint.record import Record

    tiny_run.tiny_run(tmp_path)
    other = tmp_path / "other"
    (other / "weights").mkdir(parents=True)
    record = Record(config=TINY, dtype="float32", fingerprint="", source={})
    (other / "model.json").write_text(record.to_json())
    said = refused(capsys, tmp_path, "--init-from", str(other))
    assert f"--init-from {other}: its architecture is not that of this run's model" in said
    assert "embed 64 instead of 32" in said

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("")
    assert "/run: it exists and is not the folder of a run: choose another" in refused(capsys, tmp_path)
    from treering.configs.run import flat

    (tmp_path / "run" / "config.json").write_text(json.dumps(flat(tiny_run.tiny_run(tmp_path))))
    said = refused(capsys, tmp_path, "--optimizer.learning-rate", "0.5", "--mesh.context", "2")
    assert "/run: it holds a run with other settings: --optimizer.learning-rate was 0.003 and is 0.5. Choose" in said
    assert "type was" not in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tiny_from_scrach", "unknown recipe 'tiny_from_scrach': the recipes are"),
        ("nowhere.py:small", "nowhere.py is not a file"),
        ("--steps", "the recipe comes first"),
    ],
)
def test_recipes_that_are_not_there_are_one_line(capsys, name, says) -> None:
    assert treering.main(["train", name]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_users_file_is_named_with_what_is_wrong(tmp_path, capsys) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def small():\n    return 5\n\ndef broken(:\n")
    assert treering.main(["train", f"{path}:small"]) == 2
    assert "cannot be imported: SyntaxError" in capsys.readouterr().err
    path.write_text("def small():\n    return 5\n")
    assert treering.main(["train", f"{path}:other"]) == 2
    assert "has no recipe 'other': it has small" in capsys.readouterr().err
    assert treering.main(["train", f"{path}:small"]) == 2
    assert "returns a value of type int: a recipe returns a treering.configs.run.RunConfig" in capsys.readouterr().err


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
