"""Whether the files that a run reads are still those that it began with: its position is valid in no others.

Sizes and a digest of samples are kept in the run's folder. Times are ignored, so copies of the files will do.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from treering.configs.data import Source
from treering.train.data.sources import glob_files

SAMPLED = 64 << 20
"""Bytes that are read of each source: all of its files, where they have no more."""
_PIECES = 16

FileFingerprints = dict[str, dict[str, Any]]
"""By the paths of sources, what distinguishes their files from others."""


def fingerprint_files(sources: tuple[Source, ...]) -> FileFingerprints:
    """The fingerprints of those sources that are local files; data sets of the hub have none."""
    found = {}
    for path in {source.path for source in sources}:
        matched = glob_files(path)
        inside = [str(file) for folder in matched if os.path.isdir(folder) for file in sorted(Path(folder).rglob("*"))]
        files = [file for file in matched + inside if os.path.isfile(file)]
        if files:
            sizes = [os.path.getsize(file) for file in files]
            found[path] = {"files": len(files), "bytes": sum(sizes), "digest": _digest(files, sizes)}
    return found


def _digest(files: list[str], sizes: list[int]) -> str:
    digest = hashlib.sha256()
    share = max(SAMPLED // len(files), _PIECES)
    for name, size in zip(files, sizes, strict=True):
        digest.update(f"{size};".encode())
        piece = size if size <= share else share // _PIECES
        with open(name, "rb") as file:
            for number in range(1 if size <= share else _PIECES):
                file.seek((size - piece) * number // (_PIECES - 1))  # from the beginning to the end
                digest.update(file.read(piece))
    return digest.hexdigest()[:16]
