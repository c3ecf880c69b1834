"""Rules about the repository itself. Import directions are checked by import-linter in `make check`."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "layers", "models", "infer", "train")
FOLDERS = (*PACKAGES, "src", "bench", "docs", "tests", ".ci")
TEXT = {"", ".cfg", ".json", ".jsonl", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}

pytestmark = pytest.mark.smoke


def files() -> list[Path]:
    """The repository's own text files: those in its folders, and those that lie at its root."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        # Links, such as those of src/treering, are not followed.
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in found if path.suffix in TEXT and "__pycache__" not in path.parts)


def modules() -> list[Path]:
    return [path for path in files() if path.suffix == ".py"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def dotted(path: Path) -> str:
    """The name under which a file of the product is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else ("treering", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)


IMPORT_ALL = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
try:
    from jax._src.xla_bridge import backends_are_initialized
except ImportError:
    print("cannot tell")
else:
    print("backend" if backends_are_initialized() else "no backend")
"""


def test_importing_every_module_starts_no_backend() -> None:
    every = [dotted(path) for path in modules() if path.relative_to(ROOT).parts[0] in (*PACKAGES, "src")]
    every.remove("treering.__main__")
    assert {"treering", *(f"treering.{package}" for package in PACKAGES)} <= set(every)
    done = run(sys.executable, "-c", IMPORT_ALL, *every)
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("\n")[-2]
    if said == "cannot tell":
        pytest.skip("this JAX does not say whether a backend has started")
    assert said == "no backend"


def test_configs_import_without_jax() -> None:
    every = [dotted(path) for path in modules() if path.relative_to(ROOT).parts[0] == "configs"]
    program = "import importlib, sys; [importlib.import_module(m) for m in sys.argv[1:]]; print('jax' in sys.modules)"
    done = run(sys.executable, "-c", program, *every)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]


def test_annotations_are_evaluated() -> None:
    """`from __future__ import annotations` would turn annotations into strings and switch shape checks off."""
    assert [name(path) for path in modules() if "__future__.annotations" in imports(path)] == []


def test_no_module_is_named_after_one_of_the_standard_library() -> None:
    taken = {path for path in modules() if path.stem in sys.stdlib_module_names}
    taken |= {path.parent for path in modules() if path.parent.name in sys.stdlib_module_names}
    assert sorted(map(name, taken)) == []


def test_private_jax_imports_stand_in_one_module() -> None:
    product = [path for path in modules() if path.relative_to(ROOT).parts[0] in PACKAGES]
    private = [path for path in product if any(module.startswith("jax._src") for module in imports(path))]
    assert len(private) <= 1, [name(path) for path in private]


def code_in(text: str) -> str:
    """The code blocks and code spans of a page in markdown."""
    return "\n".join(part for pair in re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", text, re.DOTALL) for part in pair)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_make_targets_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code_in((ROOT / page).read_text())))
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named, "the page names no target: has its form changed?"
    assert named <= targets


def test_the_commands_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"\btreering ([a-z]+)\b", code_in((ROOT / "README.md").read_text())))
    assert {"convert", "generate"} <= named
    program = shutil.which("treering", path=str(Path(sys.executable).parent))
    assert program, "the package is not installed here: pip install -e ."
    overview = run(program, "--help")
    assert overview.returncode == 0, overview.stderr
    assert named <= set(re.findall(r"[a-z]+", overview.stdout + overview.stderr))
    for command in sorted(named):
        done = run(program, command, "--help")
        assert done.returncode == 0, (command, done.stderr)


def test_the_paths_in_the_readme_exist() -> None:
    named = set(re.findall(r"`([\w./-]+/[\w.-]*|[\w-]+\.(?:py|md|txt|toml))`", (ROOT / "README.md").read_text()))
    missing = [path for path in named if not path.startswith(".cache") and not (ROOT / path).exists()]
    assert named
    assert missing == []


# Written so that they do not match themselves.
HOSTS = r"(?:pypi|pythonhosted|npmjs|yarnpkg|debian|ubuntu|anaconda|crates|download\.pytorch)\.(?:org|com|io)\b"
PATHS = r"(?<![\w./~$}>-])/(?:" + "|".join(["work", "root", "home", "Users", "opt", "mnt", "srv", "tmp"]) + r")/\w"


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    found = [
        f"{name(path)}:{number}: {line.strip()[:120]}"
        for path in files()
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if re.search(HOSTS, line) or re.search(PATHS, line)
    ]
    assert found == []


def test_the_installed_packages_are_those_of_this_repository(tmp_path: Path) -> None:
    """Seen from another folder: what the console script imports."""
    names = ["treering", *(f"treering.{package}" for package in PACKAGES)]
    program = f"import {', '.join(names)}; print(*(m.__file__ for m in ({', '.join(names)})))"
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(ROOT / "src" / name.replace(".", "/") / "__init__.py") for name in names]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_not_imported_twice(package: str) -> None:
    """With the repository's root on the path its folders have names of their own: a second copy of every class."""
    done = run(sys.executable, "-c", f"import {package}")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"ImportError: import treering.{package},")
