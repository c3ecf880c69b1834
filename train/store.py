"""Tokenised documents on disk: written once, read by memory map, found again by a fingerprint.

A store is a folder `CACHE/tokens/FINGERPRINT/{tokens.bin, offsets.npy, info.json}`. It is written beside its place and
renamed when it is whole.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from jaxtyping import Int

from configs.data import Source
from models.tokenizer import Tokenizer
from train.packing import Document
from train.sources import open_source, told

_VERSION = 1
"""Part of the fingerprint: rises when the same data would give other tokens."""
_ROWS = 512
"""Rows of data that are tokenised at a time."""


@dataclass(frozen=True)
class TokenStore:
    """The documents of one source."""

    tokens: np.ndarray
    offsets: Int[np.ndarray, "documents_1"]
    """Where each document begins, and the end of the last."""
    text_bytes: int
    """Bytes of the text in UTF-8; 0 where the source holds token ids."""
    empty: int
    """Rows without text, which are no documents."""
    source: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int[np.ndarray, "documents"]:
        """Tokens of each document."""
        return np.diff(self.offsets)

    def document(self, number: int) -> Document:
        """A document by its number."""
        return Document(np.asarray(self.tokens[self.offsets[number] : self.offsets[number + 1]], np.int32))


def encode_rows(rows: list[Any], source: Source, tokenizer: Tokenizer, *, vocab: int, end: bool) -> list[list[int]]:
    """Tokens of texts, or token ids as they are; [] for a row without text.

    Raises ValueError for what is neither, and for ids that the model's vocabulary does not have.
    """
    texts = [row for row in rows if isinstance(row, str) and row]
    if end and texts and tokenizer.end_id is None:
        raise ValueError("the tokenizer has no end token: give one that has, or set data.end to False")
    encoded = iter(tokenizer.encode_texts(texts) if texts else [])
    ending = [tokenizer.end_id] if end and tokenizer.end_id is not None else []
    documents: list[list[int]] = []
    for row in rows:
        if isinstance(row, str) and row:
            ids = next(encoded)
            documents.append(ids if ids[-1:] == ending else ids + ending)
        elif row is None or row == "":
            documents.append([])
        elif isinstance(row, list) and all(isinstance(token, int) for token in row):
            documents.append(row)
        else:
            raise ValueError(f"column {source.column!r} of {source.path} holds {row!r:.60}: it is neither text nor ids")
    for ids in documents:
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(
                f"{source.path} has the token id {wrong}, and the model's vocabulary has {vocab} tokens, 0 to "
                f"{vocab - 1}: use the tokenizer that belongs to the model"
            )
    return documents


def tokenise(
    source: Source, tokenizer: Tokenizer, *, tokenizer_hash: str, vocab: int, end: bool, cache: Path
) -> TokenStore:
    """The store of a source: the one in the cache, or a new one.

    Processes that share the cache wait for the one that writes. Raises what `open_source` and `encode_rows` do.
    """
    rows = open_source(source, streaming=False, cache=cache)
    dtype = "uint16" if vocab <= 1 << 16 else "uint32"
    settings = [_VERSION, rows._fingerprint, source.column, tokenizer_hash, end, dtype]
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
    folder = cache / "tokens" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "info.json").is_file():
            _write(folder, dtype, lambda: _documents(rows, source, tokenizer, vocab, end))
    return _read(folder, source, vocab)


def _documents(
    rows: Any, source: Source, tokenizer: Tokenizer, vocab: int, end: bool
) -> Iterator[tuple[list[list[int]], int]]:
    """Documents by some at a time, each with the bytes of their text."""
    batches = rows.iter(batch_size=_ROWS)

    def read() -> tuple[list[Any], int] | None:
        batch = next(batches, None)
        if batch is None:
            return None
        column = batch[source.column]
        return column, sum(len(row.encode()) for row in column if isinstance(row, str))

    while (found := told(source, read)) is not None:
        yield encode_rows(found[0], source, tokenizer, vocab=vocab, end=end), found[1]


def _write(folder: Path, dtype: str, documents: Callable[[], Iterator[tuple[list[list[int]], int]]]) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    lengths: list[int] = []
    text_bytes = empty = largest = 0
    with open(partial / "tokens.bin", "wb") as out:
        for some, size in documents():
            text_bytes += size
            for ids in some:
                if not ids:
                    empty += 1
                    continue
                out.write(np.asarray(ids, dtype).tobytes())
                lengths.append(len(ids))
                largest = max(largest, max(ids))
    np.save(partial / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64))
    info = {"dtype": dtype, "text_bytes": text_bytes, "empty": empty, "largest": largest}
    (partial / "info.json").write_text(json.dumps(info))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def _read(folder: Path, source: Source, vocab: int) -> TokenStore:
    info = json.loads((folder / "info.json").read_text())
    offsets = np.load(folder / "offsets.npy")
    if offsets[-1] == 0:
        raise ValueError(f"{source.path} has no text in column {source.column!r}: every row is empty")
    if info["largest"] >= vocab:
        raise ValueError(
            f"{source.path} has the token id {info['largest']}, and the model's vocabulary has {vocab} tokens, 0 to "
            f"{vocab - 1}: use the tokenizer that belongs to the model"
        )
    tokens = np.memmap(folder / "tokens.bin", info["dtype"], "r")
    return TokenStore(tokens, offsets, info["text_bytes"], info["empty"], source.path)


def hash_folder(folder: Path) -> str:
    """A hash of the files of a folder, names and contents."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
