"""GGUF files: metadata to config.json's fields, tensors dequantised one at a time."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from treering.configs.errors import UserError
from treering.models.families.fields import Fields
from treering.models.files import check_file
from treering.models.formats.gguf_rope import FREQUENCIES, read_rope
from treering.models.formats.gguf_tokenizer import save_tokenizer
from treering.models.formats.source import Source, StoredTensor, identity_of, read_bytes, read_interleaved

_CONFIG = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
_GEMMA3 = {"rope.freq_base_swa": "rope_local_base_freq", "attention.sliding_window": "sliding_window"}
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
"""Mistral's files call themselves llama, and have no field for a window."""
_PIECE_BYTES = 64 << 20
_PLAIN = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    gguf.GGMLQuantizationType.F64: np.dtype(np.float64),
}


class _CutOff(Exception):
    """How many bytes a file should have that has fewer, in words."""


class _Reader(gguf.GGUFReader):
    """Detects files that end too early, in which the library would read beyond the end."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, **options: Any) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise _CutOff(f"at least {end:,}")
        return super()._get(offset, dtype, count, **options)

    def _build_tensors(self, start_offs: Any, fields: list[gguf.ReaderField]) -> None:
        ends = [0]
        for *_, dims, kind, offset in (field.parts for field in fields):
            numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
            ends.append(int(start_offs) + int(offset[0]) + math.prod(dims.tolist()) * size // numbers)
        if max(ends) > len(self.data):
            raise _CutOff(f"{max(ends):,}")
        super()._build_tensors(start_offs, fields)


def open_gguf(path: Path) -> Source:
    """The GGUF file at `path`, with dequantised tensors under their Hugging Face names.

    Raises FileNotFoundError and ValueError with one line for what is not GGUF, truncated, or not supported.
    """
    check_file(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin as one")
    try:
        reader = _Reader(path)
    except _CutOff as cut:
        raise ValueError(
            f"{path} is truncated: it has {path.stat().st_size:,} bytes and should have {cut}; download it again"
        ) from None
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is a damaged GGUF file, or of a version that is not read: {error}") from None
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of {metadata['split.count']} parts: join them first with llama-gguf-split")
    raw = read_metadata(path, metadata, reader.tensors)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[metadata["general.architecture"]], raw["num_hidden_layers"])
    return Source(
        fields=Fields(
            raw, str(path), {ours: f"{metadata['general.architecture']}.{key}" for key, ours in _CONFIG.items()}
        ),
        tensors=_tensors(path, reader.tensors, raw),
        stored_name=lambda name: names.get_name(name, try_suffixes=(".weight", ".bias")) or name,
        save_tokenizer=partial(_save_tokenizer, path, metadata, raw),
        description={
            "kind": "gguf",
            "name": path.name,
            "tensor_types": sorted({tensor.tensor_type.name for tensor in reader.tensors}),
        },
        identity=identity_of([path]),
    )


def _save_tokenizer(path: Path, metadata: Mapping[str, Any], raw: Mapping[str, Any], target: Path) -> bool:
    try:
        return save_tokenizer(metadata, raw, target)
    except UserError as error:
        raise error.at(path) from None


def read_metadata(path: Path, metadata: Mapping[str, Any], tensors: list[Any]) -> dict[str, Any]:
    """The metadata as config.json's fields.

    Keys that are not known are passed on under their own names, so that they are refused as unknown fields are.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UserError(
            "it is not supported", field="general.architecture", value=architecture, works=_ARCHITECTURES, file=path
        )
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in tensors}
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{path} lacks the tensor token_embd.weight")
    raw: dict[str, Any] = {
        "model_type": "gemma3_text" if architecture == "gemma3" else architecture,
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    names = _CONFIG | (_GEMMA3 if architecture == "gemma3" else {})
    for key, value in own.items():
        if isinstance(value, float):
            # The shortest decimal that is this float32: 1e-5, not 9.999999747378752e-06.
            value = float(str(np.float32(value)))
        raw[names.get(key, prefix + key)] = value
    for key in ("vocab_size", "attention.value_length", "rope.dimension_count", "tensor_data_layout"):
        raw.pop(prefix + key, None)
    for key in ("embedding_length", "block_count", "attention.head_count"):
        if not isinstance(own.get(key), int):
            raise UserError("it must be a whole number", field=prefix + key, value=own.get(key), file=path)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise UserError(
                "it must be the size of a head", field=prefix + key, value=own[key], works=[head_dim], file=path
            )
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    ends = [ids[name] for name in ("eos", "eot") if ids[name] is not None]
    raw |= {"bos_token_id": ids["bos"], "eos_token_id": ends if len(set(ends)) > 1 else next(iter(ends), None)}
    if architecture == "gemma3":
        # Not in the file: llama.cpp recognises the largest size, which scales otherwise, by its layers.
        wide = raw["hidden_size"] // raw["num_attention_heads"]
        raw["query_pre_attn_scalar"] = wide if raw["num_hidden_layers"] == 62 else head_dim
    divisors = next((np.array(tensor.data, np.float32) for tensor in tensors if tensor.name == FREQUENCIES), None)
    read_rope(path, raw, prefix, divisors)
    return raw


def _tensors(path: Path, tensors: list[Any], raw: Mapping[str, Any]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if tensor.name == FREQUENCIES:
            continue
        if tensor.name in found:
            raise ValueError(f"{path} holds {tensor.name} twice")
        read_into = partial(_read_tensor, path, tensor.data_offset, tensor.data.shape, tensor.tensor_type)
        if raw["model_type"] == "llama" and (heads := _interleaved_heads(tensor.name, raw)):
            read_into = partial(read_interleaved, read_into, heads)
        if raw["model_type"] == "gemma3_text" and tensor.name.endswith("_norm.weight"):
            read_into = partial(_read_less_one, read_into)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        found[tensor.name] = StoredTensor(shape, _PLAIN.get(tensor.tensor_type, np.dtype(np.float32)), read_into)
    return found


def _read_tensor(
    path: Path, offset: int, stored: tuple[int, ...], kind: gguf.GGMLQuantizationType, out: np.ndarray
) -> None:
    """Dequantises a tensor, a few rows at a time; `stored` is its shape in the file, in bytes where it is quantised."""
    if kind in _PLAIN:
        return read_bytes(path, offset, out)
    row_bytes = stored[-1]
    rows = out.reshape(-1, out.shape[-1])
    step = max(1, _PIECE_BYTES // rows[:1].nbytes)
    for start in range(0, len(rows), step):
        packed = np.empty((min(step, len(rows) - start), row_bytes), np.uint8)
        read_bytes(path, offset + start * row_bytes, packed)
        rows[start : start + step] = gguf.dequantize(packed, kind)


def _read_less_one(read_into: Callable[[np.ndarray], None], out: np.ndarray) -> None:
    """Undoes the 1 that llama.cpp adds to the weights of Gemma's norms."""
    read_into(out)
    out -= 1


def _interleaved_heads(name: str, raw: Mapping[str, Any]) -> int | None:
    """How many heads the rows of a query or key projection make up; None for other tensors."""
    if ".attn_q." in name:
        return raw["num_attention_heads"]
    if ".attn_k." in name:
        return raw.get("num_key_value_heads", raw["num_attention_heads"])
    return None
