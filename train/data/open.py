"""All that a run reads, opened: stores or streams of its sources, mixed, and a report of what was packed."""

from dataclasses import dataclass
from pathlib import Path

from treering.configs.errors import UserError
from treering.configs.run import RunConfig
from treering.models.tokenizer import Tokenizer
from treering.train.data.packing import count
from treering.train.data.sources import as_field, open_source
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
    """Tokens in, out and dropped; one line per source."""


def open_data(config: RunConfig, tokenizer_folder: Path) -> Data:
    """Opens, tokenises where that is not done yet, and packs.

    Raises ValueError for data that cannot be trained on, as `open_source` and `encode_rows` do.
    """
    data, cache, vocab = config.data, cache_folder(config), config.model.vocab
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    if tokenizer.text_vocab_size > vocab:  # special tokens beyond it are refused where a text holds one
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens: use the model's tokenizer, or a larger vocabulary",
            field="model.vocab",
            value=vocab,
        )
    settings = {"tokenizer_hash": hash_folder(tokenizer_folder), "vocab": vocab, "end": data.end, "cache": cache}
    block = data.block_windows * data.window
    parts, lines = [], []
    for number, source in enumerate(data.sources):
        if data.streaming:
            with as_field(f"data.sources.{number}"):
                stream = open_source(source, streaming=True, cache=cache)
            blocks = StreamedBlocks(stream, source, tokenizer, tokens=block, vocab=vocab, end=data.end)
        else:
            with as_field(f"data.sources.{number}"):
                store = tokenise(source, tokenizer, **settings)
            blocks = StoredBlocks(store, block, (config.seed, number, 0))
        rows = PackedRows(blocks, data.window, (config.seed, number, 1), masked=source.trained is not None)
        parts.append(rows)
        lines.append(f"packed {source.path}: {_report(rows, source.path)}")
    held_out = []
    for number, source in enumerate(data.held_out):
        with as_field(f"data.held_out.{number}"):
            held_out.append(tokenise(source, tokenizer, **settings))
    return Data(Mixture(parts, [source.weight for source in data.sources]), held_out, lines)


def _report(rows: PackedRows, path: str) -> str:
    """Of a whole epoch of stored documents, or of a first block; ValueError where an epoch has no row."""
    store = rows.blocks.store if isinstance(rows.blocks, StoredBlocks) else None
    whole = store is not None and len(store) <= REPORTED_DOCUMENTS
    report, at = rows.peek(rows.blocks.start())
    while at["epoch"] == 0 and (whole or not report.rows):
        part, at = rows.peek(at)
        report += part
    if not report.rows:
        rule = "it has nothing to train on: no document has a second token, or one that is trained on"
        raise UserError(rule, file=path)
    empty = f"; {count(store.empty, 'row')} without text" if store is not None and store.empty else ""
    return f"{'an epoch' if whole else 'the first block'}: {report}{empty}"
