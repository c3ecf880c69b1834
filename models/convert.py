"""From a Hugging Face folder, a folder of Meta's or a GGUF file to a checkpoint, one parameter at a time."""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from treering.configs.model import ModelConfig
from treering.models.checkpoint import (
    abstract_model,
    check_destination,
    empty,
    finish,
    main_dtype,
    named_leaves,
    written_beside,
)
from treering.models.families import config_of, families
from treering.models.gguf import open_gguf
from treering.models.meta import PARAMS, open_meta
from treering.models.progress import byte_progress
from treering.models.record import RECORD, TOKENIZER, WEIGHTS, Record
from treering.models.safetensors_folder import listing, open_folder
from treering.models.source import Source, StoredTensor
from treering.models.text_part import text_part
from treering.models.tokenizer import Tokenizer
from treering.models.weights import DTYPES, Deferred, fingerprint, hash_array, is_finite, write_arrays

JOURNAL = "progress.json"


@dataclass(frozen=True)
class Parameter:
    """One array of the checkpoint and the tensors it is made of."""

    shape: tuple[int, ...]
    dtype: np.dtype
    """As it will be written."""
    tensors: tuple[tuple[str, StoredTensor], ...]
    """Names and tensors, one a layer, or only one for what stands outside the layers."""
    stacked: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def open_source(src: str | Path) -> Source:
    """The weights at `src`: a Hugging Face folder, a folder of Meta's or a GGUF file.

    Raises ValueError and FileNotFoundError for others.
    """
    src = Path(src)
    if not src.exists():
        raise FileNotFoundError(f"{src} does not exist: give a Hugging Face folder, one of Meta's, or a GGUF file")
    if src.is_file():
        if src.suffix == ".safetensors":
            raise ValueError(f"{src} is one file of a Hugging Face folder: give the folder, with its config.json")
        return open_gguf(src)
    if (src / RECORD).is_file():
        raise ValueError(f"{src} is a checkpoint already: it needs no conversion")
    if not any(src.iterdir()):
        raise ValueError(f"{src} is an empty folder: give a Hugging Face folder, one of Meta's, or a GGUF file")
    if not (src / "config.json").is_file() and (src / PARAMS).is_file():
        return open_meta(src)
    if not (src / "config.json").is_file() and (files := sorted(src.glob("*.gguf"))):
        raise ValueError(f"{src} holds GGUF files: give one of them, such as {files[0]}")
    return text_part(open_folder(src))


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    ignore_fields: Collection[str] = (),
) -> None:
    """Writes the weights and the tokenizer at `src` as a checkpoint at `dst`.

    Parameters keep their dtype, or are cast to `dtype`; `ignore_fields` names fields of config.json to go on without.
    What a broken-off conversion of the same files left behind is continued. Raises ValueError and FileNotFoundError
    with one line for what is missing, unexpected or not supported, before anything is written; and for numbers that are
    not finite, of which nothing is left.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: the known ones are {', '.join(DTYPES)}")
    check = partial(check_destination, dst, overwrite=overwrite)
    check()
    source = open_source(src)
    config = read_source_config(source, ignore_fields)
    parameters = match(source, config, None if dtype is None else DTYPES[dtype])
    identity = json.dumps([source.identity, config.fingerprint(), dtype])
    with TemporaryDirectory() as scratch:
        _save_tokenizer(source, config, Path(scratch))
        with written_beside(dst, check) as unfinished:
            hashes = _resume(unfinished, identity)
            shutil.copytree(scratch, unfinished / TOKENIZER, dirs_exist_ok=True)
            _write_weights(parameters, unfinished, identity, hashes)
            (unfinished / JOURNAL).unlink()
            record = Record(
                config=config,
                dtype=main_dtype(parameters),
                fingerprint=fingerprint(hashes.items()),
                source=source.description,
            )
            finish(unfinished, dst, record)


def read_source_config(source: Source, ignore_fields: Collection[str] = ()) -> ModelConfig:
    """The architecture; raises ValueError for fields that are not supported, or not known and not to be ignored."""
    config = config_of(source.fields)
    source.fields.finish(ignore_fields)
    return config


def match(source: Source, config: ModelConfig, dtype: np.dtype | None) -> dict[str, Parameter]:
    """The tensors of every parameter.

    Raises ValueError listing all that is missing, unexpected, of another shape, or of several dtypes in one parameter.
    """
    model = abstract_model(config)
    shapes = {name: leaf.shape for name, leaf in named_leaves(model).items()}
    missing: list[str] = []
    misfits: list[str] = []
    used: set[str] = set()
    parameters: dict[str, Parameter] = {}
    for name, pattern in families()[config.family].names(config).items():
        shape = shapes[name]
        stacked = "{layer}" in pattern
        layers = model.layers_at(int(name.split(".")[2])) if stacked else [0]
        wanted = [source.stored_name(pattern.format(layer=layer)) for layer in layers]
        found = [(stored, source.tensors[stored]) for stored in wanted if stored in source.tensors]
        missing += [stored for stored in wanted if stored not in source.tensors]
        used |= set(wanted)
        inner = shape[1:] if stacked else shape
        misfits += [
            f"{stored} has shape {tensor.shape} instead of {_joined(inner)}"
            for stored, tensor in found
            if not _regroups(inner, tensor.shape)
        ]
        dtypes = {tensor.dtype for _, tensor in found}
        if len(dtypes) > 1 and dtype is None:
            misfits.append(
                f"{wanted[0]} and its like have the dtypes {sorted(map(str, dtypes))} (--dtype makes them one)"
            )
        if found:
            parameters[name] = Parameter(shape, dtype or found[0][1].dtype, tuple(found), stacked)
    unexpected = sorted(name for name in set(source.tensors) - used if not _needless(name, source, config))
    faults = list(source.faults) + [
        f"{len(names)} {what}: {listing(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", misfits))
        if names
    ]
    if faults:
        raise ValueError(f"{source.fields.name} and the tensors beside it do not agree: {'; '.join(faults)}")
    return parameters


def _joined(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _regroups(ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether `theirs` is `ours` with neighbouring dims multiplied together."""
    bounds = {math.prod(ours[:i]) for i in range(len(ours) + 1)}
    return math.prod(ours) == math.prod(theirs) and all(math.prod(theirs[:i]) in bounds for i in range(len(theirs)))


