"""Checkpoints, format 1: `DIR/{model.json, weights/, tokenizer/}`.

`model.json` says what the model is and is written last; `weights/` holds the arrays of the model in memory, layers
stacked, under their paths in it; `tokenizer/` is a Hugging Face folder without weights.
"""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from treering.configs.model import ModelConfig
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.arrays import DTYPES, read_arrays, write_arrays
from treering.models.checkpoint.atomic_folder import check_creatable, empty, written_beside
from treering.models.checkpoint.hashing import all_finite, fingerprint, hash_arrays
from treering.models.checkpoint.record import RECORD, WEIGHTS, Record, read_record
from treering.models.families import families
from treering.models.files import copy_folder
from treering.models.tokenizer import TOKENIZER
from treering.models.transformer import Transformer


def abstract_model(config: ModelConfig) -> Transformer:
    """The model of `config`, stacked, with shapes in place of arrays."""
    family = families()[config.family]
    return eqx.filter_eval_shape(lambda: family.init(config, jax.random.key(0)))


def abstract_arrays(model: Transformer) -> Transformer:
    """The shapes of an abstract model without what is not an array."""
    return eqx.filter(model, _is_array)


_IN_FILES = (("blocks.pattern.", "blocks.places."), ("blocks.tail.", "blocks.rest."))
"""Parts of a tree that have older names in files, and keep them: checkpoints and fingerprints stay what they are."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays (or shapes) of `tree` by their names in files: paths such as `blocks.places.0.attention.q.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, _is_array))
    return {path_in_files(path): leaf for path, leaf in leaves}


def path_in_files(path: tuple[Any, ...]) -> str:
    """The name in files of the array at a path of a tree."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    for part, older in _IN_FILES:
        name = name.replace(part, older)
    return name


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
        raise ValueError("only a model in its stacked form is saved, not an unrolled one")
    with written_beside(path, lambda: check_destination(path, overwrite=overwrite)) as partial:
        empty(partial)
        (partial / WEIGHTS).mkdir()
        write_arrays(partial / WEIGHTS, arrays)
        if tokenizer_files is not None:
            copy_folder(Path(tokenizer_files), partial / TOKENIZER)
        record = Record(
            config=model.config,
            dtype=main_dtype(arrays),
            fingerprint=fingerprint(hash_arrays(arrays).items()),
            source=source,
        )
        finish(partial, path, record)


def check_destination(path: str | Path, *, overwrite: bool) -> None:
    """Raises ValueError where a checkpoint `path` cannot be made, or would replace something that may not be replaced:
    only a checkpoint may."""
    path = Path(path)
    if not path.exists():
        return check_creatable(path)
    if not overwrite:
        raise ValueError(f"{path} exists: choose another destination, or replace it with --overwrite")
    if not path.is_dir() or (any(path.iterdir()) and not (path / RECORD).is_file()):
        raise ValueError(f"{path} is not a checkpoint, so --overwrite does not replace it")


def finish(partial: Path, path: str | Path, record: Record) -> None:
    """Writes model.json into `partial` and renames it to `path`, replacing what is there."""
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
