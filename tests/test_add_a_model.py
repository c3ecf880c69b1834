"""docs/add-a-model.md, followed to the letter: its files are written as it shows them, its commands run in order."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import treering
from treering.models.families import registry

PAGE = Path(__file__).parents[1] / "docs" / "add-a-model.md"
STEP = re.compile(r"(?:^`(?P<file>[\w./-]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, a home of its own, and families that are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))


def steps(page: str) -> Iterator[tuple[str, str, str]]:
    """The fenced blocks of a page: the file that the line above names (or none), the kind, and the text."""
    for found in STEP.finditer(page):
        yield found["file"] or "", found["kind"], found["text"]


def write_files(page: str) -> list[str]:
    """Writes the page's files and returns its commands."""
    commands = []
    for file, kind, text in steps(page):
        assert bool(file) == (kind != "sh"), f"a block of {kind} without the name of its file"
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(text)
        else:
            commands += text.splitlines()
    return commands


def follow(command: str) -> int:
    program, *arguments = shlex.split(command)
    assert program == "treering"
    return treering.main(arguments)


@pytest.mark.long
def test_every_step_works_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    commands = write_files(PAGE.read_text())
    said = {}
    for command in commands:
        status = follow(command)
        said[command], err = capsys.readouterr()
        assert status == 0, (command, err)
        assert "model of type" not in err, "transformers warns of an architecture that it is not asked to compute"
    checks = [out for command, out in said.items() if command.startswith("treering check")]
    assert len(checks) == 3 and not any("FAILED" in out for out in checks)
    assert [bool(re.search(r"^transformers +ok ", out, re.MULTILINE)) for out in checks] == [True, True, False]
    assert "transformers does not know model_type 'twig'" in checks[2]
    assert any(re.search(r"^twig-tiny +155,840 ", out, re.MULTILINE) for out in said.values())
    assert Path("twig/model.safetensors").is_file() and Path("twig.ckpt/model.json").is_file()


def test_the_plugin_of_the_page_is_known_to_zoo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the default tier has of it; here the zoo has nothing else, which takes its time."""
    write_files(PAGE.read_text())
    monkeypatch.setattr(registry, "ZOO", {})
    assert "twig-tiny" not in registry.named_sizes()
    for command in ("treering zoo --plugin my_family.py", "treering zoo --plugin=my_family.py"):  # once and again
        assert follow(command) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["name", "twig-tiny"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "mine.py is not a file"),
        ("import nothing_of_that_name", "cannot be imported: ModuleNotFoundError"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        ("x = 1", "registers no family: a plugin calls treering.models.families.register_family"),
        (
            "from treering.models.families import llama, register_family\nregister_family(llama.FAMILY)",
            "family 'llama' is registered already: choose another name",
        ),
        (
            "from dataclasses import replace\nfrom treering.models.families import llama, register_family\n"
            "class Config(llama.LlamaConfig):\n    family = 'mine'\n"
            "register_family(replace(llama.FAMILY, name='mine', config_class=Config))",
            "model_type llama is that of the family 'llama'",
        ),
    ],
)
def test_a_plugin_that_is_none_is_one_line(capsys, text: str | None, says: str) -> None:
    if text is not None:
        Path("mine.py").write_text(text)
    for command in ("convert --plugin mine.py a b", "train tiny_from_scratch --plugin mine.py"):
        assert treering.main(command.split()) == 2
        out, err = capsys.readouterr()
        assert says in err and err.count("\n") == 1 and out == "", err
        if text == "x = 1":
            break  # imported once, it is not looked at again
    assert sorted(path.name for path in Path().iterdir()) in ([], ["mine.py"], ["__pycache__", "mine.py"])


def test_a_plugin_flag_without_a_file_is_one_line(capsys) -> None:
    for command in ("zoo --plugin", "zoo --plugin --help", "plot --plugin mine.py"):
        assert treering.main(command.split()) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "--plugin" in err


def test_help_tells_of_plugins(capsys) -> None:
    with pytest.raises(SystemExit):
        treering.main(["convert", "--help"])
    assert "--plugin FILE.py" in capsys.readouterr().out
    assert treering.main(["--help"]) == 0
    assert "--plugin FILE.py" in capsys.readouterr().out
