"""From a checkpoint to a Hugging Face folder, one parameter at a time."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from treering.configs.errors import UserError
from treering.configs.model import ModelConfig
from treering.models.checkpoint.arrays import DTYPES, read_array, read_shapes
from treering.models.checkpoint.atomic_folder import check_creatable, empty, written_beside
from treering.models.checkpoint.hashing import fingerprint, hash_array
from treering.models.checkpoint.record import RECORD, WEIGHTS, Record, read_record
from treering.models.checkpoint.tensors import TensorStack, stacked_tensors
from treering.models.families import families
from treering.models.files import copy_folder, listing
from treering.models.formats.safetensors_writer import SafetensorsWriter
from treering.models.progress import byte_progress
from treering.models.tokenizer import TOKENIZER, Tokenizer

SHARD_BYTES = 5 * 10**9
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout")
"""Fields of the source's config.json that do not change the arithmetic, but that other tools read."""


def export(
    checkpoint: str | Path, folder: str | Path, *, shard_bytes: int = SHARD_BYTES, overwrite: bool = False
) -> None:
    """Writes the checkpoint as a Hugging Face `folder`, in the dtype that it is stored in.

    Weights are one file, or several of up to `shard_bytes` with an index. The folder gets its name when it is complete.
    Raises what `read_record` does, and ValueError where the folder exists and `overwrite` is False, where it may not be
    replaced, and where the weights are not those that model.json describes.
    """
    checkpoint, folder = Path(checkpoint), Path(folder)
    if shard_bytes < 1:
        raise UserError("a file holds at least 1 byte", field="shard_bytes", value=shard_bytes)
    record = read_record(checkpoint)
    with written_beside(folder, lambda: _check_destination(checkpoint, folder, overwrite=overwrite)) as unfinished:
        empty(unfinished)
        write_settings(checkpoint / TOKENIZER, unfinished, record)
        _write_weights(checkpoint, unfinished, record, shard_bytes)
        old = folder.with_name(folder.name + ".old")
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        os.replace(unfinished, folder)
        shutil.rmtree(old, ignore_errors=True)


def _check_destination(checkpoint: Path, folder: Path, *, overwrite: bool) -> None:
    here, there = checkpoint.resolve(), folder.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(f"{folder} is in the checkpoint {checkpoint}, or holds it: choose another destination")
    if not folder.exists():
        return check_creatable(folder)
    if not overwrite:
        raise ValueError(f"{folder} exists: choose another destination, or replace it with --overwrite")
    ours = folder.is_dir() and (folder / "config.json").is_file() and not (folder / RECORD).exists()
    if not ours and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is not a Hugging Face folder, so --overwrite does not replace it")


def write_settings(tokenizer: Path, target: Path, record: Record) -> None:
    """Writes all that is not weights: config.json, generation_config.json, tokenizer files and chat templates.

    `tokenizer` is the checkpoint's folder of them, which may be missing.
    """
    if tokenizer.is_dir():
        copy_folder(tokenizer, target)
    carried = _carried(target)
    config = hf_config(record.config, record.dtype) | carried
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if not (target / "generation_config.json").is_file():
        ids = {name: value for name, value in carried.items() if name.endswith("_token_id")}
        (target / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of a model whose weights have `dtype`."""
    return families()[config.family].to_hf(config) | {"dtype": dtype, "torch_dtype": dtype}


def _carried(folder: Path) -> dict[str, Any]:
    """Token ids and the like: from the config.json that came with the weights, or else from the tokenizer."""
    if (folder / "config.json").is_file():
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return {name: raw[name] for name in _CARRIED if raw.get(name) is not None}
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return {}
    ids = Tokenizer.from_folder(folder).named_ids
    return {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad") if ids[name] is not None}


def _write_weights(checkpoint: Path, target: Path, record: Record, shard_bytes: int) -> None:
    """Raises ValueError where what `checkpoint` holds is not what its model.json says."""
    stacks = stacked_tensors(record.config)
    dtypes = _check_weights(checkpoint, stacks)
    shapes = {
        tensor: (joined_heads(stack.dims, stack.tensor_shape), dtypes[name])
        for name, stack in stacks.items()
        for tensor in stack.names
    }
    writer = SafetensorsWriter(target, dict(sorted(shapes.items(), key=_file_order)), shard_bytes=shard_bytes)
    hashes: dict[str, str] = {}
    with byte_progress() as progress:
        total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
        task = progress.add_task("exporting", total=total)
        for name, stack in stacks.items():
            read = partial(read_array, checkpoint / WEIGHTS, name, dtypes[name])
            hashes[name] = _write_tensors(stack, read, writer, lambda count: progress.advance(task, count))
    if fingerprint(hashes.items()) != record.fingerprint:
        raise ValueError(f"{checkpoint} is damaged: its weights are not those whose fingerprint is in {RECORD}")


def _write_tensors(
    stack: TensorStack, read: Callable[[], np.ndarray], writer: SafetensorsWriter, advance: Callable[[int], None]
) -> str:
    """Writes one array's tensors and returns its hash; the array is freed before the next one is read."""
    array = read()
    for tensor, part in zip(stack.names, array if stack.stacked else array[None], strict=True):
        writer.write(tensor, part)
        advance(part.nbytes)
    return hash_array(array)


def _check_weights(checkpoint: Path, wanted: Mapping[str, TensorStack]) -> dict[str, np.dtype]:
    """The dtypes of the arrays that the checkpoint holds; raises ValueError where they are not the wanted ones."""
    stored = read_shapes(checkpoint / WEIGHTS)
    faults = [f"missing {name}" for name in wanted if name not in stored]
    faults += [f"unexpected {name}" for name in stored if name not in wanted]
    faults += [
        f"{name} has shape {stored[name].shape} instead of {stack.shape}"
        for name, stack in wanted.items()
        if name in stored and stored[name].shape != stack.shape
    ]
    if faults:
        raise ValueError(f"{checkpoint} does not hold the weights that its {RECORD} describes: {listing(faults)}")
    return {name: DTYPES[str(stored[name].dtype)] for name in wanted}


def joined_heads(dims: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array of other tools, which have one dim for heads and what is in a head."""
    joined: list[int] = []
    for place, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        if dim == "head_dim" and place and dims[place - 1].endswith("heads"):
            joined[-1] *= size
        else:
            joined.append(size)
    return tuple(joined)


def _file_order(item: tuple[str, Any]) -> tuple[int, str]:
    """As a model computes: the embedding, the layers by number, the rest."""
    number = re.search(r"\.layers\.(\d+)\.", item[0])
    place = int(number[1]) if number else -1 if "embed" in item[0] else 1 << 30
    return place, item[0]
