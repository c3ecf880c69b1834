"""Before a run: what can be wrong is looked at here, before anything is compiled or written into its folder."""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock

from treering.configs.model import ModelConfig
from treering.configs.run import RunConfig, fixed, flat
from treering.layers.sharding import Plan
from treering.models.checkpoint import check_place
from treering.models.load import open_model
from treering.models.record import CHECKPOINTS, RECORD, TOKENIZER, read_config
from treering.models.tokenizer import Tokenizer
from treering.train.batch import check_batch
from treering.train.checkpoint import finished_steps
from treering.train.data import Mixture, Rows, StoredBlocks, StreamedBlocks
from treering.train.data_files import Marks, check_same_files, marks_of
from treering.train.metrics import check_extras
from treering.train.new_tokenizer import BYTE_VOCAB, write_tokenizer
from treering.train.optim import check_schedule
from treering.train.sources import open_source, told
from treering.train.store import TokenStore, hash_folder, tokenise

CONFIG = "config.json"
REPORTED_DOCUMENTS = 1 << 20
"""Stores of more documents than this are not packed as a whole for a report."""


def check_run(config: RunConfig, plan: Plan) -> None:
    """Raises ValueError for what is wrong with a run, its folders included."""
    columns = 2 * plan.size("context")
    if config.data.window % columns:
        below = config.data.window // columns * columns
        works = f"are {below} and {below + columns}" if below else f"is {columns}"
        raise ValueError(
            f"data.window {config.data.window} is no multiple of {columns}, which is twice mesh.context "
            f"{columns // 2}: the nearest {works}"
        )
    check_batch(plan, batch=config.data.batch, seq=config.data.window, accumulation=config.step.accumulation)
    check_schedule(config.optimizer.schedule, config.steps)
    check_extras(config.watch)
    for name in ("rows", "stride"):
        if getattr(config.evaluate, name) is not None and not config.data.held_out:
            raise ValueError(f"evaluate.{name} goes with data.held_out: without, there is nothing to evaluate on")
    check_folder(config)
    check_place(cache_folder(config))
    if config.start is not None:
        check_same_weights(config.model, open_model(weights_of(config.start)).config, config.start)
    if config.go_on_from is not None:
        step = newest_step(config.go_on_from)
        there = read_config(Path(config.go_on_from) / CHECKPOINTS / str(step) / "model")
        check_same_weights(config.model, there, config.go_on_from)


def check_folder(config: RunConfig) -> None:
    """Raises ValueError where the run's folder holds something else, or a run that computes something else."""
    folder = Path(config.folder)
    if not folder.exists():
        return check_place(folder)
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG).is_file()):
        raise ValueError(f"{folder} exists and holds no run: choose another --folder")
    if not (folder / CONFIG).is_file():
        return
    there = fixed(json.loads((folder / CONFIG).read_text()))
    here = json.loads(json.dumps(config.fixed()))
    differ = [
        f"{name} is {there.get(name, 'not set')} there and {here.get(name, 'not set')} here"
        for name in here | there
        if here.get(name) != there.get(name)
    ]
    if differ:
        raise ValueError(
            f"{folder} holds a run of another config: {'; '.join(differ[:5])}{' ...' if len(differ) > 5 else ''}. "
            "Choose another --folder, or the same config to resume"
        )


def check_same_weights(here: ModelConfig, there: ModelConfig, path: str) -> None:
    """Raises ValueError where the weights at `path` are not for the model `here`; its context may be another."""
    ours, theirs = flat(here), flat(there)
    differ = [
        f"{name} {theirs.get(name)} instead of {ours.get(name)}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name) and name != "context_length" and not name.startswith("rope.")
    ]
    if differ:
        raise ValueError(f"{path} holds another architecture than this run's model: {', '.join(differ)}")


def newest_step(run: str) -> int:
    """The newest step that a run's folder has a checkpoint of; ValueError where there is none."""
    steps = finished_steps(Path(run) / CHECKPOINTS)
    if not steps:
        raise ValueError(f"{run} holds no checkpoint of a run: it lacks {CHECKPOINTS}/STEP")
    return steps[-1]


