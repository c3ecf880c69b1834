"""Export: what comes out is what came in, bit for bit, and transformers loads it as it loads its own."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import tiny
import treering
from treering.models.checkpoint.arrays import DTYPES
from treering.models.conversion.convert import convert
from treering.models.conversion.export import export
from treering.models.conversion.load import open_model
from treering.models.formats.safetensors_writer import SafetensorsWriter

TIED = tiny.LLAMA | {"tie_word_embeddings": True}
NAMES = sorted(tiny.tensors())
SHARDS = [NAMES[0::3], NAMES[1::3], NAMES[2::3]]
ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def there_and_back(tmp_path: Path, source: Path, **options: Any) -> Path:
    before = {path.name for path in tmp_path.iterdir()}
    convert(source, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "back", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"back", "checkpoint"} | before
    return tmp_path / "back"


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
        held = safetensors.numpy.load_file(file)
        assert not held.keys() & found.keys()
        found |= held
    return found


def assert_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (array.dtype, array.shape), name
        assert ours[name].tobytes() == array.tobytes(), name


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("config", [tiny.LLAMA, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("shard_bytes", [10**9, 40_000], ids=["one", "shards"])
def test_weights_come_back_bit_for_bit(tmp_path: Path, config: dict[str, Any], dtype: str, shard_bytes: int) -> None:
    weights = {name: array.astype(DTYPES[dtype]) for name, array in tiny.tensors(config).items()}
    shards = SHARDS if shard_bytes < 10**9 and config is tiny.LLAMA else None
    source = tiny.write_folder(tmp_path / "source", config, weights, shards=shards)
    folder = there_and_back(tmp_path, source, shard_bytes=shard_bytes)
    assert_equal(weights_of(folder), weights)
    files = sorted(folder.glob("*.safetensors"))
    largest = max(array.nbytes for array in weights.values())
    assert all(file.stat().st_size <= max(shard_bytes, largest) + 10_000 for file in files)
    if shard_bytes == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
        assert not (folder / "model.safetensors.index.json").exists()
        return
    assert len(files) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights.values())
    assert index["weight_map"].keys() == weights.keys()
    for name, file in index["weight_map"].items():
        assert name in safetensors.numpy.load_file(folder / file)
    assert [file.name for file in files] == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]


@pytest.fixture
def umask() -> Iterator[None]:
    """The usual one, whatever that of the tests' process is."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_settings_and_tokenizer_come_back(tmp_path: Path, umask: None) -> None:
    config = tiny.LLAMA | {
        "vocab_size": 300,
        "head_dim": 16,
        "rms_norm_eps": 3e-6,
        "eos_token_id": [1, 4],
        "bos_token_id": 0,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", **ROPE},
    }
    source = tiny.write_folder(tmp_path / "source", config)
    tiny.save_byte_level(source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    folder = there_and_back(tmp_path, source)
    kept = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    assert {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} == kept
    for name in kept - {Path("config.json"), Path("model.safetensors")}:
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name
    # Others may read them: their modes are not those of a temporary folder.
    open_model(tmp_path / "checkpoint").save_tokenizer(tmp_path / "tokenizer")
    for written in (folder, tmp_path / "tokenizer", tmp_path / "checkpoint" / "tokenizer"):
        for path in (written, *written.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path
    written = json.loads((folder / "config.json").read_text())
    assert written["dtype"] == "float32" and written["architectures"] == ["LlamaForCausalLM"]
    # Readers of transformers 4 look for these, those of 5 in rope_parameters.
    assert written["rope_theta"] == 5e5 and written["rope_scaling"] == {"rope_type": "llama3", **ROPE}
    pytest.importorskip("torch")
    import transformers

    ours, theirs = (transformers.AutoConfig.from_pretrained(path) for path in (folder, source))
    for name in ("head_dim", "rms_norm_eps", "eos_token_id", "bos_token_id", "rope_parameters", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.dtype is not None and str(ours.dtype) == "torch.float32"


LOAD = """
import sys, transformers, torch, json
assert not any(name.split(".")[0] in ("models", "layers", "configs") for name in sys.modules)
model, info = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
print(json.dumps({"keys": [len(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")],
  "dtype": str(model.dtype), "tied": model.lm_head.weight is model.model.embed_tokens.weight,
  "sum": float(model(torch.arange(20)[None]).logits.double().abs().sum()),
  "chat": transformers.AutoTokenizer.from_pretrained(sys.argv[1]).apply_chat_template(
      [{"role": "user", "content": "hi"}], tokenize=False)}))
"""


@pytest.mark.parametrize("tie", [False, True])
def test_transformers_loads_it_in_a_process_of_its_own(tmp_path: Path, tie: bool) -> None:
    torch = pytest.importorskip("torch")
    config = tiny.LLAMA | {"tie_word_embeddings": tie, "vocab_size": 300}
    source = tiny.write_folder(tmp_path / "source", config)
    tiny.save_byte_level(source)
    folder = there_and_back(tmp_path, source, shard_bytes=60_000)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["keys"] == [0, 0, 0] and said["tied"] == tie and said["dtype"] == "torch.float32"
    assert said["chat"] == "<|begin|><|user|>hi<|end|>"
    with torch.no_grad():
        right = tiny.torch_model(config)(torch.arange(20)[None]).logits.double().abs().sum()
    assert said["sum"] == pytest.approx(float(right), rel=1e-6)


def test_a_gguf_leaves_as_a_folder(tmp_path: Path) -> None:
    metadata = tiny.gguf_tokenizer_metadata("gpt2") | {"tokenizer.ggml.eot_token_id": 4}
    config = tiny.LLAMA | {"vocab_size": 300}
    folder = there_and_back(tmp_path, tiny.write_gguf(tmp_path / "model.gguf", config, metadata=metadata))
    assert_equal(weights_of(folder), tiny.tensors(config))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == [1, 4]


def test_a_model_without_settings_gets_them(tmp_path: Path) -> None:
    """As a run from scratch leaves it: a tokenizer, and no config.json of any source."""
    source = tiny.write_folder(tmp_path / "source", tiny.LLAMA | {"vocab_size": 300})
    tiny.save_byte_level(source)
    convert(source, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer" / "config.json").unlink()
    export(tmp_path / "checkpoint", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 1
    convert(tmp_path / "back", tmp_path / "again")


def test_tensors_of_several_dtypes_start_where_they_may_be_mapped(tmp_path: Path) -> None:
    """An odd number of 16-bit numbers comes after the 32-bit ones, though its name comes before."""
    arrays = {
        "a": np.arange(3, dtype=np.float16),
        "b": np.arange(5, dtype=np.float32),
        "c": np.ones((1, 1), np.float16),
    }
    writer = SafetensorsWriter(
        tmp_path, {name: (array.shape, array.dtype) for name, array in arrays.items()}, shard_bytes=10**6
    )
    for name in ("c", "a", "b"):
        writer.write(name, arrays[name])
    assert_equal(weights_of(tmp_path), arrays)
    data = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0 and json.loads(data[8 : 8 + size])["b"]["data_offsets"] == [0, 20]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("convert", "SRC DST"), ("export", "CKPT HF_DIR"), ("verify", "CKPT SRC"), ("check", "ENTRY")],
)
def test_arguments_have_names(capsys: pytest.CaptureFixture[str], command: str, arguments: str) -> None:
    with pytest.raises(SystemExit):
        treering.main([command, "--help"])
    usage = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("usage: "))
    assert f" {arguments}" in usage and " STR" not in usage
    assert treering.main([command]) == 2
    assert capsys.readouterr().err == f"treering {command}: missing {arguments}: see treering {command} --help\n"


# ---- what is refused


def test_destinations_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.write_folder(tmp_path / "source")
    convert(source, tmp_path / "checkpoint")
    capsys.readouterr()

    def refused(folder: Path, words: str, *more: str) -> None:
        assert treering.main(["export", str(tmp_path / "checkpoint"), str(folder), *more]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1 and said.startswith("treering export: ")

    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "diary.txt").write_text("dear diary")
    refused(source, "exists: choose another destination, or replace it with --overwrite")
    refused(notes, "is not a Hugging Face folder, so --overwrite does not replace it", "--overwrite")
    refused(tmp_path / "checkpoint", "choose another destination", "--overwrite")
    refused(tmp_path / "checkpoint" / "tokenizer", "choose another destination", "--overwrite")
    refused(tmp_path, "choose another destination", "--overwrite")
    refused(tmp_path / "new", "--shard-gigabytes 0.0: it must be a number above 0 (works: 5)", "--shard-gigabytes", "0")
    refused(tmp_path / "new", "--shard-gigabytes inf: it must be a number", "--shard-gigabytes", "inf")
    refused(tmp_path / "new", "did you mean --overwrite?", "--overwrit")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "notes", "source"]
    (source / "stale.txt").write_text("old")
    assert treering.main(["export", str(tmp_path / "checkpoint"), str(source), "--overwrite"]) == 0
    assert not (source / "stale.txt").exists()
    assert_equal(weights_of(source), tiny.tensors())


def test_nothing_is_left_under_the_name_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    convert(tiny.write_folder(tmp_path / "source"), tmp_path / "checkpoint")
    record = tmp_path / "checkpoint" / "model.json"
    right = record.read_text()
    record.write_text(right.replace('"mlp": 96', '"mlp": 97'))
    with pytest.raises(ValueError, match=r"blocks.places.0.mlp.down.weight has shape \(2, 64, 96\) instead of"):
        export(tmp_path / "checkpoint", tmp_path / "back")
    record.write_text(right)
    chunk = next(
        path for path in (tmp_path / "checkpoint" / "weights" / "norm.weight").iterdir() if path.name[0] != "."
    )
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged: its weights are not those"):
        export(tmp_path / "checkpoint", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.long
def test_the_demo_model_speaks_in_transformers_as_it_does_here(demo_gguf: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    folder = there_and_back(tmp_path, demo_gguf)
    model, said = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        answer = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
