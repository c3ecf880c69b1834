"""Documents to rows of one length: long documents are cut, short ones packed together.

The rules. A document longer than a window is cut into consecutive pieces of one window each, and a last one with what
remains. A piece counts its positions from 0 and attends to nothing before it. Pieces are packed best fit: longest
first, each into the row that it fills best. Each token's target is the token that follows it in its *document*, whether
or not a cut is between them, so a document of n tokens has n - 1 targets however it is cut and packed. A piece without
any target (a document of one token, a last piece of one, tokens that are not trained) is dropped.
"""

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
from jaxtyping import Bool, Int

from treering.train.data.batch import IGNORED


def count(number: int, noun: str) -> str:
    """Such as "1 row" and "2,000 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Document:
    """Tokens, and which of them the model is trained to predict."""

    tokens: Int[np.ndarray, "length"]
    trained: Bool[np.ndarray, "length"] | None = None
    """None trains all of them."""


@dataclass(frozen=True)
class Piece:
    """Tokens start to stop of a document, which is known by its number."""

    document: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of the tokens of some documents; reports add up."""

    documents: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    """Tokens that are in a row. With a stride shorter than the window, tokens are in several."""
    dropped: int = 0
    """Tokens of pieces without a target."""
    rows: int = 0
    padding: int = 0

    def __add__(self, other: "Report") -> "Report":
        return Report(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def __str__(self) -> str:
        share = self.padding / max(1, self.padding + self.tokens_out)
        return (
            f"{count(self.documents, 'document')}, {count(self.tokens_in, 'token')} in, {self.tokens_out:,} out, "
            f"{self.dropped:,} dropped; {count(self.rows, 'row')} with {share:.2%} padding"
        )

    def to_dict(self) -> dict[str, int]:
        """For a file."""
        return asdict(self)


def cut(document: int, length: int, window: int, *, stride: int | None = None) -> list[Piece]:
    """The pieces of a document, none longer than `window`.

    With a `stride` below the window, pieces of a long document start that many tokens apart and overlap. That is for
    evaluation: every token with a window of text before it is scored once in each part of a window that is a stride
    long, so that losses by position are losses on the same text.
    """
    apart = window if stride is None or length <= window else min(stride, window)
    return [Piece(document, start, min(start + window, length)) for start in range(0, length, apart)]


def pack(pieces: Iterable[Piece], window: int) -> list[list[Piece]]:
    """Rows of pieces, best fit, longest piece first: equal input gives equal rows."""
    rows: list[list[Piece]] = []
    open_rows: list[tuple[int, int]] = []
    """(space left, row), sorted."""
    for piece in sorted(pieces, key=len, reverse=True):
        at = bisect.bisect_left(open_rows, (len(piece), -1))
        if at < len(open_rows):
            space, row = open_rows.pop(at)
        else:
            space, row = window, len(rows)
            rows.append([])
        rows[row].append(piece)
        if space > len(piece):
            bisect.insort(open_rows, (space - len(piece), row))
    return rows


def pack_documents(
    lengths: Sequence[int] | Int[np.ndarray, "documents"],
    window: int,
    *,
    stride: int | None = None,
    document: Callable[[int], Document] | None = None,
) -> tuple[list[list[Piece]], Report]:
    """Cuts and packs documents numbered from 0, and says what became of their tokens.

    `document` gives the documents by number, where some of their tokens are not trained.
    """
    pieces: list[Piece] = []
    dropped = 0
    for number, length in enumerate(lengths):
        trained = None if document is None else document(number).trained
        for piece in cut(number, int(length), window, stride=stride):
            targets = slice(piece.start + 1, min(piece.stop + 1, int(length)))
            if targets.start == targets.stop or (trained is not None and not trained[targets].any()):
                dropped += len(piece)
            else:
                pieces.append(piece)
    rows = pack(pieces, window)
    tokens_out = sum(map(len, pieces))
    return rows, Report(
        documents=len(lengths),
        tokens_in=int(np.sum(lengths, dtype=np.int64)),
        tokens_out=tokens_out,
        dropped=dropped,
        rows=len(rows),
        padding=len(rows) * window - tokens_out,
    )


Row = dict[str, Int[np.ndarray, "seq"]]
"""The fields of a `Batch`, for one row in token order."""


def empty_row(window: int) -> Row:
    """A row of padding: it attends to nothing and trains nothing."""
    fills = {"tokens": 0, "targets": IGNORED, "positions": -1, "segments": 0}
    return {name: np.full(window, fill, np.int32) for name, fill in fills.items()}


def fill_row(pieces: Sequence[Piece], document: Callable[[int], Document], window: int) -> Row:
    """The row that holds `pieces` one after the other, padded to `window`; `document` gives a document by number."""
    row = empty_row(window)
    at = 0
    for segment, piece in enumerate(pieces, 1):
        whole = document(piece.document)
        here = slice(at, at + len(piece))
        row["tokens"][here] = whole.tokens[piece.start : piece.stop]
        row["positions"][here] = np.arange(len(piece))
        row["segments"][here] = segment
        following = slice(piece.start + 1, piece.stop + 1)
        targets = whole.tokens[following]
        if whole.trained is not None:
            targets = np.where(whole.trained[following], targets, IGNORED)
        row["targets"][at : at + len(targets)] = targets
        at += len(piece)
    assert at <= window
    return row