def weights_of(path: str) -> Path:
    """The weights that `path` names: itself (whatever `open_model` takes), the model of a step, or a run's newest."""
    folder = Path(path)
    if (folder / CHECKPOINTS).is_dir():
        return folder / CHECKPOINTS / str(newest_step(path)) / "model"
    return folder / "model" if (folder / "model" / RECORD).is_file() else folder


def find_tokenizer(config: RunConfig) -> Path:
    """The folder of the run's tokenizer, made in the cache where it is a new one. A run that has begun keeps its own.

    Raises ValueError where there is none, or it has more tokens than the model.
    """
    wanted, own = config.data.tokenizer, Path(config.folder) / TOKENIZER
    if own.is_dir():
        return own
    if wanted in ("bytes", "bpe"):
        return _new_tokenizer(config)
    if wanted is None:
        origin = config.start or config.go_on_from
        if origin is None:
            raise ValueError("data.tokenizer is not set, and random weights bring none: give a folder, bytes or bpe")
        return _tokenizer_of(weights_of(origin), cache_folder(config))
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
        columns = [told(source, functools.partial(rows.__getitem__, source.column)) for source, rows in texts]
        rows = (row for column in columns for row in column if row)
        write_tokenizer(partial, "bpe" if kind == "bpe" else "bytes", rows, config.model.vocab)

    return _made_once(folder, make)


def cache_folder(config: RunConfig) -> Path:
    """The folder for tokenised data."""
    return Path(os.path.expanduser(config.data.cache))


@dataclass(frozen=True)
class Data:
    """What a run reads."""

    mixture: Mixture
    held_out: list[TokenStore]
    report: list[str]
    """Tokens in, out and dropped, in words; a line a source."""
    files: Marks
    """What the sources' files are known by."""


def open_data(config: RunConfig, tokenizer_folder: Path) -> Data:
    """Opens, tokenises where that is not done yet, and packs.

    Raises ValueError for data that cannot be trained on, as `open_source` and `encode_rows` do.
    """
    data, cache, vocab = config.data, cache_folder(config), config.model.vocab
    marks_of_files = marks_of(data.sources)
    for run in filter(None, (config.folder, config.go_on_from)):
        if finished_steps(Path(run) / CHECKPOINTS):
            check_same_files(Path(run), marks_of_files)
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    if tokenizer.text_vocab_size > vocab:  # special tokens beyond it are refused where a text holds one
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model's vocabulary {vocab}: ids beyond it would "
            "be clamped; use the model's tokenizer, or raise model.vocab"
        )
    marks = {"tokenizer_hash": hash_folder(tokenizer_folder), "vocab": vocab, "end": data.end, "cache": cache}
    block = data.block_windows * data.window
    parts, lines = [], []
    for number, source in enumerate(data.sources):
        if data.streaming:
            stream = open_source(source, streaming=True, cache=cache)
            blocks = StreamedBlocks(stream, source, tokenizer, tokens=block, vocab=vocab, end=data.end)
        else:
            store = tokenise(source, tokenizer, **marks)
            blocks = StoredBlocks(store, block, (config.seed, number, 0))
        rows = Rows(blocks, data.window, (config.seed, number, 1), masked=source.trained is not None)
        parts.append(rows)
        lines.append(f"packed {source.path}: {_report(rows, source.path)}")
    held_out = [tokenise(source, tokenizer, **marks) for source in data.held_out]
    return Data(Mixture(parts, [source.weight for source in data.sources]), held_out, lines, marks_of_files)


def _report(rows: Rows, path: str) -> str:
    """Of a whole epoch of stored documents, or of a first block; ValueError where an epoch makes no row."""
    store = rows.blocks.store if isinstance(rows.blocks, StoredBlocks) else None
    whole = store is not None and len(store) <= REPORTED_DOCUMENTS
    report, at = rows.peek(rows.blocks.start())
    while at["epoch"] == 0 and (whole or not report.rows):
        part, at = rows.peek(at)
        report += part
    if not report.rows:
        raise ValueError(f"{path} holds nothing to train on: no document has a second token, or none that is trained")
    empty = f"; {store.empty:,} rows without text" if store is not None and store.empty else ""
    return f"{'an epoch' if whole else 'the first block'}: {report}{empty}"
