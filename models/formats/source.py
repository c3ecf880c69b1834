"""What a conversion reads from: named tensors in files, read one at a time."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treering.models.families.fields import Fields


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, not in memory."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read_into: Callable[[np.ndarray], None]
    """Reads the values into a contiguous array of this shape and dtype."""

    def read(self) -> np.ndarray:
        """The values."""
        out = np.empty(self.shape, self.dtype)
        self.read_into(out)
        return out


@dataclass(frozen=True, kw_only=True)
class Source:
    """Weights as other tools wrote them."""

    fields: Fields
    """Its config.json, or the equivalent."""
    tensors: Mapping[str, StoredTensor]
    stored_name: Callable[[str], str]
    """From a Hugging Face tensor name to the name in these files."""
    save_tokenizer: Callable[[Path], bool]
    """Writes tokenizer and generation settings into an empty folder; False where there is no tokenizer."""
    description: Mapping[str, Any]
    """What model.json says of it."""
    identity: str
    """Changes when the files do."""
    faults: tuple[str, ...] = ()
    """What is wrong with the tensors as a whole: listed twice, or not where an index says."""


def identity_of(files: list[Path]) -> str:
    """A string that changes when one of the files is replaced."""
    parts = []
    for file in files:
        status = file.stat()
        parts.append(f"{file.resolve()}:{status.st_size}:{status.st_mtime_ns}")
    return "|".join(parts)


def read_bytes(path: Path, offset: int, out: np.ndarray) -> None:
    """Fills a contiguous array with the bytes of a file from `offset`.

    Plain reads, not a memory map: mapped pages would count as this process's memory. Raises ValueError where the file
    ends before.
    """
    view = out.reshape(-1).view(np.uint8).data
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + (1 << 30)]], offset + done)
            if count == 0:
                raise ValueError(f"{path} ends at byte {offset + done}, in the middle of a tensor: it is truncated")
            done += count
    finally:
        os.close(descriptor)


def read_interleaved(read_into: Callable[[np.ndarray], None], heads: int, out: np.ndarray) -> None:
    """Undoes the order of Meta and llama.cpp, where the two rows that one angle rotates are adjacent.

    Within a head its rows are 0, d/2, 1, d/2 + 1, ...; ours, as Hugging Face's, are 0, 1, ..., d - 1.
    """
    stored = np.empty_like(out)
    read_into(stored)
    pairs = stored.reshape(heads, -1, 2, *out.shape[1:])
    out.reshape(heads, 2, -1, *out.shape[1:])[:] = pairs.swapaxes(1, 2)
