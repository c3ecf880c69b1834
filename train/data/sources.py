"""Data sets opened with `datasets`: local files, saved folders, the hub. An error is one line that says where it is."""

import bz2
import contextlib
import dataclasses
import glob
import gzip
import json
import logging
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from treering.configs.data import Source
from treering.configs.errors import UserError
from treering.train.data.python_docs import SPLITS, python_docs

PYTHON_DOCS = "python-docs"
_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".text": "text"}
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_COMPRESSED = (*_OPENERS, ".zst")
_UNITS = {"file": "document", "paragraph": "paragraph", "line": "line"}
_FIELDS = {field.name for field in dataclasses.fields(Source)}
_REPAIR = "repair or remove it"


def open_source(source: Source, *, streaming: bool, cache: Path) -> Any:
    """A `datasets.Dataset`, or an IterableDataset where `streaming`, of the source's columns.

    `datasets` keeps its copy of files that are not streamed under `cache`.

    Raises ValueError for a path that is not there or cannot be read, a split or column that is missing, and a data set
    without rows.
    """
    with quiet_datasets():
        opened = reading_source(source, lambda: _open(source, streaming, cache))
        first = reading_source(source, lambda: next(iter(opened)))
    columns = {"column": source.column} | ({} if source.trained is None else {"trained": source.trained})
    for field, column in columns.items():
        if column not in first:
            raise UserError(f"{source.path} has no such column", field=field, value=column, works=first)
    return opened.select_columns(list(columns.values()))


@contextlib.contextmanager
def quiet_datasets() -> Iterator[None]:
    """Within it `datasets` shows no progress bars and logs nothing: what it would log it also raises."""
    import datasets

    logger, had_bars = logging.getLogger("datasets"), not datasets.are_progress_bars_disabled()
    level = logger.level
    datasets.disable_progress_bars()
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def as_field(name: str) -> Iterator[None]:
    """Errors about a field of a `Source` are raised as about that field of `name`, such as data.sources.0."""
    try:
        yield
    except UserError as error:
        if error.file is None and error.field in _FIELDS:
            raise error.inside(name) from error.__cause__
        raise


def reading_source(source: Source, read: Callable[[], Any]) -> Any:
    """The result of `read()`; whatever it raises becomes a ValueError in one line that names the file or the source."""
    try:
        return read()
    except Exception as error:  # Whatever `datasets` and the readers of formats raise.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # What `datasets` raises where files hold not one row to learn the columns from.
        if isinstance(cause, StopIteration) or type(cause).__name__ == "SchemaInferenceError":
            raise UserError(f"it has no rows in split {source.split}", file=source.path) from None
        if isinstance(error, UserError):
            raise
        if isinstance(cause, UnicodeError):
            raise _undecodable(source) from None
        if (broken := _broken_line(source)) is not None:
            raise broken from None
        raise UserError(f"it cannot be read: {' '.join(str(cause).split())[:300]}", file=source.path) from error


def _open(source: Source, streaming: bool, cache: Path) -> Any:
    import datasets

    kind, folder = _format(source.path), os.path.isdir(os.path.expanduser(source.path))
    if source.subset is not None and (kind is not None or folder or source.path == PYTHON_DOCS):
        raise UserError("only data sets on the hub have subsets", field="subset", value=source.subset)
    if source.unit != "file" and (kind != "text" or folder):
        raise UserError("it needs plain text: elsewhere documents are rows", field="unit", value=source.unit)
    if source.path == PYTHON_DOCS:
        if source.split not in SPLITS:
            raise _no_split(source, SPLITS)
        return _stream(datasets.Dataset.from_dict(python_docs(source.split)), streaming)
    if folder:
        return _stream(_saved(source), streaming)
    where: dict[str, Any] = {"split": source.split, "streaming": streaming, "cache_dir": str(cache / "arrow")}
    if kind is None:
        _check_hub_name(source)
        return datasets.load_dataset(source.path, source.subset, **where)
    options: dict[str, Any] = {"sample_by": _UNITS[source.unit]} if kind == "text" else {}
    return datasets.load_dataset(kind, data_files={"train": files(source)}, **where, **options)


