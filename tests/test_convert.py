"""Conversion: every source gives the same arrays, bit for bit, or one plain line and nothing on disk."""

import json
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh

import tiny
import treering
from treering.configs.model import ModelConfig
from treering.configs.rope import DefaultRope, LinearRope, Llama3Rope, YarnRope
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.arrays import DTYPES
from treering.models.checkpoint.hashing import is_finite
from treering.models.checkpoint.model import load_model, named_leaves
from treering.models.checkpoint.record import read_config, read_record
from treering.models.conversion import convert as conversion
from treering.models.conversion.convert import convert
from treering.models.conversion.load import open_model
from treering.models.families import config_of
from treering.models.families.fields import Fields
from treering.models.formats import match
from treering.models.tokenizer import Tokenizer

TIED = tiny.LLAMA | {"tie_word_embeddings": True}
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def expected(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors under our paths, layers stacked, matrices as two dims."""
    ours = {"embed.table": weights["model.embed_tokens.weight"], "norm.weight": weights["model.norm.weight"]}
    if "lm_head.weight" in weights:
        ours["output.weight"] = weights["lm_head.weight"]
    layers = 1 + max(int(name.split(".")[2]) for name in weights if ".layers." in name)
    for our, their in BLOCK.items():
        each = [weights[f"model.layers.{layer}.{their}.weight"] for layer in range(layers)]
        ours[f"blocks.places.0.{our}.weight"] = np.stack(each)
    return ours


def assert_holds(path: Path, weights: dict[str, np.ndarray], plan: Plan) -> None:
    arrays, ours = named_leaves(load_model(path, plan)), expected(weights)
    assert arrays.keys() == ours.keys()
    for name, array in ours.items():
        assert arrays[name].dtype == array.dtype, name
        assert np.array_equal(np.asarray(arrays[name]).reshape(array.shape), array), name


@pytest.fixture
def plan(mesh: Callable[..., Mesh]) -> Plan:
    return Plan(mesh(), "decode")


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("config", [tiny.LLAMA, TIED], ids=["untied", "tied"])
def test_a_folder_comes_in_bit_for_bit(tmp_path: Path, plan: Plan, config: dict[str, Any], dtype: str) -> None:
    weights = {name: array.astype(DTYPES[dtype]) for name, array in tiny.tensors(config).items()}
    convert(tiny.write_folder(tmp_path / "source", config, weights), tmp_path / "checkpoint")
    assert_holds(tmp_path / "checkpoint", weights, plan)
    assert read_record(tmp_path / "checkpoint").dtype == dtype
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["checkpoint", "source"]


def test_special_tokens_may_lie_beyond_the_embedding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Gemma 3's token for an image does in the models that see none. A prompt that holds one is refused."""
    folder = tiny.write_folder(tmp_path / "source", tiny.LLAMA | {"vocab_size": 300})
    tiny.save_byte_level(folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 300, "content": "<image>"})
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    convert(folder, tmp_path / "checkpoint")
    assert "has 301 tokens and the embedding table 300: those beyond it are special" in capsys.readouterr().err
    assert treering.main(["generate", str(tmp_path / "checkpoint"), "--prompt", "an <image>"]) == 2
    assert "token id 300 is outside the vocabulary of 300" in capsys.readouterr().err


def test_layers_may_lie_across_files(tmp_path: Path, plan: Plan) -> None:
    weights = tiny.tensors()
    names = sorted(weights)
    shards = [names[0::3], names[1::3], names[2::3]]
    convert(tiny.write_folder(tmp_path / "source", weights=weights, shards=shards), tmp_path / "checkpoint")
    assert_holds(tmp_path / "checkpoint", weights, plan)


@pytest.mark.parametrize(
    "config", [tiny.LLAMA, TIED, tiny.LLAMA | {"head_dim": 16}], ids=["untied", "tied", "head_dim"]
)
def test_gguf_gives_the_same_checkpoint(tmp_path: Path, config: dict[str, Any]) -> None:
    convert(tiny.write_folder(tmp_path / "source", config), tmp_path / "first")
    convert(tiny.write_gguf(tmp_path / "model.gguf", config), tmp_path / "second")
    first, second = read_record(tmp_path / "first"), read_record(tmp_path / "second")
    assert (first.config, first.fingerprint) == (second.config, second.fingerprint)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "Q5_1", "F16", "BF16"])
