"""Writing safetensors files from tensors in any order.

The offset of each tensor follows from names, shapes and dtypes alone. So headers are written first, and every tensor
then goes to its offset, one at a time.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from treering.models.formats.safetensors_folder import DTYPES, INDEX, SINGLE

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter:
    """The weights of one model in a folder: one file, or several of up to `shard_bytes` and an index.

    A tensor larger than `shard_bytes` has a file of its own. Files are created at their full size.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], *, shard_bytes: int):
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
        shards = _divide(sizes, shard_bytes)
        self._places: dict[str, tuple[Path, int]] = {}
        """The file of each tensor, and the byte at which it starts there."""
        self._tensors = dict(tensors)
        weight_map = {}
        for number, names in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._create(folder / file, names)
            weight_map |= dict.fromkeys(names, file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _create(self, path: Path, names: Sequence[str]) -> None:
        # Wide dtypes first: then each tensor starts at a multiple of its item's size, as readers that map files want.
        ordered = sorted(names, key=lambda name: (-self._tensors[name][1].itemsize, name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in ordered:
            shape, dtype = self._tensors[name]
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            self._places[name] = (path, begin)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        for name in ordered:
            self._places[name] = (path, 8 + len(text) + self._places[name][1])

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes a tensor at its offset; `array` may group the tensor's dims differently."""
        shape, dtype = self._tensors[name]
        assert array.dtype == dtype and array.size == math.prod(shape), name
        path, offset = self._places[name]
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        descriptor = os.open(path, os.O_WRONLY)
        try:
            done = 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done : done + (1 << 30)], offset + done)
        finally:
            os.close(descriptor)


def _divide(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, as many per group as `limit` bytes hold."""
    groups: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if groups[-1] and size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups
