"""From a Hugging Face folder, a Meta folder or a GGUF file to a checkpoint, one parameter at a time."""

import json
import os
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from treering.configs.errors import UserError
from treering.configs.model import ModelConfig
from treering.models.checkpoint.arrays import DTYPES, Deferred, write_arrays
from treering.models.checkpoint.atomic_folder import empty, written_beside
from treering.models.checkpoint.hashing import fingerprint, hash_array
from treering.models.checkpoint.model import check_destination, finish, main_dtype
from treering.models.checkpoint.record import WEIGHTS, Record
from treering.models.files import copy_folder
from treering.models.formats.match import Parameter, fill, match
from treering.models.formats.open import open_source, read_source_config
from treering.models.formats.source import Source
from treering.models.progress import byte_progress
from treering.models.tokenizer import TOKENIZER, Tokenizer

JOURNAL = "progress.json"


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    ignore_fields: Collection[str] = (),
) -> None:
    """Writes the weights and the tokenizer at `src` as a checkpoint at `dst`.

    Parameters keep their dtype, or are cast to `dtype`; `ignore_fields` names fields of config.json that are ignored.
    An interrupted conversion of the same files is resumed. Raises ValueError and FileNotFoundError with one line for
    what is missing, unexpected or not supported, before anything is written; and for numbers that are not finite, after
    which what was written is removed.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError("it is not known", field="dtype", value=dtype, works=DTYPES)
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
            copy_folder(Path(scratch), unfinished / TOKENIZER)
            _write_weights(parameters, unfinished, identity, hashes)
            (unfinished / JOURNAL).unlink()
            record = Record(
                config=config,
                dtype=main_dtype(parameters),
                fingerprint=fingerprint(hashes.items()),
                source=source.description,
            )
            finish(unfinished, dst, record)


def _resume(unfinished: Path, identity: str) -> dict[str, str]:
    """Hashes of the parameters that are in `unfinished` already; empties it if they are of another source."""
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
        print(f"{source.fields.name}: there is no tokenizer next to it, so the checkpoint has none", file=sys.stderr)
        return
    tokenizer = Tokenizer.from_folder(folder, origin=source.fields.name)
    size = tokenizer.vocab_size
    message = f"the tokenizer of {source.fields.name} has {size} tokens and the embedding table {config.vocab}"
    if tokenizer.text_vocab_size > config.vocab:
        raise ValueError(message)
    if size > config.vocab:
        print(f"{message}: those beyond it are special tokens, which a prompt must not contain", file=sys.stderr)


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
