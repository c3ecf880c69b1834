"""Saved caches: the keys and values of a text that was read once, to ask about it later, on any mesh.

Format 1, `DIR/{cache.json, layers/N/}`. cache.json says which tokens were read by which weights, and is written last;
`layers/N` holds the arrays `keys` (rotated) and `values` of layer N, `[tokens kv_heads head_dim]` in the order of the
text, with zeros after its last token up to what the mesh divided. Layers are written and read one at a time, each
device its own part of the tokens, so nothing ever holds more than one layer beside the cache. A text may be
confidential: its files are their owner's alone.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from treering.configs.model import ModelConfig
from treering.infer.request import Session
from treering.infer.scheduler import Scheduler
from treering.layers.operations.pool import NO_PAGE, PagePool, token_divisor
from treering.models.checkpoint.arrays import read_arrays, write_arrays
from treering.models.checkpoint.atomic_folder import empty, partial_folder, written_beside
from treering.models.checkpoint.hashing import fingerprint, hash_arrays
from treering.models.checkpoint.record import RECORD
from treering.models.progress import byte_progress
from treering.models.transformer import Transformer

FORMAT = 1
CACHE_RECORD = "cache.json"
LAYERS = "layers"


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """What reads texts: weights in a dtype. A cache is of use only to the one that made it."""

    checkpoint: str
    """Where it lay, for messages alone."""
    config: dict[str, Any]
    weights: str
    """The fingerprint of the weights as they compute."""
    dtype: str
    """Of keys and values."""

    @staticmethod
    def of(config: ModelConfig, *, checkpoint: str, weights: str, dtype: str) -> "ModelIdentity":
        """The one of a model on its devices."""
        return ModelIdentity(checkpoint=checkpoint, config=describe_config(config), weights=weights, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class SavedCache:
    """What cache.json in `folder` says."""

    folder: Path
    identity: ModelIdentity
    tokens: list[int]
    fingerprint: str
    """Of tokens, keys and values."""

    def check_model(self, config: ModelConfig, checkpoint: str) -> None:
        """Raises ValueError naming what differs, where the model is another."""
        theirs, ours = self.identity.config, describe_config(config)
        unlike = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        if unlike:
            message = "; ".join(f"{name} {theirs.get(name)} there, {ours.get(name)} in {checkpoint}" for name in unlike)
            raise ValueError(f"{self.folder} is the cache of another model ({message}): {self._advice()}")

    def check_dtype(self, dtype: str) -> None:
        """Raises ValueError where this run's cache has another dtype."""
        if dtype != self.identity.dtype:
            raise ValueError(
                f"{self.folder} holds {self.identity.dtype} and this run computes in {dtype}: give --dtype "
                f"{self.identity.dtype}"
            )

    def check_weights(self, weights: str, checkpoint: str) -> None:
        """Raises ValueError where `weights` is not the fingerprint of those that read the text."""
        if weights != self.identity.weights:
            message = f"weights {self.identity.weights} there, {weights} in {checkpoint}"
            raise ValueError(f"{self.folder} is the cache of other weights ({message}): {self._advice()}")

    def _advice(self) -> str:
        return f"load it with {self.identity.checkpoint}, which it was saved from, or save one anew with --save-cache"


def describe_config(config: ModelConfig) -> dict[str, Any]:
    """A model's family and fields, as JSON gives them back."""
    rope = {"kind": config.rope.kind, **asdict(config.rope)}
    return json.loads(json.dumps({"family": config.family, **asdict(config), "rope": rope}))


