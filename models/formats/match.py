"""Which stored tensors make up each parameter of a model, and reading them into it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from treering.configs.model import ModelConfig
from treering.models.checkpoint.hashing import hash_array, is_finite
from treering.models.checkpoint.tensors import stacked_tensors
from treering.models.files import listing
from treering.models.formats.source import Source, StoredTensor


@dataclass(frozen=True)
class Parameter:
    """One array of the checkpoint and the tensors it is made of."""

    shape: tuple[int, ...]
    dtype: np.dtype
    """As it will be written."""
    tensors: tuple[tuple[str, StoredTensor], ...]
    """Names and tensors, one per layer, or only one for what is outside of the layers."""
    stacked: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def match(source: Source, config: ModelConfig, dtype: np.dtype | None) -> dict[str, Parameter]:
    """The tensors of every parameter.

    Raises ValueError listing all that is missing, unexpected, of another shape, or of several dtypes in one parameter.
    """
    missing: list[str] = []
    misfits: list[str] = []
    used: set[str] = set()
    parameters: dict[str, Parameter] = {}
    for name, stack in stacked_tensors(config).items():
        wanted = [source.stored_name(tensor) for tensor in stack.names]
        found = [(stored, source.tensors[stored]) for stored in wanted if stored in source.tensors]
        missing += [stored for stored in wanted if stored not in source.tensors]
        used |= set(wanted)
        misfits += [
            f"{stored} has shape {tensor.shape} instead of {_joined(stack.tensor_shape)}"
            for stored, tensor in found
            if not _regroups(stack.tensor_shape, tensor.shape)
        ]
        dtypes = {tensor.dtype for _, tensor in found}
        if len(dtypes) > 1 and dtype is None:
            misfits.append(
                f"{wanted[0]} and the same tensor of other layers have the dtypes {sorted(map(str, dtypes))} "
                "(--dtype casts all to one)"
            )
        if found:
            parameters[name] = Parameter(stack.shape, dtype or found[0][1].dtype, tuple(found), stack.stacked)
    unexpected = sorted(name for name in set(source.tensors) - used if not _needless(name, source, config))
    faults = list(source.faults) + [
        f"{len(names)} {what}: {listing(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", misfits))
        if names
    ]
    if faults:
        raise ValueError(f"{source.fields.name} and the tensors next to it do not agree: {'; '.join(faults)}")
    return parameters


def _joined(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _regroups(ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether `theirs` is `ours` with neighbouring dims joined."""
    bounds = {math.prod(ours[:i]) for i in range(len(ours) + 1)}
    return math.prod(ours) == math.prod(theirs) and all(math.prod(theirs[:i]) in bounds for i in range(len(theirs)))


def _needless(name: str, source: Source, config: ModelConfig) -> bool:
    """Whether a tensor is redundant: rotary frequencies, or a copy of the tied embedding table.

    Raises ValueError for an output projection that differs from the table that config.json ties it to.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if not config.tie_embeddings or name != source.stored_name("lm_head.weight"):
        return False
    table = source.stored_name("model.embed_tokens.weight")
    if table in source.tensors and hash_array(source.tensors[name].read()) != hash_array(source.tensors[table].read()):
        raise ValueError(
            f"{source.fields.name} says that the embeddings are tied (tie_word_embeddings), but {name} differs from "
            f"{table}: set tie_word_embeddings to false to use both"
        )
    return True


def fill(parameter: Parameter, array: np.ndarray, advance: Callable[[int], None]) -> None:
    """Reads a parameter's tensors into an array of its shape and dtype; `advance` is called with the bytes read."""
    targets = array if parameter.stacked else array[None]
    for (stored, tensor), target in zip(parameter.tensors, targets, strict=True):
        _read(stored, tensor, target)
        advance(target.nbytes)


def _read(name: str, tensor: StoredTensor, target: np.ndarray) -> None:
    """Reads `tensor` into `target`, whose dims are the tensor's or finer ones, casting where the dtypes differ.

    Raises ValueError for numbers that are not finite, and those that the other dtype cannot hold.
    """
    flat = target.reshape(tensor.shape)
    same = tensor.dtype == target.dtype
    values = flat if same else np.empty(tensor.shape, tensor.dtype)
    tensor.read_into(values)
    if not is_finite(values):
        count = values.size - np.count_nonzero(np.isfinite(values))
        raise ValueError(
            f"{name} holds {count:,} numbers that are NaN or infinite, of {values.size:,}: its files are damaged, or "
            "its training diverged"
        )
    if same:
        return
    with np.errstate(over="ignore"):
        flat[:] = values.astype(target.dtype)
    if not is_finite(flat):
        raise ValueError(f"{name} holds values that {target.dtype} cannot: cast to bfloat16 or float32 instead")
