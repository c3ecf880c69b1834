"""Named arrays in a folder, written and read by orbax.

A parameter may be given as an array or as a `Deferred`, which is computed, written and freed before the next one: so a
conversion holds one parameter at a time.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

CHUNK_BYTES = 16 << 20
"""Bytes of one file of an array: small enough that each device of a large mesh reads little more than its shards."""


@dataclass(frozen=True)
class Deferred:
    """An array that is not in memory yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fill: Callable[[np.ndarray], None]
    """Writes the values into an empty array of this shape and dtype."""
    written: Callable[[np.ndarray], None]
    """Called with the array once it is on disk."""
    done: bool = False
    """Whether it is on disk already, from an earlier call."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize


class _DeferredHandler(ocp.type_handlers.NumpyHandler):
    """Writes deferred arrays one after the other, each as orbax writes any array of NumPy's."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for value, info, arg in zip(values, infos, args or [None] * len(values), strict=True):
            if value.done:
                continue
            array = np.empty(value.shape, value.dtype)
            value.fill(array)
            for future in await super().serialize([array], [info], [arg] if arg else None):
                future.result()
            value.written(array)
        return []


def write_arrays(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Writes `arrays` into an existing `folder`; the caller makes sure that nobody reads it before this returns.

    Arrays are stored uncompressed in chunks, one folder per name, so that any sharding reads only what it needs.
    """
    array_handler().save(_epath(folder), args=save_arguments(arrays))


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """The orbax handler that `write_arrays` uses; it can also write in the background.

    Of a write that fails it raises the first error; `quiet_orbax` keeps it from logging that and others, too.
    """
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler()), (Deferred, _DeferredHandler())
    )
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry, use_ocdbt=False, use_zarr3=False, use_compression=False
    )


def save_arguments(arrays: Mapping[str, Any]) -> ocp.args.PyTreeSave:
    """What `array_handler` takes to write `arrays`."""
    chunked = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
    return ocp.args.PyTreeSave(dict(arrays), save_args=chunked)


def _epath(folder: Path) -> epath.Path:
    """The folder as tensorstore takes it, which refuses paths with `..`."""
    return epath.Path(folder.resolve())


@contextlib.contextmanager
def _damage_as_value_error(folder: Path) -> Iterator[None]:
    """Whatever orbax and tensorstore raise for files that are cut, damaged or gone, as a ValueError of one line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        message = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder} is damaged or incomplete: convert or copy it again ({message})") from error


def read_shapes(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array in `folder`, as stored; each file of each array is there, with all its bytes.

    Raises ValueError where that is not so. orbax would find it too, but with many reads in flight, which report their
    failures on standard error.
    """
    with _damage_as_value_error(folder):
        return {array.name: _read_shape(array) for array in sorted(folder.iterdir()) if array.is_dir()}


def _read_shape(array: Path) -> jax.ShapeDtypeStruct:
    """From an array's folder: `.zarray`, which says how the chunks are, and one file per chunk (zarr, version 2)."""
    try:
        layout = json.loads((array / ".zarray").read_text())
        shape, chunk, dtype = layout["shape"], layout["chunks"], np.dtype(layout["dtype"])
        counts = [-(-size // step) for size, step in zip(shape, chunk, strict=True)]
        chunk_bytes = math.prod(chunk) * dtype.itemsize
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{array.name}/.zarray does not describe an array") from error
    for place in np.ndindex(*counts):
        file = array / (".".join(map(str, place)) or "0")
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno()).st_size
        if found != chunk_bytes:
            raise ValueError(f"{array.name}/{file.name} holds {found:,} bytes instead of {chunk_bytes:,}")
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def read_arrays(
    folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], dtype: np.dtype | None, *, least: int | None = None
) -> dict[str, jax.Array]:
    """The arrays of `folder`, each straight onto the sharding of its entry in `wanted`, in `dtype` or as stored.

    With `least`, arrays with at least that many rows (entries of the first dim) are cut, or padded with zeros, to what
    is wanted. Raises ValueError listing what is missing, unexpected or of another shape.
    """
    stored = read_shapes(folder)
    faults = [f"missing {name}" for name in wanted if name not in stored]
    faults += [f"unexpected {name}" for name in stored if name not in wanted]
    faults += [
        f"{name} has shape {tuple(stored[name].shape)} instead of {tuple(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in stored and not _fits(stored[name].shape, leaf.shape, least)
    ]
    if faults:
        raise ValueError(f"{folder} does not hold the weights that its configuration describes: {'; '.join(faults)}")
    arguments = {
        name: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding,
            global_shape=leaf.shape,
            dtype=dtype or stored[name].dtype,
            strict=least is None,
        )
        for name, leaf in wanted.items()
    }
    # Unbounded, all arrays would be read at once and be in host memory twice. One shard must fit.
    largest = max(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in wanted.values())
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=1 + 8 * largest // 10**9)
    with _damage_as_value_error(folder):
        return handler.restore(_epath(folder), args=ocp.args.PyTreeRestore(item=dict(wanted), restore_args=arguments))


def _fits(stored: tuple[int, ...], wanted: tuple[int, ...], least: int | None) -> bool:
    if least is None:
        return stored == wanted
    return stored[1:] == wanted[1:] and len(stored) == len(wanted) and stored[0] >= least


def read_array(folder: Path, name: str, dtype: np.dtype) -> np.ndarray:
    """One array of `folder`, whole and on the host; `dtype` is the one that it was stored in."""
    with _damage_as_value_error(folder):
        return ocp.PyTreeCheckpointHandler().restore(
            _epath(folder),
            args=ocp.args.PyTreeRestore(
                item={name: 0},
                restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)},
                partial_restore=True,
            ),
        )[name]
