"""The command line: a user's mistake is one plain line, exit status 2, and nothing written."""

import math
import os
import shutil
import subprocess
import sys
from typing import Any, Literal

import pytest

import tiny
from treering.configs.cli import from_json
from treering.configs.errors import UserError, as_option, word


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("cli"))


def run(arguments, capsys):
    import treering

    status = treering.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize(
    "options,words",
    [
        (["--promt", "x"], "unknown option --promt: did you mean --prompt?"),
        (["--prompt", "x", "--mesh.contxt", "2"], "did you mean --mesh.context?"),
        (["--prompt", "x", "--mesh.context", "16"], "--mesh.context 16: it must be the number of devices, 8"),
        (["--prompt", "x", "--mesh.tensor", "4"], "--mesh.tensor 4: it must divide kv_heads 2"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * 4000], "the model's context holds 256"),
        (
            ["--prompt", "x", "--temperature", "-1"],
            ": --temperature -1.0: it must be from 0 (the most likely token) to",
        ),
        (["--prompt", "x", "--temperature", "hot"], ": --temperature hot: it must be a number"),
        (["--prompt", "x", "--max-new-tokens", "-1"], ": --max-new-tokens -1: it must be at least 0"),
        (["--prompt", "x", "--max_new_tokens=1e3"], ": --max-new-tokens 1e3: it must be a whole number (works: 1000)"),
        (["--prompt", "x", "--cpu-devices", "two"], ": --cpu-devices two: it must be a whole number, or None"),
        (["--prompt", "x", "--cpu-devices", "0"], ": --cpu-devices 0: it must be at least 1"),
        (["--prompt", "x", "--mesh.context"], ": --mesh.context without a value: it must be a whole number, or None"),
        (["--prompt", "x", "--layers", "folded"], ": --layers folded: it must be one of 'auto', 'stacked', 'unrolled'"),
        (["--prompt", "x", "--json", "yes"], ": --json yes: --json takes no value"),
        (["--prompt", "x", "--json=yes"], ": --json yes: --json takes no value"),
        ([], "give --prompt TEXT or --prompts FILE"),
        (["--prompts", "none.jsonl"], "--prompts requires --output"),
        (["--prompt", "x", "--logprobs", "2"], "--logprobs requires --json or --prompts"),
        (["--prompt", "x", "--rows", "2"], "--rows requires --prompts"),
        (["--prompt", "x", "--output", "a"], "--output requires --prompts"),
        (["--prompts", "a", "--output", "b", "--json"], "--json requires --prompt:"),
        (["--prompt", "x", "--top-k", "5"], "--top-k 5: it requires a temperature above 0"),
        (["--prompt", "x", "--seed", "5", "--temperature", "0"], "--seed 5: it requires a temperature above 0"),
        (["--prompt", "x", "extra"], ": unexpected argument extra: see treering generate --help"),
    ],
)
def test_generate_refuses_in_one_line(checkpoint, capsys, options, words):
    status, out, err = run(["generate", checkpoint, *options], capsys)
    last = err.splitlines()[-1]
    assert status == 2 and words in last and last.startswith("treering generate: ")
    assert out == "" and "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "option", "plain"),
    [
        (
            UserError("it must be at least 0", field="top_k", value=-1),
            "--top-k -1: it must be at least 0",
            "top_k -1: it must be at least 0",
        ),
        (
            UserError("it must divide 8", field="mesh.context", value=3, works=(1, 2)),
            "--mesh.context 3: it must divide 8 (works: 1, 2)",
            "mesh.context 3: it must divide 8 (works: 1, 2)",
        ),
        (UserError("give one", field="data.sources"), "--data.sources: give one", "data.sources: give one"),
        # What a file says keeps the file's words, whatever options there are.
        (UserError("it is cut", file="a/top_k.json"), "a/top_k.json: it is cut", "a/top_k.json: it is cut"),
        (
            UserError("it must be a number", field="top_k", value="x").at("p.jsonl", 3),
            'p.jsonl, line 3: "top_k" x: it must be a number',
            'p.jsonl, line 3: "top_k" x: it must be a number',
        ),
        (
            UserError("it must be at least 1", field="heads", value=0).at("config.json", rename=lambda _: "n_heads"),
            'config.json: "n_heads" 0: it must be at least 1',
            'config.json: "n_heads" 0: it must be at least 1',
        ),
    ],
)
def test_a_mistake_is_worded_for_where_it_is_read(error: UserError, option: str, plain: str) -> None:
    assert (word(error, as_option), str(error)) == (option, plain)


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [(3, 3)], [3.0, True, "3", None]),
        (int | None, [(3, 3), (None, None)], ["None", 1.5]),
        (float, [(3, 3.0), (0.5, 0.5)], [math.inf, math.nan, "1", True]),
        (bool, [(True, True)], [1, "true"]),
        (tuple[str, ...], [(["a", "b"], ("a", "b")), ([], ())], ["ab", ["a", 1]]),
        (Literal["a", "b"], [("a", "a")], ["c", 1]),
    ],
)
def test_json_values_have_the_types_of_fields(hint: Any, good: list[Any], bad: list[Any]) -> None:
    for value, right in good:
        found = from_json(value, hint)
        assert found == right and type(found) is type(right)
    for value in bad:
        with pytest.raises(UserError, match="it must be"):
            from_json(value, hint)