def test_gguf_is_dequantised(tmp_path: Path, plan: Plan, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering.models.formats.gguf._PIECE_BYTES", 1000)
    quantise = gguf.GGMLQuantizationType[kind]
    weights = tiny.tensors()
    tiny.write_gguf(tmp_path / "model.gguf", weights=weights, quantise=quantise)
    convert(tmp_path / "model.gguf", tmp_path / "checkpoint")
    dtype = {"F16": np.float16, "BF16": DTYPES["bfloat16"]}.get(kind, np.float32)

    def through(array: np.ndarray) -> np.ndarray:
        if array.ndim == 1:
            return array
        return gguf.dequantize(gguf.quantize(array, quantise), quantise).astype(dtype)

    assert_holds(tmp_path / "checkpoint", {name: through(array) for name, array in weights.items()}, plan)


@pytest.mark.parametrize(
    "config",
    [tiny.LLAMA, TIED, tiny.LLAMA | {"head_dim": 16}, tiny.LLAMA | {"rope_theta": 500000.0}],
    ids=["untied", "tied", "head_dim", "theta"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, plan: Plan, config: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    oracle = tiny.torch_model(config)
    oracle.save_pretrained(tmp_path / "source")
    assert "rope_theta" not in json.loads((tmp_path / "source" / "config.json").read_text())
    convert(tmp_path / "source", tmp_path / "checkpoint")
    ids = np.random.default_rng(0).integers(0, 96, (2, 200))
    with torch.no_grad():
        right = oracle(torch.tensor(ids)).logits.numpy()
    ours = tiny.logits(load_model(tmp_path / "checkpoint", plan), plan, ids)
    assert np.abs(ours - right).max() <= 1e-4 * max(1, np.abs(right).max() / 10)
    assert np.abs(right).max() > 5


def test_dtype_casts(tmp_path: Path, plan: Plan) -> None:
    weights = tiny.tensors()
    convert(tiny.write_folder(tmp_path / "source", weights=weights), tmp_path / "checkpoint", dtype="bfloat16")
    cast = {name: array.astype(DTYPES["bfloat16"]) for name, array in weights.items()}
    assert_holds(tmp_path / "checkpoint", cast, plan)
    with pytest.raises(ValueError, match="dtype int8: it is not known .works: .*float32"):
        convert(tmp_path / "source", tmp_path / "other", dtype="int8")


def test_a_cast_that_overflows_is_refused(tmp_path: Path, plan: Plan) -> None:
    weights = tiny.tensors() | {"model.norm.weight": np.full(64, 1e6, np.float32)}
    with pytest.raises(ValueError, match="model.norm.weight holds values that float16 cannot"):
        convert(tiny.write_folder(tmp_path / "source", weights=weights), tmp_path / "checkpoint", dtype="float16")
    assert not (tmp_path / "checkpoint").exists()
    convert(tmp_path / "source", tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="norm.weight holds values that float16 cannot: compute in"):
        load_model(tmp_path / "checkpoint", plan, "float16")


def test_frequencies_in_old_files_are_passed_over(tmp_path: Path, plan: Plan) -> None:
    weights = tiny.tensors()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    convert(tiny.write_folder(tmp_path / "source", weights=weights | extra), tmp_path / "checkpoint")
    assert_holds(tmp_path / "checkpoint", weights, plan)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_may_repeat_its_table_but_not_change_it(tmp_path: Path, plan: Plan, same: bool) -> None:
    weights = tiny.tensors(TIED)
    head = weights["model.embed_tokens.weight"] * (1 if same else 1.001)
    source = tiny.write_folder(tmp_path / "source", TIED, weights | {"lm_head.weight": head.astype(np.float32)})
    if same:
        convert(source, tmp_path / "checkpoint")
        assert_holds(tmp_path / "checkpoint", weights, plan)
    else:
        refused(source, tmp_path / "checkpoint", "tie_word_embeddings.*lm_head.weight differs")


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_tokenizer_comes_along(tmp_path: Path, kind: str) -> None:
    config = tiny.LLAMA | {"vocab_size": 300, "eos_token_id": [1, 4]}
    if kind == "folder":
        source = tiny.write_folder(tmp_path / "source", config)
        tiny.save_byte_level(source)
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    else:
        metadata = tiny.gguf_tokenizer_metadata("gpt2") | {"tokenizer.ggml.eot_token_id": 4}
        source = tiny.write_gguf(tmp_path / "model.gguf", config, metadata=metadata)
    convert(source, tmp_path / "checkpoint")
    tokenizer = Tokenizer.load(tmp_path / "checkpoint")
    assert tokenizer.end_ids == ({1, 2, 4} if kind == "folder" else {1, 4})
    assert tokenizer.encode("Paris") == tiny.byte_level_tokenizer().encode("Paris").ids
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])[-1] == 3
    if kind == "folder":
        for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
            assert (tmp_path / "checkpoint" / "tokenizer" / name).read_bytes() == (source / name).read_bytes()


def test_a_model_without_tokenizer_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(tiny.write_folder(tmp_path / "source"), tmp_path / "checkpoint")
    assert "no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_wherever_weights_are_read(
    tmp_path: Path, plan: Plan, dtype: str, number: float
) -> None:
    weights = {name: array.astype(DTYPES[dtype]) for name, array in tiny.tensors().items()}
    source = tiny.write_folder(tmp_path / "source", weights=weights)
    convert(source, tmp_path / "finite")
    weights["model.layers.1.mlp.up_proj.weight"][-1, -2:] = number
    tiny.write_folder(source, weights=weights)
    told = "model.layers.1.mlp.up_proj.weight holds 2 numbers that are NaN or infinite, of 6,144"
    refused(source, tmp_path / "made" / "for" / "checkpoint", told)
    for cast in (None, "bfloat16"):
        with pytest.raises(ValueError, match=told):
            open_model(source).load(plan, cast)


