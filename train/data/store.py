"""Tokenised documents on disk: written once, read by memory map, found again by a fingerprint.

A store is a folder `CACHE/tokens/FINGERPRINT/{tokens.bin, trained.bin, offsets.npy, info.json}`; `trained.bin` is
empty where all tokens are trained on. It is written under another name and renamed when it is complete.
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

from treering.configs.data import Source
from treering.configs.errors import UserError
from treering.configs.run import RunConfig
from treering.models.tokenizer import Tokenizer
from treering.train.data.packing import Document, count
from treering.train.data.sources import location_of, open_source, reading_source

_VERSION = 2
"""Part of the fingerprint: increased when the same data would give other tokens."""
_ROWS = 512
"""Rows of data that are tokenised at a time."""


def cache_folder(config: RunConfig) -> Path:
    """The folder for tokenised data."""
    return Path(os.path.expanduser(config.data.cache))


@dataclass(frozen=True)
class TokenStore:
    """The documents of one source."""

    tokens: np.ndarray
    trained: np.ndarray | None
    """Whether each token is trained on; None where all are."""
    offsets: Int[np.ndarray, "documents_1"]
    """Where each document begins, and the end of the last."""
    text_bytes: int
    """Bytes in UTF-8 of the text that is trained on; 0 where the source holds token ids."""
    empty: int
    """Rows without text, which are no documents."""
    source: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int[np.ndarray, "documents"]:
        """Tokens of each document."""
        return np.diff(self.offsets)

    @property
    def targets(self) -> int:
        """Tokens that are predicted in one pass over all documents."""
        if self.trained is None:
            return int((self.lengths - 1).sum())
        return int(self.trained.sum() - self.trained[self.offsets[:-1]].sum())

    def document(self, number: int) -> Document:
        """A document by its number."""
        here = slice(self.offsets[number], self.offsets[number + 1])
        trained = None if self.trained is None else np.asarray(self.trained[here])
        return Document(np.asarray(self.tokens[here], np.int32), trained)


def encode_rows(
    rows: list[Any], source: Source, tokenizer: Tokenizer, *, vocab: int, end: bool, ranges: list[Any] | None = None
) -> list[Document]:
    """Texts tokenised, or token ids as they are; a document without tokens for a row without text.

    `ranges` has, for each text, the characters that are trained on.

    Raises ValueError for what is neither text nor token ids, and for ids outside the model's vocabulary.
    """
    if end and tokenizer.end_id is None and any(isinstance(row, str) for row in rows):
        rule = "the tokenizer has no end token: use --data.no-end, or another tokenizer"
        raise UserError(rule, field="data.end", value=end)
    ending = [tokenizer.end_id] if end and tokenizer.end_id is not None else []
    texts = [row for row in rows if isinstance(row, str) and row] if ranges is None else []
    encoded = iter(tokenizer.encode_texts(texts) if texts else [])
    documents: list[Document] = []
    for number, row in enumerate(rows):
        trained = None
        if isinstance(row, str) and row and ranges is not None:
            ids, places = tokenizer.encode_with_places(row)
            within = _checked(ranges[number], row, source)
            trained = np.array([any(first <= place < last for first, last in within) for place in places])
            trained = np.append(trained, [False] * len(ending))
            ids = ids + ending
        elif isinstance(row, str) and row:
            ids = next(encoded)
            ids = ids if ids[-1:] == ending else ids + ending
        elif row is None or row == "":
            ids = []
        elif isinstance(row, list) and all(isinstance(token, int) for token in row) and ranges is None:
            ids = row
        else:
            rule = "it must be text, or a list of token ids" if ranges is None else "it must be text, to have ranges"
            location = location_of(source, source.column, row)
            raise UserError(rule, field=source.column, value=f"{row!r:.60}", **location)
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            location = location_of(source, source.column, row)
            raise UserError(_outside(vocab), field=source.column, value=wrong, **location)
        documents.append(Document(np.asarray(ids, np.int32), trained))
    return documents


def _outside(vocab: int) -> str:
    return f"it must be a token id of the model's vocabulary, 0 to {vocab - 1}: use the model's tokenizer"


def _checked(ranges: Any, text: str, source: Source) -> list[list[int]]:
    """The ranges of one text; ValueError where they are not ranges of it."""
    for pair in ranges or []:
        if len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= len(text):
            rule = f"it must be a range [first, end] within the text's {count(len(text), 'character')}"
            raise UserError(rule, field=source.trained, value=pair, **location_of(source, source.trained, ranges))
    return ranges or []


def tokenise(
    source: Source, tokenizer: Tokenizer, *, tokenizer_hash: str, vocab: int, end: bool, cache: Path
) -> TokenStore:
    """The store of a source: the one in the cache, or a new one.

    Processes that share the cache wait for the one that writes. Raises what `open_source` and `encode_rows` do.
    """
    rows = open_source(source, streaming=False, cache=cache)
    dtype = "uint16" if vocab <= 1 << 16 else "uint32"
    settings = [_VERSION, rows._fingerprint, source.column, source.trained, tokenizer_hash, end, dtype]
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
    folder = cache / "tokens" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "info.json").is_file():
            _write(folder, dtype, lambda: _documents(rows, source, tokenizer, vocab, end))
    return _read(folder, source, vocab)


def _documents(
    rows: Any, source: Source, tokenizer: Tokenizer, vocab: int, end: bool
) -> Iterator[tuple[list[Document], int]]:
    """Some documents at a time, with the bytes of the text in them that is trained on."""
    batches = rows.iter(batch_size=_ROWS)

    def read() -> tuple[list[Any], list[Any] | None, int] | None:
        batch = next(batches, None)
        if batch is None:
            return None
        column, ranges = batch[source.column], None if source.trained is None else batch[source.trained]
        texts = [row for row in column if isinstance(row, str)]
        if ranges is not None:
            texts = [row[a:b] for row, within in zip(column, ranges, strict=True) if row for a, b in within or []]
        return column, ranges, sum(len(text.encode()) for text in texts)

    while (found := reading_source(source, read)) is not None:
        column, ranges, size = found
        yield encode_rows(column, source, tokenizer, vocab=vocab, end=end, ranges=ranges), size


def _write(folder: Path, dtype: str, documents: Callable[[], Iterator[tuple[list[Document], int]]]) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    lengths: list[int] = []
    text_bytes = empty = largest = 0
    with open(partial / "tokens.bin", "wb") as out, open(partial / "trained.bin", "wb") as trained:
        for some, size in documents():
            text_bytes += size
            for document in some:
                if not len(document.tokens):
                    empty += 1
                    continue
                out.write(document.tokens.astype(dtype).tobytes())
                if document.trained is not None:
                    trained.write(document.trained.tobytes())
                lengths.append(len(document.tokens))
                largest = max(largest, int(document.tokens.max()))
    np.save(partial / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64))
    info = {"dtype": dtype, "text_bytes": text_bytes, "empty": empty, "largest": largest}
    (partial / "info.json").write_text(json.dumps(info))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def _read(folder: Path, source: Source, vocab: int) -> TokenStore:
    info = json.loads((folder / "info.json").read_text())
    offsets = np.load(folder / "offsets.npy")
    if offsets[-1] == 0:
        raise UserError("every row is empty", field=source.column, file=source.path)
    if info["largest"] >= vocab:
        raise UserError(_outside(vocab), field=source.column, value=info["largest"], file=source.path)
    tokens = np.memmap(folder / "tokens.bin", info["dtype"], "r")
    trained = None if source.trained is None else np.memmap(folder / "trained.bin", bool, "r")
    return TokenStore(tokens, trained, offsets, info["text_bytes"], info["empty"], source.path)


def hash_folder(folder: Path) -> str:
    """A hash of the files of a folder, names and contents."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
