"""From global arrays to `shard_map` and back, for the attention algorithms that are public."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from treering.layers.attention.checks import check_shapes, check_token_data
from treering.layers.attention.mask import Mask
from treering.layers.attention.order import Order, check_order
from treering.layers.attention.partial import Partial

T = TypeVar("T")


def shard_map_attention(
    local: Callable[..., Partial],
    q: Array,
    k: Array,
    v: Array,
    mesh: jax.sharding.Mesh,
    axis: str,
    mask: Mask,
    positions: Array | None,
    segments: Array | None,
    order: Order,
    batch_axes: tuple[str, ...] | None,
    head_axes: tuple[str, ...] | None,
) -> Partial:
    """Runs `local` on each device's share of self-attention's global arrays, `[batch seq heads head_dim]`.

    Raises ValueError, naming dims and sizes that would work, where shapes, axes or order do not fit.
    """
    check_shapes(q, k, v)
    batch, length = q.shape[:2]
    if k.shape[1] != length:
        raise ValueError(f"seq {length} of q and {k.shape[1]} of k: self-attention takes one sequence")
    check_token_data("positions", positions, batch, length)
    check_token_data("segments", segments, batch, length)
    if axis not in mesh.shape:
        raise ValueError(f"axis {axis!r}: the mesh has {', '.join(mesh.shape)}")
    batch_axes = mesh_axes(mesh, "batch_axes", batch_axes, ("data", "fsdp"), taken=(axis,))
    head_axes = mesh_axes(mesh, "head_axes", head_axes, ("tensor",), taken=(axis, *batch_axes))
    check_divides(mesh, batch_axes, batch=batch)
    check_divides(mesh, head_axes, heads=q.shape[2], kv_heads=k.shape[2])
    p = mesh.shape[axis]
    padding = -length % p if order == "contiguous" else 0
    check_order(order, p, length + padding)

    home = jax.typeof(q).sharding.spec
    heads, tokens = PartitionSpec(batch_axes, axis, head_axes, None), PartitionSpec(batch_axes, axis)
    data = {"positions": positions, "segments": segments}
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
        # An empty slot, and segment 0.
        fill = {"positions": -1, "segments": 0}
        data = {
            name: None if x is None else jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill[name])
            for name, x in data.items()
        }
    # Keys of every rank need their positions and segments on every device. They are few: one gather, outside the ring.
    everyone = {f"kv_{name}": x for name, x in data.items()}

    def per_device(q, k, v, data, everyone):
        last = length if padding else None
        partial = local(q, k, v, axis=axis, mask=mask, order=order, length=last, **data, **everyone)
        return partial.out, partial.lse

    specs = (heads, heads, heads, tokens, PartitionSpec(batch_axes, None))
    rows = PartitionSpec(batch_axes, axis, head_axes)
    arrays = (reshard_explicit(x, mesh, spec) for x, spec in zip((q, k, v, data, everyone), specs, strict=True))
    out, lse = jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=(heads, rows))(*arrays)
    # As q came, so out goes; where padding is cut off, no axis divides what remains.
    out, lse = reshard_explicit(out, mesh, home), reshard_explicit(lse, mesh, PartitionSpec(*home[:3]))
    return Partial(out[:, :length], lse[:, :length]) if padding else Partial(out, lse)


def reshard_explicit(tree: T, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> T:
    """Puts arrays where they are needed, where a mesh's Explicit axes leave that to the caller."""
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    return jax.tree.map(lambda x: jax.reshard(x, NamedSharding(mesh, spec)), tree)


def mesh_axes(
    mesh: jax.sharding.Mesh,
    argument: str,
    asked: tuple[str, ...] | None,
    default: tuple[str, ...],
    *,
    taken: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """The axes asked for, or those of the default that the mesh has.

    Raises ValueError where an axis asked for is not the mesh's, comes twice, or shards another dim already.
    """
    if asked is None:
        return tuple(name for name in default if name in mesh.shape and name not in taken)
    if isinstance(asked, str) or len(set(asked)) < len(asked):
        raise ValueError(f"{argument} {asked!r}: it must be a tuple of different axes, of {', '.join(mesh.shape)}")
    for name in asked:
        if name not in mesh.shape:
            raise ValueError(f"{argument} {asked}: the mesh has no axis {name!r} (it has {', '.join(mesh.shape)})")
        if name in taken:
            raise ValueError(f"{argument} {asked}: axis {name!r} shards another dim already")
    return asked


def check_divides(mesh: jax.sharding.Mesh, axes: tuple[str, ...], **dims: int) -> None:
    """Raises ValueError, naming sizes that work, where the axes together do not divide a dim."""
    size = 1
    for name in axes:
        size *= mesh.shape[name]
    for dim, length in dims.items():
        if length % size:
            works = ", ".join(str(n) for n in range(1, length + 1) if length % n == 0)
            hint = "; the context axis takes any number of heads" if "heads" in dim else ""
            raise ValueError(
                f"{dim} {length} over mesh axes {', '.join(axes)} of size {size}: it must divide (sizes that work: "
                f"{works}{hint})"
            )
