"""Sources to rows to batches: the one stream of rows that a run reads, on any mesh, from any point.

Row n of the stream does not depend on devices or processes. A step takes the next `batch` rows; which of them a process
makes follows from where its devices are on (data, fsdp), so processes that share a row make the same one. Streamed
documents are read and tokenised by every process: that costs tokenising once per process, and runs resume exactly, also
on another mesh.

A position in the stream is a small dict for JSON. Rows are packed block by block; a position names the block by where
it begins, and the row in it, so to resume is to pack one block again.
"""

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from treering.configs.data import Source
from treering.layers.parallel.sharding import Plan
from treering.models.tokenizer import Tokenizer
from treering.train.data.batch import Batch
from treering.train.data.packing import Document, Piece, Report, Row, empty_row, fill_row, pack_documents
from treering.train.data.sources import quiet_datasets, reading_source
from treering.train.data.store import TokenStore, encode_rows

T = TypeVar("T")
Position = dict[str, Any]


@runtime_checkable  # for the checks of annotations in tests
class Blocks(Protocol):
    """Documents of a source, some at a time, epoch after epoch without end."""

    def start(self) -> Position:
        """Where the first block begins; "epoch" counts from 0."""
        ...

    def read(self, at: Position) -> tuple[list[int], Callable[[int], Document], Position]:
        """Of the block that begins at `at`: the lengths of its documents, the documents by number, and the next one."""
        ...


class StoredBlocks:
    """Documents of a store, in another random order in each epoch."""

    def __init__(self, store: TokenStore, tokens: int, seed: tuple[int, ...]):
        self.store, self.tokens, self.seed = store, tokens, seed
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def start(self) -> Position:
        """See `Blocks`."""
        return {"epoch": 0, "document": 0}

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of an epoch in order, and the tokens up to the end of each."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = np.random.default_rng([*self.seed, epoch]).permutation(len(self.store))
            self._epoch = (epoch, order, np.cumsum(self.store.lengths[order]))
        return self._epoch[1:]

    def read(self, at: Position) -> tuple[list[int], Callable[[int], Document], Position]:
        """See `Blocks`."""
        order, ends = self._order(at["epoch"])
        first = at["document"]
        before = ends[first - 1] if first else 0
        last = min(int(np.searchsorted(ends, before + self.tokens)) + 1, len(order))
        numbers = order[first:last]
        following = {"epoch": at["epoch"], "document": last}
        if last == len(order):
            following = {"epoch": at["epoch"] + 1, "document": 0}
        return self.store.lengths[numbers].tolist(), lambda i: self.store.document(int(numbers[i])), following


class StreamedBlocks:
    """Documents in the order of a stream, tokenised as they are read; a block begins at a `state_dict`."""

    def __init__(self, rows: Any, source: Source, tokenizer: Tokenizer, *, tokens: int, vocab: int, end: bool):
        self.rows, self.source, self.tokenizer = rows, source, tokenizer
        self.tokens, self.vocab, self.end = tokens, vocab, end
        self._fresh = copy.deepcopy(rows.state_dict())
        self._open: tuple[Position, Iterator[Any]] | None = None
        """An iterator at a position."""
        self._last: tuple[Position, Any] | None = None
        """The block read last: the first is looked at before it is trained on."""

    def start(self) -> Position:
        """See `Blocks`."""
        return {"epoch": 0, "stream": self._fresh}

    def read(self, at: Position) -> tuple[list[int], Callable[[int], Document], Position]:
        """See `Blocks`. A row is encoded by itself, so that the block ends where the stream's state says."""
        if self._last is None or self._last[0] != at:
            with quiet_datasets():
                self._last = (at, self._next(at))
        return self._last[1]

    def _next(self, at: Position) -> tuple[list[int], Callable[[int], Document], Position]:
        if self._open is None or self._open[0] != at:
            self.rows.load_state_dict(copy.deepcopy(at["stream"]))
            self._open = (at, iter(self.rows))
        examples = self._open[1]
        documents: list[Document] = []
        total = 0
        following = {"epoch": at["epoch"] + 1, "stream": self._fresh}
        while (example := reading_source(self.source, lambda: next(examples, None))) is not None:
            ranges = None if self.source.trained is None else [example[self.source.trained]]
            (document,) = encode_rows(
                [example[self.source.column]],
                self.source,
                self.tokenizer,
                vocab=self.vocab,
                end=self.end,
                ranges=ranges,
            )
            if len(document.tokens):
                documents.append(document)
                total += len(document.tokens)
            if total >= self.tokens:
                following = {"epoch": at["epoch"], "stream": copy.deepcopy(self.rows.state_dict())}
                break
        self._open = (following, examples) if following["epoch"] == at["epoch"] else None
        return [len(document.tokens) for document in documents], documents.__getitem__, following


