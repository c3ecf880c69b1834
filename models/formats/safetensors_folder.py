"""Hugging Face folders: config.json, tokenizer files, and weights in one or several safetensors files."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from treering.models.families.fields import Fields
from treering.models.files import check_file, check_no_pointer, copy_folder, listing, read_json
from treering.models.formats.source import Source, StoredTensor, identity_of, read_bytes
from treering.models.tokenizer import TOKENIZER_FILES

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100 << 20
"""Bytes of the largest header that is read: far above any real one, and safe to allocate."""
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def open_folder(folder: Path) -> Source:
    """The Hugging Face folder at `folder`.

    Raises FileNotFoundError and ValueError with one line for what is missing, truncated or not weights.
    """
    raw = read_json(folder / "config.json")
    files = _weight_files(folder)
    tensors: dict[str, StoredTensor] = {}
    holder: dict[str, str] = {}
    faults: list[str] = []
    for path, promised in files.items():
        found = read_header(path)
        faults += [f"{name} is in {holder[name]} and in {path.name}" for name in found if name in holder]
        faults += [f"{name} is not in {path.name}, where {INDEX} says it is" for name in promised if name not in found]
        holder |= dict.fromkeys(found, path.name)
        tensors |= found
    return Source(
        fields=Fields(raw, str(folder / "config.json")),
        tensors=tensors,
        stored_name=lambda name: name,
        save_tokenizer=partial(copy_tokenizer, folder),
        description={"kind": "safetensors", "name": folder.resolve().name},
        identity=identity_of([folder / "config.json", *files]),
        faults=tuple(faults),
    )


def _weight_files(folder: Path) -> dict[Path, list[str]]:
    """The safetensors files, and the tensors that the index says each holds."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{folder / INDEX} has no weight_map from tensors to files")
        strange = [name for name in set(weight_map.values()) if Path(name).name != name or name in ("", ".", "..")]
        if strange:
            raise ValueError(f"{folder / INDEX} names {listing(sorted(strange))}: only files next to it are read")
        files: dict[Path, list[str]] = {}
        for tensor, name in sorted(weight_map.items()):
            files.setdefault(folder / name, []).append(tensor)
        absent = sorted(path.name for path in files if not path.is_file())
        if absent:
            raise FileNotFoundError(f"{folder} lacks files that {INDEX} names: {listing(absent)}")
        return files
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: []}
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if present:
        raise FileNotFoundError(f"{folder} holds {listing(present)} but neither {SINGLE} nor {INDEX}")
    if pickles := sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern)):
        raise ValueError(
            f"{folder} holds its weights in {listing(pickles)}: loading such a file can run code that is hidden in "
            "it, so only safetensors are read; save the model again with safetensors"
        )
    raise FileNotFoundError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; raises ValueError where header and file do not agree."""
    check_file(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(HEADER_LIMIT, size - 8):
            raise ValueError(f"{path} has {size} bytes and a header of {length}: it is truncated, or not safetensors")
        text = file.read(length)
    tensors: dict[str, StoredTensor] = {}
    try:
        entries = json.loads(text, object_pairs_hook=_no_duplicates)
        for name, entry in entries.items():
            if name != "__metadata__":
                tensors[name] = _stored(path, name, entry, 8 + length, size)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} has a damaged header: {error}") from None
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise TypeError(f"{listing(sorted({name for name in names if names.count(name) > 1}))} is in it twice")
    return found


def _stored(path: Path, name: str, entry: dict[str, Any], data: int, size: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        known = ", ".join(DTYPES)
        raise ValueError(f"{path}: {name} has dtype {entry['dtype']}: the supported ones are {known}")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{path}: {name} has shape {shape} and {end - begin} bytes: they do not agree")
    if data + end > size:
        raise ValueError(f"{path} is truncated: {name} ends at byte {data + end} and the file at {size}")
    return StoredTensor(shape, dtype, partial(read_bytes, path, data + begin))


def copy_tokenizer(folder: Path, target: Path) -> bool:
    """Copies the tokenizer's files; False where there is none."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            check_no_pointer(folder / name)
            shutil.copyfile(folder / name, target / name)
    if (folder / "additional_chat_templates").is_dir():
        copy_folder(folder / "additional_chat_templates", target / "additional_chat_templates")
    return any((target / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
