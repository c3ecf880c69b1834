"""How many devices each mesh axis spans."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from treering.configs.errors import UserError

Axis = Literal["data", "fsdp", "context", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)


def divisors(size: int) -> list[int]:
    """The numbers that divide `size`, such as the sizes of an axis that works."""
    return [n for n in range(1, size + 1) if size % n == 0]


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the four mesh axes; their product must be the number of devices.

    One axis that is None takes the remaining devices: context to generate, fsdp to train. Any other is 1.
    """

    data: int | None = None
    """Devices over rows of the batch."""
    fsdp: int | None = None
    """Devices over rows of the batch and, in training, over parameters."""
    context: int | None = None
    """Devices over the sequence: ring attention in training, the KV cache and tree attention in decoding."""
    tensor: int | None = None
    """Devices over heads, MLP and vocabulary."""

    def resolve(self, device_count: int, *, fill: Axis) -> dict[Axis, int]:
        """Sizes of all axes for `device_count` devices; `fill` takes the remaining devices if it is None.

        Raises ValueError where a size is below 1 or the product is not `device_count`.
        """
        given: dict[Axis, int | None] = {axis: getattr(self, axis) for axis in AXES}
        for axis, size in given.items():
            if size is not None and size < 1:
                raise UserError("it must be at least 1", field=f"mesh.{axis}", value=size)
        sizes: dict[Axis, int] = {axis: 1 if size is None else size for axis, size in given.items()}
        taken = math.prod(size for axis, size in sizes.items() if axis != fill or given[fill] is not None)
        if given[fill] is None and device_count % taken == 0:
            return {**sizes, fill: device_count // taken}
        if taken == device_count:
            return sizes
        is_fill_free = given[fill] is None
        rule = f"{'divide' if is_fill_free else 'be'} the number of devices, {device_count}"
        simulate = f"--cpu-devices {taken} simulates {taken} on a CPU"
        named: list[Axis] = [axis for axis in AXES if given[axis] is not None]
        if len(named) == 1:
            works = divisors(device_count) if is_fill_free else [device_count]
            raise UserError(f"it must {rule}; {simulate}", field=f"mesh.{named[0]}", value=taken, works=works)
        product = " x ".join(f"mesh.{axis} {sizes[axis]}" for axis in named)
        raise ValueError(f"{product}: their product, {taken}, must {rule}; {simulate}")
