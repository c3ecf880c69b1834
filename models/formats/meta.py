"""Folders as Meta publishes its Llamas: params.json, and consolidated.*.pth sharded for tensor parallelism.

Each file holds a shard of every matrix: rows of column-parallel ones, columns of row-parallel ones. Rows of queries and
keys are in pairs that one angle rotates; the embedding is sharded by columns up to Llama 2, by rows from Llama 3 on.
"""

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from treering.models.checkpoint.arrays import DTYPES
from treering.models.checkpoint.hashing import hash_array
from treering.models.families.fields import Fields
from treering.models.files import check_file, listing, read_json
from treering.models.formats.meta_tokenizer import save_tokenizer
from treering.models.formats.source import Source, StoredTensor, identity_of, read_interleaved

PARAMS = "params.json"
_FILES = "consolidated.*.pth"
_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.k_proj.weight": "attention.wk.weight",
    "self_attn.v_proj.weight": "attention.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
}
"""Hugging Face's names of tensors, those of a layer without its number, and Meta's."""
_CUT_BY_COLUMNS = ("wo", "w2")
_READ = (
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta", "use_scaled_rope"),
    *("rope_scaling_factor", "rope_high_freq_factor", "max_seq_len"),
    *("multiple_of", "ffn_dim_multiplier", "max_batch_size"),  # the size of the MLP is that of its tensors
)
"""Fields of params.json that are known here."""
_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
}
"""Fields of config.json, and what params.json calls them."""


def open_meta(folder: Path) -> Source:
    """The Meta folder at `folder`, with tensors joined and in Hugging Face's order of rows.

    Raises FileNotFoundError and ValueError with one line for what is missing, truncated or not weights, and where
    PyTorch, which alone reads these files, is not installed.
    """
    settings = Fields(read_json(folder / PARAMS), str(folder / PARAMS))
    paths = _files(folder)
    parts = [_load(path) for path in paths]
    faults, tensors = [], {}
    for name in dict.fromkeys(name for part in parts for name in part):
        absent = [path.name for path, part in zip(paths, parts, strict=True) if name not in part]
        pieces = [part[name] for part in parts if name in part]
        if name == "rope.freqs":  # they follow from rope_theta
            continue
        if absent:
            faults.append(f"{name} is not in {listing(absent)}")
        elif (joined := _join(name, pieces, settings.integer("dim"))) is None:
            faults.append(
                f"{name} does not fit together: its shapes are {listing([_shape(piece) for piece in pieces])}"
            )
        else:
            tensors[name] = joined
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if name not in tensors:
            raise ValueError(f"{folder} lacks the tensor {name}" + "".join(f"; {fault}" for fault in faults[:8]))
    tied = _tied(tensors)
    if tied:
        tensors.pop("output.weight", None)
    raw = _config(settings, tensors, tied=tied)
    heads = {"wq": raw["num_attention_heads"], "wk": raw["num_key_value_heads"]}
    for name, tensor in tensors.items():
        if (count := heads.get(_kind(name))) is not None:
            tensors[name] = replace(tensor, read_into=partial(read_interleaved, tensor.read_into, count))
    return Source(
        fields=Fields(raw, str(folder / PARAMS), _KEYS),
        tensors=tensors,
        stored_name=_stored_name,
        save_tokenizer=partial(save_tokenizer, folder, raw),
        description={"kind": "meta", "name": folder.resolve().name, "files": len(paths)},
        identity=identity_of([folder / PARAMS, *paths]),
        faults=tuple(faults),
    )


def _stored_name(name: str) -> str:
    """Meta's name of a tensor, from Hugging Face's."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return f"layers.{layer[1]}.{_NAMES.get(layer[2], layer[2])}" if layer else _NAMES.get(name, name)


def _kind(name: str) -> str:
    """Which of a layer's tensors a name means: `wq` of `layers.0.attention.wq.weight`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _files(folder: Path) -> list[Path]:
    """The weights' files in their order; raises FileNotFoundError where one is missing."""
    found = {path.name: path for path in folder.glob(_FILES)}
    wanted = [f"consolidated.{number:02}.pth" for number in range(len(found))]
    if not found:
        raise FileNotFoundError(f"{folder} holds a {PARAMS} and no {_FILES}: there are no weights next to it")
    if absent := sorted(set(wanted) - set(found)):
        raise FileNotFoundError(f"{folder} holds {listing(sorted(found))} and lacks {listing(absent)}")
    return [found[name] for name in wanted]