def test_the_version_is_one_line_that_names_what_it_runs_on(capsys):
    import platform

    import jax

    import treering

    status, out, _ = run(["--version"], capsys)
    assert status == 0
    assert out == f"treering {treering.__version__} (jax {jax.__version__}, Python {platform.python_version()})\n"


def test_paths_of_the_wrong_kind_say_which_command_is_meant(checkpoint, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    hf = checkpoint.parent / "hf"
    for arguments, words in (
        (["generate", tmp_path / "none", "--prompt", "x"], "does not exist"),
        (["generate", tmp_path / "empty", "--prompt", "x"], "empty"),
        (["convert", tmp_path / "none", tmp_path / "new"], "does not exist"),
        (["convert", tmp_path / "empty", tmp_path / "new"], "empty"),
        (["convert", checkpoint, tmp_path / "new"], "is a checkpoint already"),
        (["convert", hf, checkpoint], "exists"),
        (["convert", hf, hf / "config.json" / "new"], "hf/config.json/new cannot be created: "),
        (["export", checkpoint, hf / "config.json" / "a" / "b"], "hf/config.json/a/b cannot be created: "),
        (
            ["convert", hf, tmp_path / "new", "--ignore-fields", "hidden_act,color"],
            "--ignore-fields color, hidden_act: ",
        ),
        (["chat", checkpoint, "--logprobs", "2"], "unknown option --logprobs"),
        (["converrt", hf, checkpoint], "the commands are"),
    ):
        status, out, err = run(arguments, capsys)
        assert status == 2 and words in err and err.count("\n") == 1 and out == "", (arguments, err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_broken_weights_and_configs_are_refused_and_leave_nothing(checkpoint, tmp_path, capsys):
    import json

    hf = checkpoint.parent / "hf"

    def broken(name, change):
        folder = tmp_path / name
        shutil.copytree(hf, folder)
        change(folder)
        status, _, err = run(["convert", folder, tmp_path / "new"], capsys)
        assert status == 2 and "Traceback" not in err and not (tmp_path / "new").exists()
        return err.splitlines()[-1]

    def edit(**fields):
        def change(folder):
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, **fields}))

        return change

    def truncate(folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])

    def drop(folder):
        import safetensors.numpy

        weights = safetensors.numpy.load_file(folder / "model.safetensors")
        del weights["model.layers.1.self_attn.k_proj.weight"]
        safetensors.numpy.save_file(weights, folder / "model.safetensors")

    assert "model.safetensors" in broken("truncated", truncate)
    assert "model.layers.1.self_attn.k_proj.weight" in broken("missing", drop)
    assert "mamba" in broken("type", edit(model_type="mamba"))
    assert "gelu" in broken("act", edit(hidden_act="gelu"))
    assert "attention_sinks" in broken("unknown", edit(attention_sinks=4))


@pytest.mark.smoke
def test_stdin_max_tokens_and_json(checkpoint, capsys, monkeypatch):
    import io
    import json

    monkeypatch.setattr("sys.stdin", io.StringIO("The capital"))
    status, out, _ = run(["generate", checkpoint, "--prompt", "-", "--json", "--max-new-tokens", "3"], capsys)
    answer = json.loads(out.splitlines()[-1])
    assert status == 0 and len(answer["tokens"]) == 3 and answer["finish_reason"] == "length"
    status, out, _ = run(["generate", checkpoint, "--prompt", "x", "--json", "--max-new-tokens", "0"], capsys)
    answer = json.loads(out.splitlines()[-1])
    assert status == 0 and answer["tokens"] == [] and answer["finish_reason"] == "length" and answer["text"] == ""


def test_help_names_every_option(capsys):
    from treering.configs.cli import flags_of
    from treering.configs.infer import GenerateOptions

    with pytest.raises(SystemExit):
        run(["generate", "--help"], capsys)
    shown = capsys.readouterr().out
    for flag in flags_of(GenerateOptions):
        assert flag in shown
    assert run(["--help"], capsys)[0] == 0
    assert run([], capsys)[0] == 2


@pytest.mark.parametrize("buffered", ["", "1"])
def test_who_closes_the_pipe_is_told_nothing(buffered):
    """As `treering zoo | head -1` does; PYTHONUNBUFFERED decides whether a write or the last flush meets it."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "treering", "zoo"]
    with os.fdopen(write) as pipe:
        environment = os.environ | {"PYTHONUNBUFFERED": buffered}
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (141, "")


def test_compiled_programs_are_kept_where_the_user_says(tmp_path, monkeypatch):
    import treering

    name, kept = "JAX_COMPILATION_CACHE_DIR", tmp_path / "treering" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for said in ("", "elsewhere"):
        monkeypatch.setenv(name, said)
        treering.keep_compiled()
        assert os.environ[name] == said
    monkeypatch.delenv(name)
    treering.keep_compiled()
    assert os.environ[name] == str(kept) and not list(tmp_path.iterdir())
    monkeypatch.delenv(name)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    treering.keep_compiled()
    assert name not in os.environ
