"""Which tensors of Hugging Face's files each array of a checkpoint is made of."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import GetAttrKey, SequenceKey

from treering.configs.model import ModelConfig
from treering.layers.parallel.sharding import Dims, dims_of, unstacked
from treering.models.checkpoint.model import abstract_arrays, abstract_model, named_leaves, path_in_files
from treering.models.families import families


@dataclass(frozen=True)
class TensorStack:
    """The tensors that one array is made of, and the array."""

    names: tuple[str, ...]
    """One per layer, in order, or only one for what is outside of the layers."""
    shape: tuple[int, ...]
    """Of the array, its layers dim included."""
    dims: tuple[str, ...]
    """Of one tensor, with heads and what is in a head as two dims."""
    stacked: bool
    """Whether the array's first dim counts layers."""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The sizes of `dims`."""
        return self.shape[1:] if self.stacked else self.shape


def stacked_tensors(config: ModelConfig) -> dict[str, TensorStack]:
    """What every array of a model is made of, by the array's name in a checkpoint."""
    model = abstract_model(config)
    arrays = abstract_arrays(model)
    shapes = {name: leaf.shape for name, leaf in named_leaves(arrays).items()}
    paths = jax.tree_util.tree_leaves_with_path(dims_of(arrays), is_leaf=lambda leaf: isinstance(leaf, Dims))
    declared = {path_in_files(path): (_place(path), dims) for path, dims in paths}
    found = {}
    for name, pattern in families()[config.family].names(config).items():
        place, dims = declared[name]
        stacked = "{layer}" in pattern
        layers = model.layers_at(place) if stacked else (0,)
        names = tuple(pattern.format(layer=layer) for layer in layers)
        found[name] = TensorStack(names, shapes[name], tuple(unstacked(dims)), stacked)
    return found


def _place(path: tuple[Any, ...]) -> int:
    """The place in the repeating pattern of blocks of the array at a path; -1 for one outside of the pattern."""
    match path:
        case (GetAttrKey(name="blocks"), GetAttrKey(name="pattern"), SequenceKey(idx=place), *_):
            return place
    return -1