class PackedRows:
    """The packed rows of one source without end, from any position."""

    def __init__(self, blocks: Blocks, window: int, seed: tuple[int, ...], *, masked: bool = False):
        """`masked` says that some documents have tokens that are not trained on."""
        self.blocks, self.window, self.seed = blocks, window, seed
        self.masked = masked
        self.seek({"number": 0, "block": blocks.start(), "row": 0})

    @property
    def position(self) -> Position:
        """What `seek` takes to come back to the next row."""
        return {"number": self._number, "block": self._at, "row": self._row}

    def seek(self, position: Position) -> None:
        """Makes the row at `position` the next one."""
        self._number, self._at, self._row = position["number"], position["block"], position["row"]
        self._rows: list[list[Piece]] | None = None

    def peek(self, at: Position) -> tuple[Report, Position]:
        """What becomes of the block that begins at `at`, and where the next begins; the next row stays the same."""
        lengths, document, following = self.blocks.read(at)
        return self._pack(lengths, document)[1], following

    def _pack(self, lengths: list[int], document: Callable[[int], Document]) -> tuple[list[list[Piece]], Report]:
        return pack_documents(lengths, self.window, document=document if self.masked else None)

    def _read(self) -> None:
        lengths, self._document, self._following = self.blocks.read(self._at)
        rows, _ = self._pack(lengths, self._document)
        order = np.random.default_rng([*self.seed, self._number]).permutation(len(rows))
        self._rows = [rows[i] for i in order]

    def next(self) -> Callable[[], Row]:
        """The next row, made when the result is called.

        Raises ValueError where an epoch has nothing to train on.
        """
        epochs = self._at["epoch"]
        while self._rows is None or self._row >= len(self._rows):
            if self._rows is not None:
                self._number, self._at, self._row = self._number + 1, self._following, 0
            if self._at["epoch"] > epochs + 1:
                raise ValueError("the data has no document of two tokens or more: there is nothing to train on")
            self._read()
        pieces, document = self._rows[self._row], self._document
        self._row += 1
        return lambda: fill_row(pieces, document, self.window)


class Mixture:
    """Rows of several sources: at each point each has had its share, as nearly as whole rows allow."""

    def __init__(self, parts: Sequence[PackedRows], weights: Sequence[float]):
        self.parts = parts
        self.shares = np.asarray(weights, np.float64) / np.sum(weights)
        self.counts = [0] * len(parts)

    @property
    def position(self) -> Position:
        """What `seek` takes to come back to the next row."""
        return {"counts": list(self.counts), "parts": [copy.deepcopy(part.position) for part in self.parts]}

    def seek(self, position: Position) -> None:
        """Makes the row at `position` the next one."""
        self.counts = list(position["counts"])
        for part, at in zip(self.parts, position["parts"], strict=True):
            part.seek(copy.deepcopy(at))

    def next(self) -> Callable[[], Row]:
        """The next row, of the source that is furthest behind its share."""
        owed = self.shares * (sum(self.counts) + 1) - np.asarray(self.counts)
        chosen = int(np.argmax(owed))
        self.counts[chosen] += 1
        return self.parts[chosen].next()


def process_rows(plan: Plan, batch: int, window: int) -> range:
    """The rows of a global batch that this process's devices hold a part of: they are consecutive."""
    shape = (batch, window)
    slices = plan.sharding("batch seq", shape).addressable_devices_indices_map(shape).values()
    bounds = [index[0].indices(batch)[:2] for index in slices if index is not None]
    return range(min(start for start, _ in bounds), max(stop for _, stop in bounds))


def stack(rows: Sequence[Row]) -> Batch:
    """A host batch of rows."""
    return Batch(**{name: np.stack([row[name] for row in rows]) for name in rows[0]})


def batches(mixture: Mixture, batch: int, mine: range) -> Iterator[tuple[Batch, Position]]:
    """Without end: the rows `mine` of the next global batch, and the position after all of it."""
    while True:
        rows = [mixture.next() for _ in range(batch)]
        yield stack([rows[i]() for i in mine]), mixture.position


def held_out_batches(
    stores: Sequence[TokenStore],
    window: int,
    batch: int,
    mine: range,
    *,
    stride: int | None = None,
    limit: int | None = None,
) -> Iterator[Batch]:
    """Every document of `stores` once, in order; the last batch is filled up with empty rows.

    `stride` is that of `cut`; `limit` is the largest number of rows.
    """
    rows: list[Callable[[], Row]] = []
    for store in stores:
        document = None if store.trained is None else store.document
        packed, _ = pack_documents(store.lengths, window, stride=stride, document=document)
        rows += [lambda pieces=pieces, store=store: fill_row(pieces, store.document, window) for pieces in packed]
    rows = rows[:limit]
    rows += [lambda: empty_row(window)] * (-len(rows) % batch)
    for first in range(0, len(rows), batch):
        yield stack([rows[first + i]() for i in mine])


def ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """The same items, each made in a thread while the one before is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item
