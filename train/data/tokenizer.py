"""The tokenizer of a run: that of its weights, one in a folder, or a new one, created once."""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock

from treering.configs.errors import UserError
from treering.configs.run import RunConfig
from treering.models.conversion.load import open_model
from treering.models.files import copy_folder
from treering.models.tokenizer import TOKENIZER
from treering.train.data.new_tokenizer import BYTE_VOCAB, write_tokenizer
from treering.train.data.sources import as_field, open_source, reading_source
from treering.train.data.store import cache_folder, hash_folder

_TOKENIZERS = ("a folder with a tokenizer", "bytes", "bpe")


def find_tokenizer(config: RunConfig, weights: Path | None) -> Path:
    """The folder of the run's tokenizer, created in the cache where it is new. A run that has begun keeps its own.

    `weights` are those that the run starts from, None for random ones.

    Raises ValueError where there is none, or it has more tokens than the model.
    """
    wanted, own = config.data.tokenizer, Path(config.folder) / TOKENIZER
    if own.is_dir():
        return own
    if wanted in ("bytes", "bpe"):
        return _new_tokenizer(config)
    if wanted is None:
        if weights is None:
            raise UserError("random weights have no tokenizer", field="data.tokenizer", value=None, works=_TOKENIZERS)
        return _tokenizer_of(weights, cache_folder(config))
    folder = Path(os.path.expanduser(wanted))
    if not folder.is_dir():
        raise UserError("it is not a folder", field="data.tokenizer", value=wanted, works=_TOKENIZERS)
    return folder / TOKENIZER if (folder / TOKENIZER).is_dir() else folder


def _tokenizer_of(weights: Path, cache: Path) -> Path:
    """A folder in the cache, named after what it holds, with the tokenizer of weights."""
    with TemporaryDirectory() as scratch:
        open_model(weights).save_tokenizer(Path(scratch))
        folder = cache / "tokenizers" / hash_folder(Path(scratch))
        return _made_once(folder, functools.partial(copy_folder, Path(scratch)))


def _made_once(folder: Path, make: Callable[[Path], Any]) -> Path:
    """`folder`, which `make` writes where it does not exist: completely or not at all, by one process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            os.replace(partial, folder)
    return folder


def _new_tokenizer(config: RunConfig) -> Path:
    kind, data, cache = config.data.tokenizer, config.data, cache_folder(config)
    texts, known = [], [kind, BYTE_VOCAB]
    if kind == "bpe":
        if data.streaming:
            rule = "byte pairs are learned from stored data, not with data.streaming"
            raise UserError(rule, field="data.tokenizer", value=kind)
        for number, source in enumerate(data.sources):
            with as_field(f"data.sources.{number}"):
                texts.append((source, open_source(source, streaming=False, cache=cache)))
        known = [kind, config.model.vocab, *(rows._fingerprint for _, rows in texts)]
    folder = cache / "tokenizers" / hashlib.sha256(json.dumps(known).encode()).hexdigest()[:24]

    def make(partial: Path) -> None:
        columns = [reading_source(source, functools.partial(rows.__getitem__, source.column)) for source, rows in texts]
        rows = (row for column in columns for row in column if row)
        write_tokenizer(partial, "bpe" if kind == "bpe" else "bytes", rows, config.model.vocab)

    return _made_once(folder, make)
