"""Folders of Meta's: any number of files gives the checkpoint that Hugging Face's folder gives, bit for bit."""

import base64
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

import tiny
import treering
from treering.configs.rope import Llama3Rope
from treering.models.checkpoint.arrays import DTYPES
from treering.models.checkpoint.record import read_record
from treering.models.conversion.convert import convert
from treering.models.conversion.load import open_model
from treering.models.tokenizer import Tokenizer

torch = pytest.importorskip("torch")

CONFIG = tiny.LLAMA | {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}
TIED = CONFIG | {"tie_word_embeddings": True}


def weights(config: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    return {name: array.astype(DTYPES[dtype]) for name, array in tiny.tensors(config).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_any_number_of_files_gives_the_same_checkpoint(tmp_path: Path, config: dict[str, Any], dtype: str) -> None:
    source = weights(config, dtype)
    convert(tiny.write_folder(tmp_path / "hf", config, source), tmp_path / "right")
    right = read_record(tmp_path / "right")
    for files in (1, 2, 4) if dtype == "bfloat16" else (2,):
        for rows in (True, False):
            folder = tmp_path / f"{files}-{rows}"
            tiny.write_meta(folder, config, source, files=files, embedding_rows=rows, rope_theta=500000.0)
            convert(folder, folder / "checkpoint")
            found = read_record(folder / "checkpoint")
            assert (found.fingerprint, found.dtype, found.config) == (right.fingerprint, dtype, right.config)
            assert found.source["kind"] == "meta"


def test_a_copy_of_the_embedding_is_tied_and_another_matrix_is_not(tmp_path: Path) -> None:
    source = weights(TIED, "bfloat16")
    convert(tiny.write_folder(tmp_path / "hf", TIED, source), tmp_path / "right")
    source["lm_head.weight"] = source["model.embed_tokens.weight"].copy()
    tiny.write_meta(tmp_path / "meta", TIED, source, files=2, embedding_rows=False, rope_theta=500000.0)
    convert(tmp_path / "meta", tmp_path / "checkpoint")
    assert read_record(tmp_path / "checkpoint").fingerprint == read_record(tmp_path / "right").fingerprint
    source["lm_head.weight"][0, 0] += 1
    tiny.write_meta(tmp_path / "meta", TIED, source, files=2, embedding_rows=False)
    assert not open_model(tmp_path / "meta").config.tie_embeddings


def test_it_runs_without_converting(tmp_path: Path, mesh: Any) -> None:
    from treering.layers.parallel.sharding import Plan
    from treering.models.audit.score import text_logits

    plan, ids = Plan(mesh(), "decode"), list(range(20))
    right = open_model(tiny.write_folder(tmp_path / "hf", CONFIG)).load(plan, None)
    mine = open_model(tiny.write_meta(tmp_path / "meta", CONFIG, files=4, rope_theta=500000.0)).load(plan, None)
    assert np.array_equal(text_logits(mine, plan, ids), text_logits(right, plan, ids))


def config_of(folder: Path, config: dict[str, Any] = CONFIG, **params: Any) -> Any:
    return open_model(tiny.write_meta(folder, config, **params)).config


def test_params_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaled = {"rope_theta": 500000.0, "use_scaled_rope": True}
    rope = Llama3Rope(theta=5e5, factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192)
    assert config_of(tmp_path, **scaled).rope == rope
    assert config_of(tmp_path, TIED, **scaled).rope.factor == 32.0
    assert config_of(tmp_path, rope_scaling_factor=16, **scaled).rope.factor == 16.0
    assert config_of(tmp_path).rope.theta == 10000.0
    assert config_of(tmp_path, tiny.LLAMA | {"num_key_value_heads": 8}, n_kv_heads=None).kv_heads == 8
    assert capsys.readouterr().err == ""
    for said, context in ((scaled, 131072), ({"rope_theta": 1e6}, 16384), ({}, 4096), ({"norm_eps": 1e-6}, 2048)):
        assert config_of(tmp_path, max_seq_len=None, **said).context_length == context
        assert f"{context} are assumed" in capsys.readouterr().err


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that a conversion is refused with."""
    capsys.readouterr()
    assert treering.main(["convert", str(folder), str(folder.parent / "new"), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and not list(folder.parent.glob("new*")), err
    return err


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "meta"
    tiny.write_meta(folder, files=4)
    first, second = (folder / f"consolidated.{number:02}.pth" for number in (0, 1))

    kept = second.read_bytes()
    second.unlink()
    assert "lacks consolidated.01.pth" in refused(folder, capsys)
    second.write_bytes(kept[: len(kept) // 2])
    assert "consolidated.01.pth cannot be read as tensors, or is damaged or truncated" in refused(folder, capsys)
    second.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0")
    assert "Git LFS pointer" in refused(folder, capsys)
    second.write_bytes(kept)
    (folder / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0")
    assert "tokenizer.model is a Git LFS pointer" in refused(folder, capsys)
    (folder / "tokenizer.model").unlink()

    class Evil:
        def __reduce__(self):
            return print, ("this must not run",)

    torch.save({"x": Evil()}, second)
    assert "cannot be read as tensors" in refused(folder, capsys)
    torch.save([1], second)
    assert "holds something other than named tensors" in refused(folder, capsys)

    second.write_bytes(kept)
    part = torch.load(second, weights_only=True)
    torch.save({name: tensor for name, tensor in part.items() if name != "layers.1.attention.wk.weight"}, second)
    told = refused(folder, capsys)
    assert "layers.1.attention.wk.weight is not in consolidated.01.pth" in told
    torch.save(part | {"layers.0.attention_norm.weight": torch.zeros(64)}, second)
    assert "layers.0.attention_norm.weight does not fit together" in refused(folder, capsys)
    torch.save(part | {"layers.0.attention.wo.weight": torch.zeros(63, 16)}, second)
    assert "layers.0.attention.wo.weight does not fit together" in refused(folder, capsys)
    torch.save(part | {"layers.0.attention.wo.weight": torch.zeros(64, 16, dtype=torch.int8)}, second)
    assert "torch.int8: the supported dtypes are" in refused(folder, capsys)
    torch.save(part | {"extra": torch.zeros(4, 4, 4), "more": torch.zeros(2, 2)}, second)
    assert "extra is not in" in refused(folder, capsys)
    torch.save({1: torch.zeros(2)}, second)
    assert "holds something other than named tensors" in refused(folder, capsys)
    for path in sorted(folder.glob("*.pth")):
        path.unlink()
    assert "no consolidated.*.pth" in refused(folder, capsys)
    assert first.parent.is_dir()

    tiny.write_meta(folder, vocab_size=95)
    assert '"vocab_size" 95: the embedding has 96 rows' in refused(folder, capsys)
    tiny.write_meta(folder, n_layers=3)
    assert "layers.2.attention.wq.weight" in refused(folder, capsys)
    tiny.write_meta(folder, n_kv_heads=4)
    assert "layers.0.attention.wk.weight has shape (16, 64) instead of" in refused(folder, capsys)
    tiny.write_meta(folder, moe={"num_experts": 8})
    assert "fields that are not known here and may change the arithmetic: moe" in refused(folder, capsys)
    for extra, words in (
        (torch.zeros(2, 2), "unexpected: extra"),
        (torch.zeros(2, 2, 2), "extra does not fit together"),
    ):
        tiny.write_meta(folder)
        torch.save(torch.load(first, weights_only=True) | {"extra": extra}, first)
        assert words in refused(folder, capsys)
    tiny.write_meta(folder, dim=None)
    assert 'params.json: "dim": it is missing' in refused(folder, capsys)


def test_without_torch_it_is_one_line(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real = tiny.write_meta(tmp_path / "meta"), importlib.import_module

    def no_torch(name: str, package: str | None = None) -> Any:
        if name == "torch":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", no_torch)
    assert "pip install 'treering[torch]'" in refused(folder, capsys)


def test_the_tokenizer_of_llama_2_may_stand_above(tmp_path: Path) -> None:
    config = CONFIG | {"vocab_size": 400}
    tiny.write_meta(tmp_path / "llama" / "7b", config)
    (tmp_path / "llama" / "tokenizer.model").write_bytes(tiny.sentencepiece_model())
    convert(tmp_path / "llama" / "7b", tmp_path / "checkpoint")
    mine = Tokenizer.load(tmp_path / "checkpoint")
    right = sentencepiece.SentencePieceProcessor(model_proto=tiny.sentencepiece_model())
    for text in (*tiny.CORPUS, " two  spaces", "x"):
        assert mine.encode(text) == [right.bos_id(), *right.encode(text)], text
        assert mine.decode(mine.encode(text)) == text
    assert mine.end_ids == {right.eos_id()}


def byte_letters() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def test_the_tokenizer_of_llama_3(tmp_path: Path) -> None:
    """Against the algorithm of tiktoken, written down plainly: of all neighbours, join the pair of the lowest rank."""
    regex = pytest.importorskip("regex")
    vocabulary = tiny.byte_level_tokenizer().get_vocab()
    letters = byte_letters()
    tokens = sorted((token for token in vocabulary if not token.startswith("<|")), key=lambda token: vocabulary[token])
    pieces = [bytes(letters[letter] for letter in token) for token in tokens]
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    folder = tiny.write_meta(tmp_path / "meta", CONFIG | {"vocab_size": len(ranks) + 256}, use_scaled_rope=True)
    lines = [base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks.items()]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    convert(folder, tmp_path / "checkpoint")
    mine = Tokenizer.load(tmp_path / "checkpoint")

    def joined(word: bytes) -> list[int]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while True:
            pairs = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
            if not pairs or min(pairs)[0] == len(ranks):
                return [ranks[part] for part in parts]
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    base = len(ranks)
    for text in (*tiny.CORPUS, "I'll DON'T 1234567 \n\n  x"):
        words = [word.encode() for word in regex.findall(split, text)]
        assert mine.encode(text) == [base, *(token for word in words for token in joined(word))], text
        assert mine.decode(mine.encode(text)) == text
    assert mine.encode("<|eot_id|><|python_tag|>") == [base, base + 9, base + 10]
    assert mine.end_ids == {base + 1, base + 8, base + 9} and mine.vocab_size == base + 256

    (folder / "tokenizer.model").write_bytes(b"".join(lines[:3] + lines[4:]))
    assert treering.main(["convert", str(folder), str(tmp_path / "other")]) == 2
    (folder / "tokenizer.model").write_bytes(b"neither")
    assert treering.main(["convert", str(folder), str(tmp_path / "other")]) == 2
    assert json.loads((tmp_path / "checkpoint" / "tokenizer" / "config.json").read_text())["bos_token_id"] == base