def _load(path: Path) -> Mapping[str, Any]:
    """The tensors of a file, mapped and not read."""
    check_file(path)
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise ValueError(f"{path}: only PyTorch reads .pth files: pip install 'treering[torch]'") from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # Whatever torch raises for files that it cannot read, or will not.
        message = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be read as tensors, or is damaged or truncated: {message}") from error
    named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    if not named or not all(torch.is_tensor(tensor) for tensor in found.values()):
        raise ValueError(f"{path} holds something other than named tensors")
    if strange := sorted({str(tensor.dtype) for tensor in found.values()} - {f"torch.{name}" for name in DTYPES}):
        raise ValueError(f"{path} holds tensors of {listing(strange)}: the supported dtypes are {', '.join(DTYPES)}")
    return found


def _join(name: str, pieces: list[Any], width: int) -> StoredTensor | None:
    """A tensor from its pieces, one per file; None where they do not fit together.

    `width` is the size of the residual: an embedding with rows of that size is sharded by rows.
    """
    first = pieces[0]
    if {piece.dtype for piece in pieces} != {first.dtype}:
        return None
    dtype = DTYPES[str(first.dtype).removeprefix("torch.")]
    if first.ndim == 1:  # norms are whole in each file
        same = all(piece.shape == first.shape and piece.equal(first) for piece in pieces)
        return StoredTensor(tuple(first.shape), dtype, partial(_read, pieces[:1], 0)) if same else None
    if any(piece.ndim != 2 for piece in pieces):
        return None
    columns = _kind(name) in _CUT_BY_COLUMNS or (_kind(name) == "tok_embeddings" and first.shape[1] != width)
    cut = 1 if columns else 0
    if len({piece.shape[1 - cut] for piece in pieces}) > 1:
        return None
    shape = list(first.shape)
    shape[cut] = sum(piece.shape[cut] for piece in pieces)
    return StoredTensor(tuple(shape), dtype, partial(_read, pieces, cut))


def _read(pieces: list[Any], cut: int, out: np.ndarray) -> None:
    """Concatenates the pieces along the dim `cut`."""
    start = 0
    for piece in pieces:
        # torch's bfloat16 has no NumPy dtype, so 16-bit numbers are passed as integers.
        whole = piece.view(importlib.import_module("torch").int16) if piece.element_size() == 2 else piece
        part = whole.numpy().view(out.dtype)
        stop = start + part.shape[cut]
        out[(slice(None),) * cut + (slice(start, stop),)] = part
        start = stop


def _shape(piece: Any) -> str:
    return " x ".join(map(str, piece.shape)) + f" {piece.dtype}"


def _tied(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether the output projection is the embedding: absent, or a copy of it."""
    table, output = tensors["tok_embeddings.weight"], tensors.get("output.weight")
    if output is None:
        return True
    if (table.shape, table.dtype) != (output.shape, output.dtype):
        return False
    return hash_array(table.read()) == hash_array(output.read())


def _config(settings: Fields, tensors: Mapping[str, StoredTensor], *, tied: bool) -> dict[str, Any]:
    """params.json as config.json's fields; those that are not known here keep their names, and are refused by them."""
    vocab = tensors["tok_embeddings.weight"].shape[0]
    said = settings.integer("vocab_size", -1)
    if said not in (-1, vocab):
        raise settings.refused("vocab_size", f"the embedding has {vocab} rows")
    scaled = settings.flag("use_scaled_rope", False)
    raw: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": settings.integer("dim"),
        "num_hidden_layers": settings.integer("n_layers"),
        "num_attention_heads": settings.integer("n_heads"),
        "num_key_value_heads": settings.integer("n_kv_heads", settings.integer("n_heads")),
        "intermediate_size": tensors["layers.0.feed_forward.w1.weight"].shape[0],
        "rms_norm_eps": settings.number("norm_eps"),
        "rope_theta": settings.number("rope_theta", 10_000.0),
        "tie_word_embeddings": tied,
    }
    if scaled:
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            # Llama 3.1's. The small models of 3.2, which tie their embeddings, have another, and a file that says none.
            "factor": settings.number("rope_scaling_factor", 32.0 if tied else 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": settings.number("rope_high_freq_factor", 4.0),
            "original_max_position_embeddings": 8192,
        }
    raw["max_position_embeddings"] = settings.integer("max_seq_len", None) or _context(settings, raw)
    return raw | {key: value for key, value in settings.raw.items() if key not in _READ and value is not None}


def _context(settings: Fields, raw: Mapping[str, Any]) -> int:
    """The context of the release that a file looks like, since no field says it; prints that it is a guess."""
    if "rope_scaling" in raw:
        found = 131072
    elif raw["vocab_size"] >= 128_000:
        found = 8192
    elif raw["rope_theta"] >= 1_000_000:
        found = 16384
    else:
        found = 2048 if raw["rms_norm_eps"] <= 1e-6 else 4096
    print(
        f'{settings.name} does not say how many tokens the context holds: {found} are assumed (add "max_seq_len" to it '
        "for another number)",
        file=sys.stderr,
    )
    return found
