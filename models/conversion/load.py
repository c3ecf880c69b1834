"""Models to run: a checkpoint, a Hugging Face folder, a Meta folder, or a GGUF file."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import equinox as eqx
import jax
import numpy as np

from treering.configs.model import ModelConfig
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.arrays import DTYPES
from treering.models.checkpoint.model import abstract_model, load_model, named_leaves
from treering.models.checkpoint.record import RECORD, WEIGHTS, check_no_run, read_record
from treering.models.files import copy_folder
from treering.models.formats.match import Parameter, fill, match
from treering.models.formats.meta import PARAMS
from treering.models.formats.open import open_source, read_source_config
from treering.models.formats.source import Source
from treering.models.progress import byte_progress
from treering.models.tokenizer import TOKENIZER, Tokenizer
from treering.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A model on disk, of which only the configuration has been read."""

    name: str
    """Where it is, as it was asked for."""
    identity: str
    """Differs for other weights."""
    config: ModelConfig
    load: Callable[[Plan, str | None], Transformer]
    """The model, stacked, each parameter on its devices of a plan; cast to a dtype, or as stored where it is None."""
    tokenizer: Callable[[], Tokenizer]
    """Raises ValueError where there is none."""
    save_tokenizer: Callable[[Path], None]
    """Writes the tokenizer's files into a new folder. Raises ValueError where there is none."""


def open_model(path: str | Path, *, ignore_fields: Collection[str] = ()) -> OpenModel:
    """The model at `path`; `ignore_fields` names fields of a foreign config.json that are ignored.

    Raises what `read_record` does for what looks like a checkpoint, and what `open_source` does for the rest.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(
            f"{path} does not exist: give a checkpoint, a Hugging Face folder, a Meta folder or a GGUF file (to train "
            "from, also the folder of a run); names on the Hugging Face hub are not downloaded"
        )
    check_no_run(folder)
    foreign = folder.is_file() or any((folder / name).is_file() for name in ("config.json", PARAMS))
    if not foreign or (folder / RECORD).exists() or (folder / WEIGHTS).is_dir():
        record = read_record(folder)
        return OpenModel(
            name=str(path),
            identity=record.fingerprint,
            config=record.config,
            load=partial(load_model, folder),
            tokenizer=partial(Tokenizer.load, folder),
            save_tokenizer=partial(_copy_tokenizer, folder),
        )
    source = open_source(folder)
    config = read_source_config(source, ignore_fields)
    return OpenModel(
        name=str(path),
        identity=source.identity,
        config=config,
        load=partial(load_source, source, config),
        tokenizer=partial(_tokenizer_of, source),
        save_tokenizer=partial(_save_tokenizer_of, source),
    )


def load_source(source: Source, config: ModelConfig, plan: Plan, dtype: str | None = None) -> Transformer:
    """The model of tensors that other tools wrote, without a checkpoint in between.

    Parameters go through host memory to their devices one at a time. Raises ValueError as a conversion would.
    """
    arrays, static = eqx.partition(abstract_model(config), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    shardings = _shardings(plan, arrays)
    parameters = match(source, config, None if dtype is None else DTYPES[dtype])
    on_devices = {}
    with byte_progress() as progress:
        total = sum(parameter.nbytes for parameter in parameters.values())
        task = progress.add_task("loading", total=total)
        for name, parameter in parameters.items():
            on_devices[name] = _to_devices(parameter, shardings[name], lambda count: progress.advance(task, count))
    structure = jax.tree.structure(arrays)
    return eqx.combine(jax.tree.unflatten(structure, [on_devices[name] for name in shardings]), static)


def _shardings(plan: Plan, arrays: Transformer) -> dict[str, jax.sharding.NamedSharding]:
    """The shardings of a model's parameters by their paths."""
    return {name: leaf.sharding for name, leaf in named_leaves(plan.abstract(arrays, "parameters")).items()}


def _to_devices(
    parameter: Parameter, sharding: jax.sharding.NamedSharding, advance: Callable[[int], None]
) -> jax.Array:
    array = np.empty(parameter.shape, parameter.dtype)
    fill(parameter, array, advance)
    # Waits: the next parameter takes the place of this one in host memory.
    return jax.block_until_ready(jax.device_put(array, sharding))


def _tokenizer_of(source: Source) -> Tokenizer:
    with TemporaryDirectory() as scratch:
        _save_tokenizer_of(source, Path(scratch))
        return Tokenizer.from_folder(Path(scratch), origin=source.fields.name)


def _copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    Tokenizer.load(checkpoint)
    copy_folder(checkpoint / TOKENIZER, folder)


def _save_tokenizer_of(source: Source, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not source.save_tokenizer(folder):
        raise ValueError(f"{source.fields.name} has no tokenizer next to it, and text needs one")