def _no_split(source: Source, splits: Sequence[Any]) -> UserError:
    return UserError(f"{source.path} has no such split", field="split", value=source.split, works=splits)


def files(source: Source) -> list[str]:
    """The files that the source's path names, sorted.

    Raises ValueError where there are none.
    """
    found = glob_files(source.path)
    if not found:
        raise UserError(
            "it does not exist: give a file, or a pattern that matches files", field="path", value=source.path
        )
    return found


def glob_files(pattern: str) -> list[str]:
    """What a pattern matches, sorted."""
    return sorted(glob.glob(os.path.expanduser(pattern), recursive=True))


def _format(path: str) -> str | None:
    """The reader of `datasets` for files with this path's ending; None for what has no ending of a known format."""
    endings = [ending for ending in Path(path).suffixes if ending not in _COMPRESSED]
    return _FORMATS.get(endings[-1]) if endings else None


def _check_hub_name(source: Source) -> None:
    """Raises ValueError for a path that cannot be a name on the hub."""
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source.path) or Path(source.path).exists():
        raise UserError(
            f"it is not data that can be read: give a file ({', '.join(_FORMATS)}, also as {', '.join(_COMPRESSED)}), "
            "a folder that `datasets` saved, or the name of a data set on the hub",
            field="path",
            value=source.path,
        )


def _saved(source: Source) -> Any:
    """A data set that `datasets` saved in a folder, with the source's split cut out of it."""
    import datasets

    folder = os.path.expanduser(source.path)
    if not any(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json")):
        raise UserError(
            "it is not a folder that `datasets` saved: give its files as a pattern",
            field="path",
            value=source.path,
            works=[os.path.join(source.path, "*.jsonl")],
        )
    found = datasets.load_from_disk(folder)
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    try:
        (part,) = datasets.ReadInstruction.from_spec(source.split).to_absolute(
            {name: len(rows) for name, rows in splits.items()}
        )
    except (ValueError, AssertionError):
        raise _no_split(source, list(splits)) from None
    rows = splits[part.splitname]
    start, stop = part.from_ or 0, len(rows) if part.to is None else part.to
    return rows if (start, stop) == (0, len(rows)) else rows.select(range(start, stop))


def _stream(rows: Any, streaming: bool) -> Any:
    return rows.to_iterable_dataset() if streaming else rows


def _undecodable(source: Source) -> UserError:
    """Where the text of a source is not UTF-8, as exactly as can be found out."""
    if _format(source.path) in ("json", "text"):
        for file in files(source):
            for number, line in enumerate(_lines(file), 1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    rule = f"it is not valid UTF-8 (byte {error.start + 1} of the line): {_REPAIR}"
                    return UserError(rule, file=file, line=number)
    return UserError(f"a row is not valid UTF-8: {_REPAIR}", file=source.path)


def _broken_line(source: Source) -> UserError | None:
    """Which line of a source of JSON lines is not a JSON object; None where all are, and for other sources."""
    for file, number, line in _json_lines(source):
        try:
            if not isinstance(json.loads(line), dict):
                rule = f"it must be a JSON object, and is {line.strip().decode()!r:.60}: {_REPAIR}"
                return UserError(rule, file=file, line=number)
        except json.JSONDecodeError as error:
            rule = f"it is not JSON ({error.msg} at character {error.pos + 1}): {_REPAIR}"
            return UserError(rule, file=file, line=number)
        except UnicodeDecodeError:
            continue
    return None


def location_of(source: Source, column: str | None, value: Any) -> dict[str, Any]:
    """The `file` and `line` of the first row of JSON lines that has this value in a column; the source for others."""
    for file, number, line in _json_lines(source):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and column in row and row[column] == value:
                return {"file": file, "line": number}
    return {"file": source.path}


def _json_lines(source: Source) -> Iterator[tuple[str, int, bytes]]:
    """File, number and text of each line that is not empty. A .json file may be one value over many lines: then its
    first line is not JSON, and it has none."""
    for file in glob_files(source.path) if _format(source.path) == "json" else ():
        with contextlib.suppress(OSError, EOFError, lzma.LZMAError, zlib.error):  # damaged: raised where it was read
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
