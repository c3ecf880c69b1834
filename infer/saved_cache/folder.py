"""Saved caches: the keys and values of a text that was read once, to ask about it later, on any mesh.

Format 1, `DIR/{cache.json, layers/N/}`. cache.json says which tokens were read by which weights, and is written last;
`layers/N` holds the arrays `keys` (rotated) and `values` of layer N, `[tokens kv_heads head_dim]` in the order of the
text, with zeros after its last token up to what the mesh divided. Layers are written and read one at a time, each
device its own part of the tokens, so nothing ever holds more than one layer in addition to the cache. A text may be
confidential: the folder is private (mode 0700), and with it all its files.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

from treering.infer.request import Session
from treering.infer.saved_cache.record import CACHE_RECORD, FORMAT, LAYERS, ModelIdentity, SavedCache
from treering.infer.saved_cache.row_transfer import RowTransfer
from treering.infer.scheduler import Scheduler
from treering.models.checkpoint.arrays import read_arrays, write_arrays
from treering.models.checkpoint.atomic_folder import empty, partial_folder, written_beside
from treering.models.checkpoint.hashing import fingerprint, hash_arrays

PRIVATE = 0o700


def check_new_folder(folder: str | Path) -> None:
    """Raises ValueError where a cache cannot be saved at `folder`: before hours are spent on reading."""
    folder = Path(folder)
    _check_free(folder)
    if not folder.parent.is_dir():
        raise ValueError(f"{folder} cannot be written: {folder.parent} is not a folder")
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be written: you have no permission to write in {folder.parent}")
    if (folder.parent / CACHE_RECORD).exists():
        raise ValueError(f"{folder} is inside a saved cache: choose another folder for --save-cache")
    partial = partial_folder(folder)
    if partial.is_symlink() or (partial.exists() and not _is_left_over(partial)):
        raise ValueError(f"{folder} is written as {partial} first, which holds something else: choose another name")


def _is_left_over(partial: Path) -> bool:
    """Whether a folder is what a save that was killed left: layers by their numbers."""
    layers = partial / LAYERS
    only = {path.name for path in partial.iterdir()} <= {LAYERS, CACHE_RECORD} if partial.is_dir() else False
    return only and layers.is_dir() and all(one.is_dir() and one.name.isdecimal() for one in layers.iterdir())


def _check_free(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists: choose another folder for --save-cache")


def check_room(folder: str | Path, size: int) -> None:
    """Raises ValueError where the disk does not have `size` bytes for a cache at `folder`."""
    free = shutil.disk_usage(Path(folder).parent).free
    if size > free:
        raise ValueError(f"{folder} would take {size:,} bytes of keys and values, and {free:,} are free there")


def save_cache(folder: str | Path, scheduler: Scheduler, session: Session, identity: ModelIdentity) -> int:
    """Writes what the session's row holds as a saved cache; returns the bytes of keys and values.

    The folder gets its name when it is complete; one that could not be finished is removed. Raises what
    `check_new_folder` does.
    """
    check_new_folder(folder)
    folder, row = Path(folder), RowTransfer(scheduler, session)
    hashes: dict[str, str] = {}
    with written_beside(folder, lambda: _check_free(folder)) as partial:
        try:
            # Before there is anything in it, which makes all of it private. A umask would be that of all threads.
            partial.chmod(PRIVATE)
            empty(partial)
            (partial / LAYERS).mkdir()
            for place, layer, number in row.layers("saving"):
                arrays = row.read(place, layer)
                target = partial / LAYERS / str(number)
                target.mkdir()
                write_arrays(target, arrays)
                hashes |= _hash_layer(number, arrays, row.length)
            record = {
                "format": FORMAT,
                "reader": asdict(identity),
                "fingerprint": _fingerprint(session.tokens, hashes),
                "files": {str(f.relative_to(partial)): f.stat().st_size for f in partial.rglob("*") if f.is_file()},
                "tokens": session.tokens,
            }
            (partial / CACHE_RECORD).write_text(json.dumps(record) + "\n")
            os.replace(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return row.bytes


def load_cache(saved: SavedCache, scheduler: Scheduler) -> tuple[Session, int]:
    """A session whose row holds what was saved, and the bytes of its keys and values.

    The caller checks that model, dtype and weights are those that read the text. Raises ValueError where keys and
    values are not those that were saved, or no row has room for them.
    """
    session = scheduler.hold(saved.tokens)
    try:
        row = RowTransfer(scheduler, session)
        hashes: dict[str, str] = {}
        for place, layer, number in row.layers("loading"):
            arrays = _read_layer(saved.folder, number, row.abstract(), row.length)
            hashes |= _hash_layer(number, arrays, row.length)
            row.write(place, layer, arrays)
        if _fingerprint(saved.tokens, hashes) != saved.fingerprint:
            raise ValueError(_damaged(saved.folder))
    except BaseException:
        scheduler.close(session)
        raise
    return session, row.bytes


def _read_layer(folder: Path, number: int, leaf: jax.ShapeDtypeStruct, tokens: int) -> dict[str, jax.Array]:
    try:
        return read_arrays(folder / LAYERS / str(number), {"keys": leaf, "values": leaf}, None, least=tokens)
    except ValueError as error:
        raise ValueError(_damaged(folder)) from error


def _damaged(folder: Path) -> str:
    return f"{folder} is damaged: its keys and values are not those that were saved; copy or save it again"


def _fingerprint(tokens: list[int], hashes: dict[str, str]) -> str:
    text = hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest()
    return fingerprint([("tokens", text), *hashes.items()])


def _hash_layer(number: int, arrays: dict[str, jax.Array], length: int) -> dict[str, str]:
    """Of a layer's arrays without the zeros after the row's tokens."""
    shapes = {name: (length, *array.shape[1:]) for name, array in arrays.items()}
    return {f"{number}.{name}": value for name, value in hash_arrays(arrays, shapes).items()}