def _needless(name: str, source: Source, config: ModelConfig) -> bool:
    """Whether a tensor says nothing new: rotary frequencies, or a copy of the tied embedding table.

    Raises ValueError for an output projection that differs from the table it is said to be tied to.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if not config.tie_embeddings or name != source.stored_name("lm_head.weight"):
        return False
    table = source.stored_name("model.embed_tokens.weight")
    if table in source.tensors and hash_array(source.tensors[name].read()) != hash_array(source.tensors[table].read()):
        raise ValueError(
            f"{source.fields.name} says that the embeddings are tied (tie_word_embeddings), but {name} differs from "
            f"{table}: set tie_word_embeddings to false to use both"
        )
    return True


def _resume(unfinished: Path, identity: str) -> dict[str, str]:
    """Hashes of the parameters that stand in `unfinished` already; empties it if they are of another source."""
    try:
        journal = json.loads((unfinished / JOURNAL).read_text())
        if journal["identity"] == identity:
            return journal["hashes"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    empty(unfinished)
    (unfinished / WEIGHTS).mkdir()
    return {}


def _save_tokenizer(source: Source, config: ModelConfig, folder: Path) -> None:
    """Raises ValueError for a tokenizer that cannot be read or has tokens without an embedding."""
    if not source.save_tokenizer(folder):
        print(f"{source.fields.name}: there is no tokenizer beside it, so the checkpoint has none", file=sys.stderr)
        return
    tokenizer = Tokenizer.from_folder(folder, origin=source.fields.name)
    size = tokenizer.vocab_size
    told = f"the tokenizer of {source.fields.name} has {size} tokens and the embedding table {config.vocab}"
    if tokenizer.text_vocab_size > config.vocab:
        raise ValueError(told)
    if size > config.vocab:
        print(f"{told}: those beyond it are special tokens, which a prompt must not hold", file=sys.stderr)


def _write_weights(
    parameters: Mapping[str, Parameter], unfinished: Path, identity: str, hashes: dict[str, str]
) -> None:
    """Writes the parameters that `hashes` lacks, and adds them to it and to the journal as they are finished."""
    with byte_progress() as progress:
        sizes = {name: parameter.nbytes for name, parameter in parameters.items()}
        task = progress.add_task("converting", total=sum(sizes.values()))
        progress.advance(task, sum(sizes[name] for name in hashes))

        def deferred(name: str, parameter: Parameter) -> Deferred:
            def filled(array: np.ndarray) -> None:
                fill(parameter, array, lambda count: progress.advance(task, count))

            def written(array: np.ndarray) -> None:
                hashes[name] = hash_array(array)
                beside = unfinished / (JOURNAL + ".new")
                beside.write_text(json.dumps({"identity": identity, "hashes": hashes}))
                os.replace(beside, unfinished / JOURNAL)

            return Deferred(parameter.shape, parameter.dtype, filled, written, done=name in hashes)

        write_arrays(unfinished / WEIGHTS, {name: deferred(name, parameter) for name, parameter in parameters.items()})


def fill(parameter: Parameter, array: np.ndarray, advance: Callable[[int], None]) -> None:
    """Reads a parameter's tensors into an array of its shape and dtype; `advance` hears of the bytes."""
    targets = array if parameter.stacked else array[None]
    for (stored, tensor), target in zip(parameter.tensors, targets, strict=True):
        _read(stored, tensor, target)
        advance(target.nbytes)


def _read(name: str, tensor: StoredTensor, target: np.ndarray) -> None:
    """Reads `tensor` into `target`, whose dims are the tensor's or finer ones, casting where the dtypes differ.

    Raises ValueError for numbers that are not finite, and those that the other dtype cannot hold.
    """
    flat = target.reshape(tensor.shape)
    same = tensor.dtype == target.dtype
    values = flat if same else np.empty(tensor.shape, tensor.dtype)
    tensor.read_into(values)
    if not is_finite(values):
        count = values.size - np.count_nonzero(np.isfinite(values))
        raise ValueError(
            f"{name} holds {count:,} numbers that are NaN or infinite, of {values.size:,}: its files are damaged, or "
            "its training went wrong"
        )
    if same:
        return
    with np.errstate(over="ignore"):
        flat[:] = values.astype(target.dtype)
    if not is_finite(flat):
        raise ValueError(f"{name} holds values that {target.dtype} cannot: cast to bfloat16 or float32 instead")