def read_saved_cache(folder: str | Path) -> SavedCache:
    """What the saved cache at `folder` says of itself.

    Raises ValueError for a path that is not there, or is no saved cache, or not a whole one.
    """
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(
            f"{folder} does not exist: a saved cache is a folder that `treering generate --save-cache` wrote"
        )
    file = folder / CACHE_RECORD
    if not file.is_file():
        if (folder / LAYERS).is_dir():
            raise ValueError(
                f"{folder} is unfinished: its {CACHE_RECORD} is missing, so it was never written to the end"
            )
        what = "is a checkpoint, and no saved cache" if (folder / RECORD).is_file() else "is no saved cache"
        raise ValueError(f"{folder} {what}: `treering generate --save-cache` writes one")
    try:
        raw = json.loads(file.read_text())
        version = raw["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from None
    if version != FORMAT:
        raise ValueError(f"{file} has format {version}: this version reads format {FORMAT}")
    try:
        identity, tokens, files = ModelIdentity(**raw["reader"]), raw["tokens"], raw["files"]
        if not (isinstance(identity.config, dict) and isinstance(files, dict)):
            raise TypeError("its fields are not of their kinds")
        if not (tokens and isinstance(tokens, list) and all(type(t) is int and 0 <= t < 2**31 for t in tokens)):
            raise ValueError(f"{file} is damaged: its tokens are no list of numbers")
        saved = SavedCache(folder=folder, identity=identity, tokens=tokens, fingerprint=raw["fingerprint"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from None
    # Here, since it takes no time; what a file holds is compared when it is loaded.
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else "none"
        if found != size:
            raise ValueError(f"{folder} is not whole: {name} has {found} of its {size} bytes; copy or save it again")
    return saved


def check_new_folder(folder: str | Path) -> None:
    """Raises ValueError where a cache cannot be saved at `folder`: before hours are spent on reading."""
    folder = Path(folder)
    _check_free(folder)
    if not folder.parent.is_dir():
        raise ValueError(f"{folder} cannot be written: {folder.parent} is no folder")
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be written: {folder.parent} is not yours to write to")
    if (folder.parent / CACHE_RECORD).exists():
        raise ValueError(f"{folder} lies in a saved cache: choose a folder of its own for --save-cache")
    partial = partial_folder(folder)
    if partial.is_symlink() or (partial.exists() and not _is_left_over(partial)):
        raise ValueError(f"{folder} is first written as {partial}, where something else stands: choose another name")


def _is_left_over(partial: Path) -> bool:
    """Whether a folder is what a save that was killed left: layers by their numbers."""
    layers = partial / LAYERS
    only = {path.name for path in partial.iterdir()} <= {LAYERS, CACHE_RECORD} if partial.is_dir() else False
    return only and layers.is_dir() and all(one.is_dir() and one.name.isdecimal() for one in layers.iterdir())


def _check_free(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists: choose another folder for --save-cache")


def check_room(folder: str | Path, size: int) -> None:
    """Raises ValueError where the disk has no `size` bytes for a cache at `folder`."""
    free = shutil.disk_usage(Path(folder).parent).free
    if size > free:
        raise ValueError(f"{folder} would take {size:,} bytes of keys and values, and {free:,} are free there")


def save_cache(folder: str | Path, scheduler: Scheduler, session: Session, identity: ModelIdentity) -> int:
    """Writes what the session's row holds as a saved cache; returns the bytes of keys and values.

    The folder appears under its name when it is whole; one that could not be finished is removed. Raises what
    `check_new_folder` does.
    """
    check_new_folder(folder)
    folder = Path(folder)
    engine, tokens = scheduler.engine, session.tokens
    hashes: dict[str, str] = {}
    with _owner_only(), written_beside(folder, lambda: _check_free(folder)) as partial:
        try:
            empty(partial)
            (partial / LAYERS).mkdir()
            walk = _Walk(scheduler, session)
            for pool, layer, number in walk.layers("saving"):
                keys, values = _read(
                    scheduler.state.cache.pools[pool],
                    engine.put(np.int32(layer)),
                    walk.pages,
                    engine.put(np.int32(len(tokens))),
                    tokens=walk.tokens,
                    plan=engine.plan,
                )
                arrays = {"keys": keys, "values": values}
                place = partial / LAYERS / str(number)
                place.mkdir()
                write_arrays(place, arrays)
                hashes |= walk.hashes(number, arrays)
            record = {
                "format": FORMAT,
                "reader": asdict(identity),
                "fingerprint": _fingerprint(tokens, hashes),
                "files": {str(f.relative_to(partial)): f.stat().st_size for f in partial.rglob("*") if f.is_file()},
                "tokens": tokens,
            }
            (partial / CACHE_RECORD).write_text(json.dumps(record) + "\n")
            os.replace(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return walk.bytes


def load_cache(saved: SavedCache, scheduler: Scheduler) -> tuple[Session, int]:
    """A session whose row holds what was saved, and the bytes of its keys and values.

    It is for the caller to check that model, dtype and weights are those that read the text. Raises ValueError
    where keys and values are not those that were saved, or no row has room for them.
    """
    engine = scheduler.engine
    session = scheduler.hold(saved.tokens)
    try:
        walk = _Walk(scheduler, session)
        shape = (walk.tokens, engine.model.config.kv_heads, engine.model.config.head_dim)
        sharding = engine.plan.sharding("kv_seq kv_heads head_dim", shape)
        leaf = jax.ShapeDtypeStruct(shape, np.dtype(saved.identity.dtype), sharding=sharding)
        hashes: dict[str, str] = {}
        for pool, layer, number in walk.layers("loading"):
            arrays = _read_layer(saved.folder, number, leaf, len(saved.tokens))
            hashes |= walk.hashes(number, arrays)
            written = _write(
                scheduler.state.cache.pools[pool],
                engine.put(np.int32(layer)),
                walk.pages,
                arrays["keys"],
                arrays["values"],
                plan=engine.plan,
            )
            pools = tuple(written if at == pool else one for at, one in enumerate(scheduler.state.cache.pools))
            scheduler.state = eqx.tree_at(lambda state: state.cache.pools, scheduler.state, pools)
        if _fingerprint(saved.tokens, hashes) != saved.fingerprint:
            raise ValueError(_damaged(saved.folder))
    except BaseException:
        scheduler.close(session)
        raise
    return session, walk.bytes


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


@contextlib.contextmanager
def _owner_only() -> Iterator[None]:
    """Files that are made meanwhile have mode 0600, and folders 0700."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


class _Walk:
    """Through the layers of the row of a session."""

    def __init__(self, scheduler: Scheduler, session: Session):
        engine = scheduler.engine
        assert session.row is not None
        divisor = token_divisor(engine.plan)
        self.length = len(session.tokens)
        self.tokens = -(-self.length // divisor) * divisor
        pages = np.full((engine.groups, -(-self.tokens // engine.page_tokens)), NO_PAGE, np.int32)
        own = session.pages[: pages.shape[1]]
        pages[session.row // engine.group_rows, : len(own)] = own
        self.pages = jax.device_put(pages, engine.plan.sharding("batch row_pages", pages.shape))
        self._model: Transformer = engine.model
        config = engine.model.config
        self.bytes = self.length * config.kv_bytes_per_token(np.dtype(engine.precision.cache).itemsize)

    def layers(self, doing: str) -> Iterator[tuple[int, int, int]]:
        """Each layer's pool, its place in there, and its number in the model; shows how many bytes are done."""
        blocks, config = self._model.blocks, self._model.config
        period = len(blocks.pattern)
        every = [(pool, at, n) for pool in range(period) for at, n in enumerate(self._model.layers_at(pool))]
        every += [(period + more, 0, period * blocks.periods + more) for more in range(len(blocks.tail))]
        with byte_progress() as progress:
            task = progress.add_task(doing, total=self.bytes)
            for one in every:
                yield one
                progress.advance(task, self.bytes // config.layers)

    def hashes(self, number: int, arrays: dict[str, jax.Array]) -> dict[str, str]:
        """Of a layer's arrays without the zeros after them."""
        shapes = {name: (self.length, *array.shape[1:]) for name, array in arrays.items()}
        return {f"{number}.{name}": value for name, value in hash_arrays(arrays, shapes).items()}


@functools.partial(jax.jit, static_argnames=("tokens", "plan"))
def _read(pool: PagePool, layer: Any, pages: Any, length: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    return pool.read(layer, pages, length, **options)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnums=0)
def _write(pool: PagePool, layer: Any, pages: Any, keys: jax.Array, values: jax.Array, **options: Any) -> PagePool:
    return pool.write(layer, pages, keys, values, **options)
