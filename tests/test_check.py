"""`treering check`: what it finds wrong with a user's entry, and what it says where it cannot look."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import pytest

import treering
from treering.configs.llama import LLAMA_3_1_405B, TINY, LlamaConfig
from treering.configs.zoo import ZOO
from treering.models.audit import check as checks
from treering.models.audit.check import Finding, check, tiny
from treering.models.audit.entry import find_entry
from treering.models.families import llama, register_family, registry


@dataclass(frozen=True, kw_only=True)
class MineConfig(LlamaConfig):
    family: ClassVar[str] = "mine"
    powers: tuple[int, ...] = (1,)


def mine(**changes: Any) -> MineConfig:
    return MineConfig(**{field: getattr(TINY, field) for field in vars(TINY)}, **changes)


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families that are forgotten after the test."""
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))


def register(**changes: Any) -> None:
    known = {
        "name": "mine",
        "config_class": MineConfig,
        "model_types": ("mine",),
        "to_hf": lambda config: {**llama.to_hf(config), "model_type": "mine"},
        "from_hf": lambda fields: MineConfig(**vars(llama.from_hf(fields))),
    }
    register_family(replace(llama.FAMILY, **{**known, **changes}))


def found(config: Any, name: str) -> Finding:
    for finding in check(config):
        if finding.check == name:
            return finding
        assert finding.verdict == "ok", finding
    raise AssertionError(f"no finding of {name}")


@pytest.fixture
def only_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks that compile."""
    for name in ("_decoding", "_transformers"):
        monkeypatch.setattr(checks, name, lambda config: "not run")


def test_a_family_that_is_not_there(only_files: None) -> None:
    finding = found(mine(), "family")
    assert finding.verdict == "FAILED" and "says family 'mine', which is not registered" in finding.message
    assert len(list(check(mine()))) == 1


def test_names_that_miss_a_parameter(families: None, only_files: None) -> None:
    def names(config: Any) -> Mapping[str, str]:
        table = dict(llama.names(config))
        table["blocks.places.0.mlp.gates.weight"] = table.pop("blocks.places.0.mlp.gate.weight")
        return table

    register(names=names)
    told = found(mine(), "names").message
    assert "no name for blocks.places.0.mlp.gate.weight" in told
    assert "names for parameters that do not exist: blocks.places.0.mlp.gates.weight" in told


def test_configs_that_do_not_come_back(families: None, only_files: None) -> None:
    register()
    lost = found(mine(powers=(2,)), "config.json")
    assert (lost.verdict, lost.message) == ("FAILED", "read back it has powers (1,) instead of (2,)")
    findings = {finding.check: finding for finding in check(mine())}
    assert findings["config.json"].verdict == "ok"
    assert findings["model.json"].verdict == "FAILED" and "powers [1] instead of (1,)" in findings["model.json"].message


def test_an_array_without_dims(families: None, only_files: None) -> None:
    class Bare(eqx.Module):
        weight: Any

        def __call__(self, x):
            return x * self.weight

    def init(config: Any, key: Any) -> Any:
        return eqx.tree_at(lambda model: model.norm, llama.init(config, key), Bare(jnp.ones(config.embed)))

    register(init=init)
    findings = {finding.check: finding for finding in check(mine())}
    assert (
        findings["shardings"].verdict == "FAILED" and ".norm.weight declares no dims" in findings["shardings"].message
    )


@pytest.mark.long
def test_logits_that_decoding_does_not_repeat(families: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that looks at its place in the chunk, not at its position."""

    class Counting(eqx.Module):
        norm: Any

        def __call__(self, x):
            return self.norm(x) * (1 + jnp.arange(x.shape[1], dtype=x.dtype))[None, :, None]

    def init(config: Any, key: Any) -> Any:
        return eqx.tree_at(lambda model: model.norm, llama.init(config, key), replace_fn=Counting)

    register(init=init)
    with pytest.raises(ValueError, match="one by one and all at once give logits that differ by"):
        checks._decoding(mine())


