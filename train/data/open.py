"""All that a run reads, opened: stores or streams of its sources, mixed, and what was packed in words."""

from dataclasses import dataclass
from pathlib import Path

from treering.configs.run import RunConfig
from treering.models.tokenizer import Tokenizer
from treering.train.data.sources import open_source
from treering.train.data.store import TokenStore, cache_folder, hash_folder, tokenise
from treering.train.data.stream import Mixture, PackedRows, StoredBlocks, StreamedBlocks

REPORTED_DOCUMENTS = 1 << 20
"""Stores of more documents than this are not packed as a whole for a report."""


@dataclass(frozen=True)
class Data:
    """What a run reads."""

    mixture: Mixture
    held_out: list[TokenStore]
    report: list[str]
    """Tokens in, out and dropped, in words; a line a source."""


def open_data(config: RunConfig, tokenizer_folder: Path) -> Data:
    """Opens, tokenises where that is not done yet, and packs.

    Raises ValueError for data that cannot be trained on, as `open_source` and `encode_rows` do.
    """
    data, cache, vocab = config.data, cache_folder(config), config.model.vocab
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
        rows = PackedRows(blocks, data.window, (config.seed, number, 1), masked=source.trained is not None)
        parts.append(rows)
        lines.append(f"packed {source.path}: {_report(rows, source.path)}")
    held_out = [tokenise(source, tokenizer, **marks) for source in data.held_out]
    return Data(Mixture(parts, [source.weight for source in data.sources]), held_out, lines)


def _report(rows: PackedRows, path: str) -> str:
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