def test_the_largest_numbers_of_a_dtype_are_finite() -> None:
    for dtype in DTYPES.values():
        largest = np.full((3, 5), ml_dtypes.finfo(dtype).max, dtype)
        assert is_finite(largest) and is_finite(-largest) and is_finite(np.zeros_like(largest[:0]))
        largest[2, 4] = np.nan
        assert not is_finite(largest) and is_finite(largest[:2])


# ---- breaking off and going on


def test_two_conversions_to_one_place_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_folder(tmp_path / "source")
    begun = []

    def meanwhile(unfinished: Path, *rest: Any) -> dict[str, str]:
        if not begun:
            begun.append(True)
            with pytest.raises(ValueError, match="another process writes .*/checkpoint: wait"):
                convert(source, tmp_path / "checkpoint")
        return original(unfinished, *rest)

    original = conversion._resume
    monkeypatch.setattr(conversion, "_resume", meanwhile)
    convert(source, tmp_path / "checkpoint")
    assert begun and sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "source"]


def test_who_comes_when_another_process_has_just_written_does_not_replace_it(tmp_path: Path, monkeypatch) -> None:
    source = tiny.write_folder(tmp_path / "source")
    begun = []

    def meanwhile(*arguments: Any) -> Any:
        if not begun:
            begun.append(True)
            convert(source, tmp_path / "checkpoint", dtype="bfloat16")
        return original(*arguments)

    original = conversion.match
    monkeypatch.setattr(conversion, "match", meanwhile)
    with pytest.raises(ValueError, match="exists: choose another destination"):
        convert(source, tmp_path / "checkpoint")
    assert read_record(tmp_path / "checkpoint").dtype == "bfloat16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "source"]


