"""Checkpoints, format 1: `DIR/{model.json, weights/, tokenizer/}`.

`model.json` says what the model is and is written last; `weights/` holds the arrays of the model in memory, layers
stacked, under their paths in it; `tokenizer/` is a Hugging Face folder without weights.
"""

import contextlib
import fcntl
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from treering.configs.model import ModelConfig
from treering.layers.sharding import Plan
from treering.models.families import families
from treering.models.record import RECORD, TOKENIZER, WEIGHTS, Record, read_record
from treering.models.record import read_config as read_config
from treering.models.transformer import Transformer
from treering.models.weights import DTYPES, all_finite, fingerprint, hash_arrays, read_arrays, write_arrays


def abstract_model(config: ModelConfig) -> Transformer:
    """The model of `config`, stacked, with shapes in place of arrays."""
    family = families()[config.family]
    return eqx.filter_eval_shape(lambda: family.init(config, jax.random.key(0)))


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays (or shapes) of `tree` by their paths, such as `blocks.places.0.attention.q.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, _is_array))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def load_model(path: str | Path, plan: Plan, dtype: str | None = None) -> Transformer:
    """The model at `path`, stacked, each parameter read straight onto its devices of `plan`.

    Parameters are cast to `dtype`, or stay as stored where it is None. Raises what `read_record` does, and ValueError
    where the weights are not those that model.json describes, `dtype` cannot hold them, or an axis of the mesh does not
    divide a dim.
    """
    record = read_record(path)
    arrays, static = eqx.partition(abstract_model(record.config), _is_array)
    wanted = named_leaves(plan.abstract(arrays, "parameters"))
    restored = read_arrays(Path(path) / WEIGHTS, wanted, None if dtype is None else DTYPES[dtype])
    if dtype == "float16":  # its largest number is the only one that weights go beyond
        for name in (name for name, array in restored.items() if not all_finite(array)):
            raise ValueError(f"{name} holds values that float16 cannot: compute in bfloat16 or float32 instead")
    structure = jax.tree.structure(arrays)
    return eqx.combine(jax.tree.unflatten(structure, [restored[name] for name in wanted]), static)


def save_model(
    path: str | Path,
    model: Transformer,
    *,
    source: Mapping[str, Any],
    tokenizer_files: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Writes `model` as a checkpoint at `path`, with the files of the folder `tokenizer_files`.

    Raises ValueError where `path` exists and `overwrite` is False, and for a model whose blocks are unrolled.
    """
    arrays = named_leaves(model)
    if set(arrays) != set(named_leaves(abstract_model(model.config))):
        raise ValueError("only a model in its stacked, plain form is saved")
    with written_beside(path, lambda: check_destination(path, overwrite=overwrite)) as partial:
        empty(partial)
        (partial / WEIGHTS).mkdir()
        write_arrays(partial / WEIGHTS, arrays)
        if tokenizer_files is not None:
            shutil.copytree(tokenizer_files, partial / TOKENIZER)
        record = Record(
            config=model.config,
            dtype=main_dtype(arrays),
            fingerprint=fingerprint(hash_arrays(arrays).items()),
            source=source,
        )
        finish(partial, path, record)


def partial_folder(path: Path) -> Path:
    """Where the folder `path` stands while it is being written."""
    return path.with_name(path.name + ".partial")


@contextlib.contextmanager
def written_beside(path: str | Path, check: Callable[[], None]) -> Iterator[Path]:
    """The folder `path`.partial, in which all is written before it is renamed; no other process has it meanwhile.

    It may hold what an earlier process left. `check` raises ValueError where something stands at `path` that may not be
    replaced. A ValueError of the caller's removes the folder; what cannot be written is told of `path`.
    """
    path = Path(path)
    check()
    partial = partial_folder(path)
    made = [folder for folder in partial.parents if not folder.exists()]
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with alone_in(partial, f"another process writes {path}: wait for it, or choose another destination"):
            try:
                check()  # again: another process may have been here before
                yield partial
            except ValueError as error:
                if str(partial.resolve()) in str(error):  # as tensorstore tells of a full disk
                    number = re.search(r"os_error_code='(\d+)'", str(error))
                    raise OSError(int(number[1]) if number else 5, str(error), str(partial)) from error
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except ValueError:
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: not ours
                folder.rmdir()
        raise
    except OSError as error:
        if error.errno and str(error.filename).startswith(str(partial)):
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextlib.contextmanager
def alone_in(path: Path, told: str) -> Iterator[None]:
    """Raises ValueError, with the words `told`, where another process is in the same context with the file or folder
    `path`, or renamed it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor))
        except BlockingIOError:
            alone = False
        except OSError:  # a file system without locks
            alone = True
        if not alone:
            raise ValueError(told)
        yield
    finally:
        os.close(descriptor)


def empty(folder: Path) -> None:
    """Removes all that a folder holds."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def check_place(path: Path) -> None:
    """Raises ValueError where `path` is no folder that can be written to, and can be made none."""
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{path} cannot be made: {parent} is no folder that can be written to")


def check_destination(path: str | Path, *, overwrite: bool) -> None:
    """Raises ValueError where a checkpoint `path` cannot be made, or something stands there that may not be replaced:
    only a checkpoint ever is."""
    path = Path(path)
    if not path.exists():
        return check_place(path)
    if not overwrite:
        raise ValueError(f"{path} exists: choose another destination, or replace it with --overwrite")
    if not path.is_dir() or (any(path.iterdir()) and not (path / RECORD).is_file()):
        raise ValueError(f"{path} is no checkpoint, so --overwrite does not replace it")


def finish(partial: Path, path: str | Path, record: Record) -> None:
    """Writes model.json into `partial` and renames it to `path`, replacing what stands there."""
    path = Path(path)
    (partial / RECORD).write_text(record.to_json())
    old = path.with_name(path.name + ".old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
        os.replace(partial, path)
        shutil.rmtree(old)
    else:
        os.replace(partial, path)


def main_dtype(arrays: Mapping[str, Any]) -> str:
    """The dtype of most numbers of `arrays`."""
    sizes: dict[str, int] = {}
    for leaf in arrays.values():
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + math.prod(leaf.shape)
    return max(sizes, key=lambda name: sizes[name])