def test_without_torch_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def no_torch(name: str, package: str | None = None) -> Any:
        if name == "torch":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", no_torch)
    with pytest.raises(checks.Skipped, match=r"pip install 'treering\[torch\]'"):
        checks._transformers(TINY)


def test_what_transformers_computes_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    real = llama.FAMILY.to_hf
    wrong = replace(llama.FAMILY, to_hf=lambda config: {**real(config), "rms_norm_eps": 0.3})
    monkeypatch.setitem(registry._FAMILIES, "llama", wrong)
    monkeypatch.setattr(checks, "open_model", lambda folder: _with_eps(folder))
    with pytest.raises(ValueError, match="ours and transformers' give logits that differ by"):
        checks._transformers(TINY)


def _with_eps(folder: str) -> Any:
    from treering.models.conversion.load import open_model

    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-5}))
    return open_model(folder)


def test_tiny_keeps_the_proportions() -> None:
    small = tiny(LLAMA_3_1_405B)
    assert (small.heads, small.kv_heads, small.layers, small.rope.original_context) == (8, 2, 2, 32)
    assert tiny(ZOO["gemma-3-1b"]).layers == 8 and tiny(ZOO["gemma-3-270m"]).layers == 12
    assert tiny(ZOO["mistral-7b-v0.1"]).window == 7 and tiny(ZOO["mistral-7b-v0.2"]).window is None
    assert tiny(TINY) == TINY
    for name in ("smollm2-135m", "llama-3.2-3b", "qwen2-0.5b", "gemma-3-270m"):
        config = ZOO[name]
        small = tiny(config)
        assert small.embed % small.heads == 0 and type(small) is type(config)


def test_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        find_entry("treering.configs.llama:TINY")
        == TINY
        == find_entry(_file(tmp_path, "from treering.configs.llama import TINY"))
    )
    assert find_entry("llama-3.1-405b") == LLAMA_3_1_405B
    (tmp_path / "config.json").write_text(json.dumps(llama.to_hf(TINY)))
    assert find_entry(str(tmp_path)) == find_entry(str(tmp_path / "config.json")) == TINY


def _file(folder: Path, text: str) -> str:
    (folder / "entry_of_mine.py").write_text(text)
    return f"{folder / 'entry_of_mine.py'}:TINY"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            "llama-9",
            "llama-9 is not a size of the zoo: give one, MODULE:CONFIG, path/to/file.py:CONFIG, or a",
        ),
        ("none.py:TINY", "none.py is not a file"),
        ("treering.configs.llama:TINIER", "treering.configs.llama:TINIER cannot be imported"),
        ("treering.configs.nowhere:TINY", "treering.configs.nowhere:TINY cannot be imported"),
        ("here:BIG", "here:BIG cannot be imported: No module named 'here' (did you mean here.py:BIG?)"),
        ("configs.llama:TINY", "(did you mean treering.configs.llama:TINY?)"),
        ("treering.configs.llama:LlamaConfig", "is a type: a config is an instance of a ModelConfig"),
        ("here.py:TINY", "here.py has no config 'TINY': it has BIG"),
        ("none.json", "none.json does not exist"),
        (
            "unknown.json",
            'unknown.json: "model_type" mamba: it is not supported, and --plugin FILE adds a family (works: gemma3',
        ),
    ],
)
def test_entries_that_are_none_are_one_line(tmp_path, monkeypatch, capsys, entry: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.py").write_text("BIG = 1")
    Path("unknown.json").write_text('{"model_type": "mamba"}')
    assert treering.main(["check", entry]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_the_command_ends_with_one_where_something_fails(monkeypatch, capsys, only_files: None) -> None:
    assert treering.main(["check", "treering.configs.llama:TINY"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["family", "ok", "llama,"]
    monkeypatch.setattr(checks, "_shardings", lambda config: str(int("one")))
    assert treering.main(["check", "treering.configs.llama:TINY"]) == 1
    assert "shardings     FAILED   invalid literal for int()" in capsys.readouterr().out
