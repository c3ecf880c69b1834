"""From global arrays to `shard_map` and back, for the public attention functions.

They run under the caller's jit, where the program is the caller's, and outside of any, where arrays are put on the mesh
first and a program is compiled once for each set of shapes and settings.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import concrete_or_error
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from treering.layers.attention.checks import check_mask, check_shapes, check_token_data, divisors
from treering.layers.attention.mask import Mask
from treering.layers.attention.order import Order, check_order
from treering.layers.attention.partial import Partial


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
    """Runs `local` on each device's part of the global arrays of self-attention, `[batch seq heads head_dim]`.

    Raises ValueError, naming dims and sizes that would work, where shapes, axes or order do not fit.
    """
    check_shapes(q, k, v)
    check_mask(mask)
    batch, length = q.shape[:2]
    if k.shape[1] != length:
        raise ValueError(f"seq {length} of q and {k.shape[1]} of k: self-attention takes one sequence")
    check_token_data("positions", positions, batch, length)
    check_token_data("segments", segments, batch, length)
    if axis not in mesh.shape:
        raise ValueError(f"axis {axis!r}: the mesh has {', '.join(mesh.shape)}")
    mesh = with_auto_axes_if_eager(mesh, q, k, v)
    batch_axes = mesh_axes(mesh, "batch_axes", batch_axes, ("data", "fsdp"), taken=(axis,))
    head_axes = mesh_axes(mesh, "head_axes", head_axes, ("tensor",), taken=(axis, *batch_axes))
    check_divides(mesh, batch_axes, batch=batch)
    check_divides(mesh, head_axes, heads=q.shape[2], kv_heads=k.shape[2])
    p = mesh.shape[axis]
    padding = -length % p if order == "contiguous" else 0
    check_order(order, p, length + padding)

    q_spec = jax.typeof(q).sharding.spec
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
    call = ShardMapCall(
        _self_attention,
        (local, axis, mask, order, length if padding else None),
        mesh,
        in_specs=(heads, heads, heads, tokens, PartitionSpec(batch_axes, None)),
        out_specs=(heads, PartitionSpec(batch_axes, axis, head_axes)),
    )
    out, lse = call(q, k, v, data, everyone)
    # out is sharded as q was; where padding is cut off, no axis divides what remains.
    out, lse = _reshard_explicit(out, mesh, q_spec), _reshard_explicit(lse, mesh, PartitionSpec(*q_spec[:3]))
    return Partial(out[:, :length], lse[:, :length]) if padding else Partial(out, lse)


def with_auto_axes_if_eager(mesh: jax.sharding.Mesh, *arrays: Array) -> jax.sharding.Mesh:
    """The mesh, with Auto axes where concrete arrays would meet its Explicit ones outside of `jax.set_mesh`.

    There JAX cannot differentiate what is on a mesh with Explicit axes. Arrays that are on it already keep it.
    """
    on_meshes = any(not jax.typeof(x).sharding.mesh.empty for x in arrays)
    if on_meshes or not _are_concrete(arrays) or not jax.sharding.get_abstract_mesh().empty:
        return mesh
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def _self_attention(settings: tuple, q: Array, k: Array, v: Array, data: dict, everyone: dict) -> tuple[Array, Array]:
    local, axis, mask, order, length = settings
    partial = local(q, k, v, axis=axis, mask=mask, order=order, length=length, **data, **everyone)
    return partial.out, partial.lse


@dataclass(frozen=True)
class ShardMapCall:
    """`shard_map` of `function(settings, *arrays)`. Equal calls share compiled programs: all fields are hashable."""

    function: Callable[..., Any]
    """A function at the top of a module, whose results depend on its arguments alone."""
    settings: tuple
    mesh: jax.sharding.Mesh
    in_specs: tuple[PartitionSpec, ...]
    """One for each argument, which may be a tree or None."""
    out_specs: Any

    def __call__(self, *arrays: Any) -> Any:
        """Inside the caller's jit a part of its program; outside of any, one of its own."""
        eager = _are_concrete(arrays)
        # Inside of jax.set_mesh JAX puts arrays on that mesh itself.
        put = _put if eager and jax.sharding.get_abstract_mesh().empty else _reshard_explicit
        arrays = tuple(put(x, self.mesh, spec) for x, spec in zip(arrays, self.in_specs, strict=True))
        return _compiled(self, *arrays) if eager else self.traced(*arrays)

    def traced(self, *arrays: Any) -> Any:
        """The call as it is traced."""
        function = functools.partial(self.function, self.settings)
        return jax.shard_map(function, mesh=self.mesh, in_specs=self.in_specs, out_specs=self.out_specs)(*arrays)


@functools.partial(jax.jit, static_argnums=0)
def _compiled(call: ShardMapCall, *arrays: Any) -> Any:
    return call.traced(*arrays)


def _are_concrete(tree: Any) -> bool:
    return all(_concrete(x) is not None for x in jax.tree.leaves(tree))


def _concrete(x: Array) -> Any:
    """The value of an array that is known while Python runs, also where it is being differentiated; else None."""
    try:
        return concrete_or_error(None, x)
    except jax.errors.ConcretizationTypeError:
        return None


def _put(tree: Any, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> Any:
    """Concrete arrays, moved to the mesh if they are on other devices."""
    target = NamedSharding(mesh, spec)

    def put(x):
        value = _concrete(x)
        if not isinstance(value, jax.Array):
            return jax.device_put(x, target)
        if value.sharding.device_set == target.device_set:
            return _reshard_explicit(x, mesh, spec)
        # An array that is committed to a device gets its gradient there.
        return jax.device_put(x, target, src=value.sharding if value.committed else None)

    return jax.tree.map(put, tree)


def _reshard_explicit(tree: Any, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> Any:
    """Reshards arrays where a mesh's Explicit axes leave that to the caller."""
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
            hint = "; the context axis takes any number of heads" if "heads" in dim else ""
            raise ValueError(
                f"{dim} {length} over mesh axes {', '.join(axes)} of size {size}: it must divide (sizes that work: "
                f"{divisors(length)}{hint})"
            )
