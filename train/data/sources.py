"""Data sets opened with `datasets`: local files, saved folders, the hub. What is wrong with one is told in one line."""

import bz2
import contextlib
import glob
import gzip
import json
import logging
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from treering.configs.data import Source
from treering.train.data.python_docs import SPLITS, python_docs

PYTHON_DOCS = "python-docs"
_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".text": "text"}
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_COMPRESSED = (*_OPENERS, ".zst")
_UNITS = {"file": "document", "paragraph": "paragraph", "line": "line"}


def open_source(source: Source, *, streaming: bool, cache: Path) -> Any:
    """A `datasets.Dataset`, or an IterableDataset where `streaming`, of the source's columns.

    `datasets` keeps its copy of files that are not streamed under `cache`.

    Raises ValueError for a path that is not there or cannot be read, a split or column that is missing, and a data set
    without rows.
    """
    opened = reading_source(source, lambda: _open(source, streaming, cache))
    first = reading_source(source, lambda: next(iter(opened)))
    columns = [source.column] if source.trained is None else [source.column, source.trained]
    for column in columns:
        if column not in first:
            raise ValueError(f"{source.path} has no column {column!r}: its columns are {', '.join(first)}")
    return opened.select_columns(columns)


def reading_source(source: Source, read: Callable[[], Any]) -> Any:
    """The result of `read()`; whatever it raises becomes a ValueError in one line that names the source."""
    try:
        return read()
    except Exception as error:  # Whatever `datasets` and the readers of formats raise.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # What `datasets` raises where files hold not one row to learn the columns from.
        if isinstance(cause, StopIteration) or type(cause).__name__ == "SchemaInferenceError":
            raise ValueError(f"{source.path} has no rows in {source.split}: there is nothing to train on") from None
        if isinstance(cause, UnicodeError):
            raise ValueError(f"{_undecodable(source)}: repair or remove it") from None
        if (broken := _broken_line(source)) is not None:
            raise ValueError(f"{broken}: repair or remove it") from None
        if isinstance(error, ValueError) and source.path in str(error):
            raise
        raise ValueError(f"{source.path} cannot be read: {' '.join(str(cause).split())[:300]}") from error


def _open(source: Source, streaming: bool, cache: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # What it would log it also raises.
    kind, folder = _format(source.path), os.path.isdir(os.path.expanduser(source.path))
    if source.subset is not None and (kind is not None or folder or source.path == PYTHON_DOCS):
        raise ValueError(f"subset {source.subset} of {source.path}: only data sets on the hub have subsets")
    if source.unit != "file" and (kind != "text" or folder):
        raise ValueError(f"unit {source.unit} of {source.path}: it goes with plain text; elsewhere documents are rows")
    if source.path == PYTHON_DOCS:
        if source.split not in SPLITS:
            raise ValueError(f"{source.path} has no split {source.split!r}: its splits are {', '.join(SPLITS)}")
        return _stream(datasets.Dataset.from_dict(python_docs(source.split)), streaming)
    if folder:
        return _stream(_saved(source), streaming)
    where: dict[str, Any] = {"split": source.split, "streaming": streaming, "cache_dir": str(cache / "arrow")}
    if kind is None:
        _check_hub_name(source)
        return datasets.load_dataset(source.path, source.subset, **where)
    options: dict[str, Any] = {"sample_by": _UNITS[source.unit]} if kind == "text" else {}
    return datasets.load_dataset(kind, data_files={"train": files(source)}, **where, **options)


def files(source: Source) -> list[str]:
    """The files that the source's path names, sorted.

    Raises ValueError where there are none.
    """
    found = glob_files(source.path)
    if not found:
        raise ValueError(f"{source.path} does not exist: name a file, or a pattern that matches some")
    return found


def glob_files(pattern: str) -> list[str]:
    """What a pattern matches, sorted."""
    return sorted(glob.glob(os.path.expanduser(pattern), recursive=True))


def _format(path: str) -> str | None:
    """The reader of `datasets` for files with this path's ending; None for what has no ending of a known format."""
    endings = [ending for ending in Path(path).suffixes if ending not in _COMPRESSED]
    return _FORMATS.get(endings[-1]) if endings else None


def _check_hub_name(source: Source) -> None:
    """Raises ValueError for a path that can be no name on the hub."""
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source.path) or Path(source.path).exists():
        raise ValueError(
            f"{source.path} is no data that can be read: give a file ({', '.join(_FORMATS)}, also as "
            f"{', '.join(_COMPRESSED)}), a folder that `datasets` saved, or the name of a data set on the hub"
        )


def _saved(source: Source) -> Any:
    """A data set that `datasets` saved in a folder, with the source's split cut out of it."""
    import datasets

    folder = os.path.expanduser(source.path)
    if not any(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json")):
        raise ValueError(
            f"{source.path} is a folder that `datasets` did not save: name its files by a pattern, such as "
            f"{os.path.join(source.path, '*.jsonl')}"
        )
    found = datasets.load_from_disk(folder)
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    try:
        (part,) = datasets.ReadInstruction.from_spec(source.split).to_absolute(
            {name: len(rows) for name, rows in splits.items()}
        )
    except (ValueError, AssertionError):
        raise ValueError(
            f"{source.path} has no split {source.split!r}: its splits are {', '.join(map(str, splits))}"
        ) from None
    rows = splits[part.splitname]
    start, stop = part.from_ or 0, len(rows) if part.to is None else part.to
    return rows if (start, stop) == (0, len(rows)) else rows.select(range(start, stop))


def _stream(rows: Any, streaming: bool) -> Any:
    return rows.to_iterable_dataset() if streaming else rows


def _undecodable(source: Source) -> str:
    """Where the text of a source is no UTF-8, as exactly as can be told."""
    if _format(source.path) in ("json", "text"):
        for file in files(source):
            for number, line in enumerate(_lines(file), 1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    return f"{file}, line {number} is no valid UTF-8 (byte {error.start + 1} of the line)"
    return f"{source.path} has a row that is no valid UTF-8"


def _broken_line(source: Source) -> str | None:
    """Which line of a source of JSON lines is no JSON object; None where all are, and for other sources."""
    for file, number, line in _json_lines(source):
        try:
            if not isinstance(json.loads(line), dict):
                return f"{file}, line {number} holds {line.strip().decode()!r:.60}, which is no JSON object"
        except json.JSONDecodeError as error:
            return f"{file}, line {number} is no JSON ({error.msg} at character {error.pos + 1})"
        except UnicodeDecodeError:
            continue
    return None


def place_of(source: Source, column: str | None, value: Any) -> str:
    """The file and line of the first row of JSON lines that has this value in a column; the source for others."""
    for file, number, line in _json_lines(source):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and column in row and row[column] == value:
                return f"{file}, line {number}"
    return source.path


def _json_lines(source: Source) -> Iterator[tuple[str, int, bytes]]:
    """File, number and text of each line that is not empty. A .json file may be one value over many lines: then its
    first line is no JSON, and it has none."""
    for file in glob_files(source.path) if _format(source.path) == "json" else ():
        with contextlib.suppress(OSError, EOFError, lzma.LZMAError, zlib.error):  # damaged: told as it was met
            for number, line in enumerate(_lines(file), 1):
                if number == 1 and ".jsonl" not in Path(file).suffixes and not _is_json(line):
                    break
                if line.strip():
                    yield file, number, line


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _lines(file: str) -> Iterator[bytes]:
    if file.endswith(".zst"):
        return
    with _OPENERS.get(Path(file).suffix, open)(file, "rb") as lines:
        yield from lines
