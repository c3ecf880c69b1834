"""The tokenizer of a run: that of its weights, one in a folder, or a new one, made once."""

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

from treering.configs.run import RunConfig
from treering.models.conversion.load import open_model
from treering.models.tokenizer import TOKENIZER
from treering.train.data.new_tokenizer import BYTE_VOCAB, write_tokenizer
from treering.train.data.sources import open_source, reading_source
from treering.train.data.store import cache_folder, hash_folder


def find_tokenizer(config: RunConfig, weights: Path | None) -> Path:
    """The folder of the run's tokenizer, made in the cache where it is a new one. A run that has begun keeps its own.

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
            raise ValueError("data.tokenizer is not set, and random weights bring none: give a folder, bytes or bpe")
        return _tokenizer_of(weights, cache_folder(config))
    folder = Path(os.path.expanduser(wanted))
    if not folder.is_dir():
        raise ValueError(f"data.tokenizer {wanted} is no folder: give one, or bytes or bpe for a new tokenizer")
    return folder / TOKENIZER if (folder / TOKENIZER).is_dir() else folder


def _tokenizer_of(weights: Path, cache: Path) -> Path:
    """A folder in the cache, named after what it holds, with the tokenizer of weights."""
    with TemporaryDirectory() as scratch:
        open_model(weights).save_tokenizer(Path(scratch))
        folder = cache / "tokenizers" / hash_folder(Path(scratch))
        return _made_once(folder, functools.partial(shutil.copytree, scratch))


def _made_once(folder: Path, make: Callable[[Path], Any]) -> Path:
    """`folder`, which `make` writes where it is not there yet: whole or not at all, by one process."""
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
            raise ValueError("data.tokenizer bpe with data.streaming: byte pairs are learned from stored data")
        texts = [(source, open_source(source, streaming=False, cache=cache)) for source in data.sources]
        known = [kind, config.model.vocab, *(rows._fingerprint for _, rows in texts)]
    folder = cache / "tokenizers" / hashlib.sha256(json.dumps(known).encode()).hexdigest()[:24]

    def make(partial: Path) -> None:
        columns = [reading_source(source, functools.partial(rows.__getitem__, source.column)) for source, rows in texts]
        rows = (row for column in columns for row in column if row)
        write_tokenizer(partial, "bpe" if kind == "bpe" else "bytes", rows, config.model.vocab)

    return _made_once(folder, make)