def test_what_cannot_be_written_is_told_of_the_destination_and_goes_on(tmp_path: Path, capsys) -> None:
    source = tiny.write_folder(tmp_path / "source")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))  # as a full disk does, in the middle of the weights
    try:
        assert treering.main(["convert", str(source), str(tmp_path / "checkpoint")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert said.endswith(f"\ntreering convert: {tmp_path / 'checkpoint'}: File too large\n") and "Traceback" not in said
    done = json.loads((tmp_path / "checkpoint.partial" / conversion.JOURNAL).read_text())["hashes"]
    assert 0 < len(done) < len(expected(tiny.tensors()))
    convert(source, tmp_path / "checkpoint")


def test_a_conversion_goes_on_where_it_broke_off(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_folder(tmp_path / "source")
    read: list[str] = []
    original = match._read

    def reading(name: str, *rest: Any) -> None:
        if len(read) == 9:
            raise KeyboardInterrupt
        read.append(name)
        original(name, *rest)

    monkeypatch.setattr(match, "_read", reading)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    with pytest.raises(ValueError, match="unfinished"):
        read_config(tmp_path / "checkpoint.partial")
    read.append("more than nine")
    read_first = set(read)
    read.clear()
    monkeypatch.setattr(match, "_read", lambda name, *rest: (read.append(name), original(name, *rest)))
    convert(source, tmp_path / "checkpoint")
    assert_holds(tmp_path / "checkpoint", tiny.tensors(), plan)
    # Only the parameter in which it broke off is read again.
    assert 0 < len(set(read) & read_first) <= 2 and len(read) < len(tiny.tensors())
    convert(source, tmp_path / "straight")
    assert read_record(tmp_path / "checkpoint") == read_record(tmp_path / "straight")


def test_what_another_source_left_is_not_used(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_folder(tmp_path / "source")
    original = conversion.finish
    monkeypatch.setattr(conversion, "finish", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "checkpoint")
    monkeypatch.setattr(conversion, "finish", original)
    other = tiny.tensors(seed=1)
    convert(tiny.write_folder(tmp_path / "other", weights=other), tmp_path / "checkpoint")
    assert_holds(tmp_path / "checkpoint", other, plan)


def test_overwrite_replaces_a_checkpoint(tmp_path: Path, plan: Plan) -> None:
    convert(tiny.write_folder(tmp_path / "source"), tmp_path / "checkpoint")
    other = tiny.tensors(seed=1)
    tiny.write_folder(tmp_path / "other", weights=other)
    refused(tmp_path / "other", tmp_path / "checkpoint", "exists.*--overwrite", ["checkpoint"])
    convert(tmp_path / "other", tmp_path / "checkpoint", overwrite=True)
    assert_holds(tmp_path / "checkpoint", other, plan)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint", "other", "source"]


# ---- what is refused


def refused(source: Path, target: Path, message: str, kept: list[str] | None = None) -> str:
    """Asserts one plain line and nothing written; returns the line."""
    root = next(folder for folder in target.parents if folder.exists())
    before = sorted(entry.name for entry in root.iterdir())
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        convert(source, target)
    assert "\n" not in str(raised.value)
    assert sorted(entry.name for entry in root.iterdir()) == before
    assert target.exists() == (target.name in (kept or []))
    return str(raised.value)


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")


def header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the header of a safetensors file."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + size])
    change(entries)
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Moves the weights behind an index, and changes it."""
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    raw = {"weight_map": dict.fromkeys(tiny.tensors(), "model-1.safetensors")}
    change(raw)
    (folder / "model.safetensors.index.json").write_text(json.dumps(raw))


K = "model.layers.1.self_attn.k_proj.weight"
FILE = "model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0"
FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("missing tensor", lambda f: rewrite(f, lambda w: w.pop(K)), f"1 missing: {K}"),
    ("missing head", lambda f: rewrite(f, lambda w: w.pop("lm_head.weight")), "1 missing: lm_head.weight"),
    ("unknown tensor", lambda f: rewrite(f, lambda w: w.update(strange=w["model.norm.weight"])), "unexpected: strange"),
    (
        "both",
        lambda f: rewrite(f, lambda w: w.update(strange=w.pop(K), other=w.pop("model.norm.weight"))),
        f"2 missing: .*{K}.*2 unexpected: other, strange",
    ),
    (
        "shape",
        lambda f: rewrite(f, lambda w: w.update({K: w[K].reshape(32, 32)})),
        r"wrong shape: .*k_proj.weight has shape \(32, 32\) instead of 2 x 8 x 64",
    ),
    (
        "mixed dtypes",
        lambda f: rewrite(f, lambda w: w.update({K: w[K].astype(np.float16)})),
        "dtypes .*float16.*--dtype",
    ),
    ("truncated", lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:-10]), "is truncated"),
    ("only a header", lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:100]), "truncated, or not safetensors"),
    ("four bytes", lambda f: (f / FILE).write_bytes(b"abcd"), "truncated, or not safetensors"),
    ("empty file", lambda f: (f / FILE).write_bytes(b""), "empty file"),
    ("huge header", lambda f: (f / FILE).write_bytes(b"\xff" * 64), "truncated, or not safetensors"),
    ("no JSON", lambda f: (f / FILE).write_bytes(struct.pack("<Q", 4) + b"nope"), "damaged header"),
    ("pointer", lambda f: (f / FILE).write_bytes(POINTER), "Git LFS pointer"),
    ("offsets", lambda f: header(f / FILE, lambda h: h[K].update(data_offsets=[0, 4])), "do not agree"),
    ("dtype", lambda f: header(f / FILE, lambda h: h[K].update(dtype="F8_E4M3")), "F8_E4M3.*supported ones are"),
    ("no weights", lambda f: (f / FILE).unlink(), "holds no weights"),
    ("pickle", lambda f: (f / FILE).rename(f / "pytorch_model.bin"), "pytorch_model.bin: .*run code"),
    ("no index", lambda f: (f / FILE).rename(f / "model-1.safetensors"), "neither"),
    (
        "index names no file",
        lambda f: index(f, lambda i: i["weight_map"].update({K: "model-2.safetensors"})),
        "model-2",
    ),
    (
        "index leaves",
        lambda f: index(f, lambda i: i["weight_map"].update({K: "../model.safetensors"})),
        "files next to it",
    ),
    ("index is absolute", lambda f: index(f, lambda i: i["weight_map"].update({K: "/etc/passwd"})), "files next to it"),
    ("index without map", lambda f: index(f, lambda i: i.pop("weight_map")), "no weight_map"),
    ("index lies", lambda f: index(f, lambda i: i["weight_map"].update(more="model-1.safetensors")), "more is not in"),
    ("no config", lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    ("config is no JSON", lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    ("config is a list", lambda f: (f / "config.json").write_text("[]"), "holds a JSON list"),
    *(
        (
            f"pointer {name}",
            lambda f, name=name: (f / name).write_bytes(POINTER),
            f"{name} is a Git LFS pointer, not the",
        )
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    ),
    ("empty folder", lambda f: (shutil.rmtree(f), f.mkdir()), "empty folder"),
    ("no folder", lambda f: shutil.rmtree(f), "does not exist"),
    ("tokenizer too large", lambda f: tiny.save_byte_level(f), "300 tokens and the embedding table 96"),
    ("broken tokenizer", lambda f: (f / "tokenizer.json").write_text("{}"), "transformers cannot read"),
]


@pytest.mark.parametrize(("break_it", "message"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_a_broken_folder_is_refused_in_one_line(tmp_path: Path, break_it: Callable[[Path], Any], message: str) -> None:
    source = tiny.write_folder(tmp_path / "source")
    break_it(source)
    refused(source, tmp_path / "checkpoint", message)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    names = sorted(tiny.tensors())
    source = tiny.write_folder(tmp_path / "source", shards=[names, names[-1:]])
    refused(source, tmp_path / "checkpoint", f"{names[-1]} is in model-00001.* and in model-00002")


def test_a_tensor_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    source = tiny.write_folder(tmp_path / "source")
    data = (source / FILE).read_bytes()
    text = data[8 : 8 + struct.unpack("<Q", data[:8])[0]].strip()
    entry = b',"lm_head.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    (source / FILE).write_bytes(struct.pack("<Q", len(text) - 1 + len(entry)) + text[:-1] + entry + data)
    refused(source, tmp_path / "checkpoint", "lm_head.weight is in it twice")


def test_a_checkpoint_needs_no_conversion(tmp_path: Path) -> None:
    convert(tiny.write_folder(tmp_path / "source"), tmp_path / "checkpoint")
    refused(tmp_path / "checkpoint", tmp_path / "again", "is a checkpoint already")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.logit_scale": 2.0}, "not known here.*llama.logit_scale.*--ignore-fields"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.value_length": 32}, 'value_length" 32: it must be the size of a head .works: 8'),
        ({"llama.rope.dimension_count": 4}, 'dimension_count" 4'),
        ({"split.count": 2}, "one of 2 parts"),
        (
            tiny.gguf_tokenizer_metadata("gpt2") | {"tokenizer.ggml.pre": "x"},
            'model.gguf: "tokenizer.ggml.pre" x: it is',
        ),
        (
            {"llama.attention.head_count_kv": 3},
            'model.gguf: "llama.attention.head_count_kv" 3: it must divide the 8 query',
        ),
        ({"llama.context_length": 0}, 'model.gguf: "llama.context_length" 0: it must be at least 1'),
    ],
)
def test_gguf_metadata_that_changes_the_arithmetic_is_refused(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    source = tiny.write_gguf(tmp_path / "model.gguf", metadata=metadata)
    refused(source, tmp_path / "checkpoint", message)


@pytest.mark.parametrize("keep", [0.002, 0.02, 0.99])
def test_a_truncated_gguf_is_refused(tmp_path: Path, keep: float) -> None:
    source = tiny.write_gguf(tmp_path / "model.gguf")
    data = source.read_bytes()
    source.write_bytes(data[: int(keep * len(data))])
    whole = "at least" if keep == 0.002 else f"{len(data):,}"
    told = f"model.gguf is truncated: it has {int(keep * len(data)):,} bytes and should have {whole}"
    refused(source, tmp_path / "checkpoint", told)


@pytest.mark.parametrize("name", ["model.gguf", "thing.txt", "model.safetensors"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"version https://git-lfs" if name == "model.gguf" else b"hello there" * 50)
    message = {"model.gguf": "LFS pointer", "thing.txt": "is not a GGUF", "model.safetensors": "give the folder"}[name]
    refused(tmp_path / name, tmp_path / "checkpoint", message)


# ---- config.json


def read(**changes: Any) -> ModelConfig:
    fields = Fields({name: value for name, value in (tiny.LLAMA | changes).items() if value != "absent"}, "config.json")
    config = config_of(fields)
    fields.finish()
    return config


def test_defaults_are_those_of_transformers() -> None:
    config = read(rms_norm_eps="absent", num_key_value_heads="absent", tie_word_embeddings="absent")
    assert (config.norm_eps, config.kv_heads, config.tie_embeddings, config.head_dim) == (1e-6, 8, False, 8)
    assert config.rope == DefaultRope(theta=10000.0)
    assert read(head_dim=None).head_dim == 8
    assert read(hidden_size=60, head_dim=16).head_dim == 16


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE = Llama3Rope(
    theta=5e5, factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=32
)
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def yarn(factor: float) -> YarnRope:
    return YarnRope(theta=1e4, factor=4.0, original_context=64, attention_factor=factor)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5}, DefaultRope(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, DefaultRope(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, DefaultRope(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearRope(theta=1e4, factor=2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, LinearRope(theta=1e4, factor=2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_scaling": {"type": "yarn", **YARN}}, yarn(1.1386294361119891)),
        ({"rope_scaling": {"type": "yarn", "attention_factor": 1.0, **YARN}}, yarn(1.0)),
        ({"rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN}}, yarn(1.0)),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
            yarn(1.1386294361119891),
        ),
    ],
)
def test_every_spelling_of_rotary_parameters(fields: dict[str, Any], rope: Any) -> None:
    assert read(**fields).rope == rope


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, '"attention_bias" True: .*works: absent, False'),
        ({"mlp_bias": True}, '"mlp_bias" True'),
        ({"hidden_act": "gelu"}, '"hidden_act" gelu.*silu'),
        ({"sliding_window": 4096}, '"sliding_window" 4096: Llama attends to all'),
        ({"quantization_config": {"quant_method": "gptq"}}, '"quantization_config" gptq: quantised weights'),
        ({"quantization_config": {"quant_method": "awq"}}, '"quantization_config" awq'),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            '^config.json: rope: "rope_type" longrope.*default, linear, llama3, yarn',
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, '"rope_type" dynamic'),
        ({"rope_scaling": {"rope_type": ["x"]}}, r'"rope_type" \[.x.\]: it is not supported'),
        ({"rope_scaling": {"type": "linear"}}, '^config.json: rope: "factor": it is missing'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
        ({"rope_scaling": "linear"}, '"rope_scaling" linear: it must be an object'),
        ({"partial_rotary_factor": 0.5}, '"partial_rotary_factor" 0.5'),
        ({"num_hidden_layers": "two"}, '"num_hidden_layers" two: it must be a whole number'),
        ({"num_hidden_layers": 0}, '^config.json: "num_hidden_layers" 0: it must be at least 1'),
        ({"num_attention_heads": 0}, '^config.json: "num_attention_heads" 0: it must be at least 1'),
        (
            {"num_key_value_heads": 3},
            r'^config.json: "num_key_value_heads" 3: it must divide the 8 query heads, of which each key head serves '
            r"an equal group \(works: 1, 2, 4, 8\)$",
        ),
        ({"head_dim": 7}, '^config.json: "head_dim" 7: it must be even'),
        ({"model_type": "mistral", "sliding_window": 0}, '"sliding_window" 0: it must be at least 1'),
        ({"rms_norm_eps": float("nan")}, '^config.json: "rms_norm_eps" nan: it must be a number'),
        ({"rope_theta": -1.0}, '^config.json: "rope_theta" -1.0: it must be above 0'),
        ({"hidden_size": 60}, '"hidden_size" 60: it is not a multiple of num_attention_heads, 8, and there is'),
        ({"vocab_size": "absent"}, '^config.json: "vocab_size": it is missing'),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier .treering convert --ignore-fields embedding_multiplier"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_that_change_the_arithmetic_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**fields)


def test_fields_that_change_nothing_are_not(tmp_path: Path) -> None:
    read(use_cache=False, torch_dtype="bfloat16", pretraining_tp=2, attention_bias=False, sliding_window=None)
    source = tiny.write_folder(tmp_path / "source", tiny.LLAMA | {"colour": "red"})
    refused(source, tmp_path / "checkpoint", "colour.*--ignore-fields colour")
    convert(source, tmp_path / "checkpoint", ignore_fields=["colour"])


def test_an_unsupported_model_type_lists_the_supported_ones(tmp_path: Path) -> None:
    source = tiny.write_folder(tmp_path / "source", tiny.LLAMA | {"model_type": "gpt2"})
    refused(source, tmp_path / "checkpoint", 'config.json: "model_type" gpt2: it is not supported.*works: .*llama')


@pytest.mark.long
def test_the_demo_model(demo_gguf: Path, tmp_path: Path, plan: Plan) -> None:
    convert(demo_gguf, tmp_path / "checkpoint")
    tokenizer = Tokenizer.load(tmp_path / "checkpoint")
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    model = load_model(tmp_path / "checkpoint", plan)
    said = tokenizer.stream()
    for _ in range(7):
        ids.append(int(tiny.logits(model, plan, np.array([ids]))[0, -1].argmax()))
        said.push(ids[-1])
    assert tokenizer.decode(ids[-7:]) == "The capital of France is Paris."


def test_a_tokenizer_that_cannot_be_read_is_called_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny.write_folder(tmp_path / "hf")
    (source / "tokenizer.json").write_text("{")
    for command in (["convert", str(source), str(tmp_path / "out")], ["generate", str(source), "--prompt", "x"]):
        assert treering.main(command) == 2
        assert f"{source} has a tokenizer that transformers cannot read" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [source]
