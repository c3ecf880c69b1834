"""`treering verify`: right checkpoints pass, and wrong ones are told by the exit status."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import tiny
import treering
from treering.models.audit.verify import difference
from treering.models.conversion.convert import convert


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = tiny.LLAMA | {"vocab_size": 300}
    tiny.save_byte_level(tiny.write_folder(tmp_path / "hf", config))
    convert(tmp_path / "hf", tmp_path / "checkpoint")
    return tmp_path


def verify(folder: Path, capsys: pytest.CaptureFixture[str], *options: str, source: str = "hf") -> tuple[int, str]:
    capsys.readouterr()
    status = treering.main(["verify", str(folder / "checkpoint"), str(folder / source), *options])
    said = capsys.readouterr()
    return status, said.out if status < 2 else said.err.splitlines()[-1]


def test_a_checkpoint_agrees_with_its_source_and_with_no_other(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    status, said = verify(folder, capsys, "--bound", "1e-4", "--max-tokens", "60")
    assert status == 0 and said.startswith("60 tokens") and "100.0%: within the bound of 0.0001" in said
    # Theta alone differs: the first tokens hardly feel it, the whole text does.
    config = folder / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 5e5}))
    status, said = verify(folder, capsys, "--max-tokens", "60")
    assert status == 1 and "PAST the bound of 0.001" in said
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 1e4}))
    treering.main(["export", str(folder / "checkpoint"), str(folder / "back")])
    assert verify(folder, capsys, "--max-tokens", "60", source="back")[0] == 0


def test_a_gguf_is_a_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    tiny.write_gguf(
        folder / "model.gguf", tiny.LLAMA | {"vocab_size": 300}, metadata=tiny.gguf_tokenizer_metadata("gpt2")
    )
    status, said = verify(folder, capsys, "--max-tokens", "60", source="model.gguf")
    assert status == 0, said


def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for options, words in (
        (["--bound", "0"], "--bound 0.0: it must be above 0"),
        (["--max-tokens", "0"], "--max-tokens 0: it must be at least 1"),
        (["--mesh.tensor", "4"], "--mesh.tensor 4: it must divide kv_heads 2"),
    ):
        status, said = verify(folder, capsys, *options)
        assert status == 2 and words in said
    monkeypatch.setitem(sys.modules, "torch", None)
    status, said = verify(folder, capsys)
    assert status == 2 and "needs PyTorch: pip install 'treering[torch]'" in said


def test_the_numbers() -> None:
    theirs = np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]])
    found = difference(theirs + np.array([[0.0, 0.0, 0.5], [0.0, 0.0, 0.0]]), theirs)
    p = np.exp(theirs[0]) / np.exp(theirs[0]).sum()
    q = np.exp(theirs[0] + [0, 0, 0.5]) / np.exp(theirs[0] + [0, 0, 0.5]).sum()
    assert found.largest == pytest.approx(0.5) and found.mean == pytest.approx(0.5 / 6)
    assert found.divergence == pytest.approx((p * np.log(p / q)).sum() / 2)
    assert found.same_choice == 1 and found.scale == 5 and found.within(0.5) and not found.within(0.4)
    assert not difference(np.full((1, 3), np.nan), theirs[:1]).within(1e9)
    shifted = difference(theirs + 100, theirs)
    assert shifted.divergence == pytest.approx(0, abs=1e-12) and not shifted.within(1.0)
