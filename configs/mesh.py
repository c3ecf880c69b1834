"""How many devices each mesh axis spans."""

from dataclasses import dataclass
from typing import Literal, get_args

Axis = Literal["data", "fsdp", "context", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the four mesh axes; their product must be the number of devices.

    An axis left at None takes the devices that the others leave over, where the caller says which
    axis that is (context to generate, fsdp to train), and 1 elsewhere.
    """

    data: int | None = None
    """Devices over rows of the batch."""
    fsdp: int | None = None
    """Devices over rows of the batch and over parameters (training)."""
    context: int | None = None
    """Devices over the sequence: ring attention in training, the KV cache and tree attention in decoding."""
    tensor: int | None = None
    """Devices over heads, MLP and vocabulary."""

    def resolve(self, device_count: int, *, fill: Axis) -> dict[Axis, int]:
        """Sizes of all axes for `device_count` devices; `fill` takes what the others leave over.

        Raises ValueError where a size is below one or the product is not `device_count`.
        """
        given: dict[Axis, int | None] = {axis: getattr(self, axis) for axis in AXES}
        for axis, size in given.items():
            if size is not None and size < 1:
                raise ValueError(f"mesh.{axis} is {size}: an axis spans at least 1 device")
        sizes: dict[Axis, int] = {axis: 1 if size is None else size for axis, size in given.items()}
        rest = 1
        for axis in AXES:
            if axis != fill or given[fill] is not None:
                rest *= sizes[axis]
        if given[fill] is None and device_count % rest == 0:
            sizes[fill] = device_count // rest
            return sizes
        if given[fill] is not None and rest == device_count:
            return sizes
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1"
        divisors = ", ".join(str(n) for n in range(1, device_count + 1) if device_count % n == 0)
        raise ValueError(
            f"the mesh {product} takes {rest} devices and {device_count} are here: the product of the axes must be "
            f"the number of devices (sizes that divide it: {divisors}; --cpu-devices {rest} simulates {rest} on a CPU)"
        )
