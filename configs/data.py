"""What a run reads: sources, tokenizer, windows."""

from dataclasses import dataclass
from typing import Literal

from treering.configs.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data set, and its share in a mixture."""

    path: str
    """A file or a pattern of files (.jsonl, .json, .parquet, .txt; also as .gz, .bz2, .xz, .zst), a folder that
    `datasets` saved, the name of a data set on the Hugging Face hub, or python-docs: the text of Python's own
    documentation, which comes with every Python (splits: train, test, test-in-place)."""
    column: str = "text"
    """The column to train on: text, or lists of token ids."""
    trained: str | None = None
    """A column of ranges of the text's characters, [[first, end], ...]: only tokens that begin within one are trained
    on, or count in evaluation. Default: all tokens."""
    subset: str | None = None
    """The configuration of a data set on the hub."""
    split: str = "train"
    """The split, or a part of one, such as train[:90%]."""
    unit: Literal["file", "paragraph", "line"] = "file"
    """What one document is, in files of plain text."""
    weight: float = 1.0
    """Rows of this source in proportion to those of the others."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data and how it becomes batches. All of it decides what a run computes."""

    sources: tuple[Source, ...]
    """Several are mixed row by row in proportion to their weights; each starts over when it ends."""
    held_out: tuple[Source, ...] = ()
    """Sources for evaluation. On the command line --data.held-out.0.path FILE adds one, and --data.sources.1.path FILE
    a second source to train on."""
    tokenizer: str | None = None
    """A checkpoint or a Hugging Face folder; bytes: one token per byte; bpe: byte pairs, learned from the sources up to
    the model's vocabulary. None takes the tokenizer of the weights that the run starts from."""
    end: bool = True
    """End each document of text with the tokenizer's end token."""
    window: int
    """Tokens per row."""
    batch: int
    """Rows per step, over all devices and accumulation steps."""
    streaming: bool = False
    """Read documents in order, and tokenise them while training. Default: all are tokenised once into the cache, and
    each epoch has another random order."""
    block_windows: int = 256
    """Windows per block: documents are packed, and rows shuffled, block by block. A stream has one block in memory."""
    cache: str = "~/.cache/treering"
    """Folder for tokenised data."""

    def __post_init__(self):
        if not self.sources:
            raise UserError("give at least one", field="data.sources")
        for name in ("window", "batch", "block_windows"):
            if getattr(self, name) < 1:
                raise UserError("it must be at least 1", field=f"data.{name}", value=getattr(self, name))
        for name in ("sources", "held_out"):
            for number, source in enumerate(getattr(self, name)):
                if not 0 < source.weight < float("inf"):
                    field = f"data.{name}.{number}.weight"
                    raise UserError("it must be a finite number above 0", field=field, value=source.weight)
