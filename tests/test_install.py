"""The one name that is installed: from a wheel and from the repository, in a folder full of names that clash."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLASHES = ("layers.py", "models/__init__.py", "models/formats.py", "train.py", "configs/run.py", "infer.py")
PROGRAM = """
import layers, models, train, infer  # the user's own
import treering
from treering import Mask, ring_attention
from treering.layers import tree_attention
from treering.train.run.loop import train as run
assert layers.__file__ == {here!r} + "/layers.py" and treering.layers.__file__ != layers.__file__
print(treering.__file__)
"""


@pytest.fixture
def clashing(tmp_path: Path) -> Path:
    for name in CLASHES:
        file = tmp_path / "here" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    (tmp_path / "here" / "program.py").write_text(PROGRAM.format(here=str(tmp_path / "here")))
    return tmp_path / "here"


def use(folder: Path, packages: list[Path], *options: str) -> list[str]:
    """What a script, a notebook's kernel (whose path begins with its working directory) and the command print."""
    paths = os.pathsep.join(map(str, packages))
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    printed = []
    for arguments in (
        ["program.py"],
        ["-c", (folder / "program.py").read_text()],
        ["-m", "treering", "zoo"],
    ):
        command = [sys.executable, *options, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    return printed


@pytest.mark.smoke
def test_from_the_repository(clashing: Path) -> None:
    script, kernel, command = use(clashing, [])
    assert script == kernel == f"{ROOT / 'src' / 'treering' / '__init__.py'}\n"
    assert command.startswith("name ")


@pytest.mark.long
def test_from_a_wheel(clashing: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    copy = tmp_path / "copy"  # pip leaves folders where it builds
    for name in ("configs", "layers", "models", "infer", "train", "src"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    done = subprocess.run([*build, str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("treering-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {"treering"}
    assert not any(path.is_symlink() for path in (tmp_path / "site").rglob("*"))
    # Without `site` the .pth file of the editable install is not read.
    packages = [tmp_path / "site", Path(sysconfig.get_paths()["purelib"])]
    script, kernel, command = use(clashing, packages, "-S")
    assert script == kernel == f"{tmp_path / 'site' / 'treering' / '__init__.py'}\n"
    assert command.startswith("name ")
