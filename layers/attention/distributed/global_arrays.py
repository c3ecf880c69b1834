"""From global arrays to `shard_map` and back, for the public attention functions.

They run under the caller's jit, where the program is the caller's, and outside of any, where arrays are put on the mesh
first and a program is compiled once for each set of shapes and settings.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import concrete_or_error
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from treering.layers.attention.checks import check_mask, check_shapes
from treering.layers.attention.distributed.arguments import AttentionMesh, TokenData
from treering.layers.attention.mask import Mask
from treering.layers.attention.order import check_order
from treering.layers.attention.partial import Partial


def shard_map_attention(
    local: Callable[..., Partial],
    q: Array,
    k: Array,
    v: Array,
    on: AttentionMesh | Mesh,
    mask: Mask,
    tokens: TokenData | None,
) -> Partial:
    """Runs `local` on each device's part of the global arrays of self-attention, `[batch seq heads head_dim]`.

    Raises ValueError, naming dims and sizes that would work, where shapes, axes or order do not fit.
    """
    on, tokens = with_auto_axes_if_eager(AttentionMesh.of(on), q, k, v), tokens or TokenData()
    check_shapes(q, k, v)
    check_mask(mask)
    batch, length = q.shape[:2]
    if k.shape[1] != length:
        raise ValueError(f"seq {length} of q and {k.shape[1]} of k: self-attention takes one sequence")
    tokens.check(batch, length)
    on.check(batch=batch, heads=q.shape[2], kv_heads=k.shape[2])
    padding = -length % on.size if tokens.order == "contiguous" else 0
    check_order(tokens.order, on.size, length + padding)

    q_spec = jax.typeof(q).sharding.spec
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
        tokens = tokens.padded(padding)
    heads = on.spec("batch", "seq", "heads")
    call = ShardMapCall(
        _self_attention,
        (local, on.axis, mask, length if padding else None),
        on.mesh,
        # Keys of every rank need their positions and segments on every device. They are few: one gather, outside the
        # ring.
        in_specs=(heads, heads, heads, on.spec("batch", "seq"), on.spec("batch")),
        out_specs=(heads, heads),
    )
    out, lse = call(q, k, v, tokens, tokens)
    # out is sharded as q was; where padding is cut off, no axis divides what remains.
    out, lse = _reshard_explicit(out, on.mesh, q_spec), _reshard_explicit(lse, on.mesh, PartitionSpec(*q_spec[:3]))
    return Partial(out[:, :length], lse[:, :length]) if padding else Partial(out, lse)


def with_auto_axes_if_eager(on: AttentionMesh, *arrays: Array) -> AttentionMesh:
    """`on`, with Auto axes where concrete arrays would meet Explicit ones outside of `jax.set_mesh`.

    There JAX cannot differentiate what is on a mesh with Explicit axes. Arrays that are on it already keep it.
    """
    on_meshes = any(not jax.typeof(x).sharding.mesh.empty for x in arrays)
    if on_meshes or not _are_concrete(arrays) or not jax.sharding.get_abstract_mesh().empty:
        return on
    mesh = Mesh(on.mesh.devices, on.mesh.axis_names, axis_types=(AxisType.Auto,) * on.mesh.devices.ndim)
    return dataclasses.replace(on, mesh=mesh)


def _self_attention(
    settings: tuple, q: Array, k: Array, v: Array, tokens: TokenData, all_tokens: TokenData
) -> tuple[Array, Array]:
    local, axis, mask, length = settings
    partial = local(q, k, v, axis=axis, mask=mask, tokens=tokens, all_tokens=all_tokens, length=length)
    return partial.out, partial.lse


@dataclass(frozen=True)
class ShardMapCall:
    """`shard_map` of `function(settings, *arrays)`. Equal calls share compiled programs: all fields are hashable."""

    function: Callable[..., Any]
    """A function at the top of a module, whose results depend on its arguments alone."""
    settings: tuple
    mesh: Mesh
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


def _put(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
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


def _reshard_explicit(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Reshards arrays where a mesh's Explicit axes leave that to the caller."""
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    return jax.tree.map(lambda x: jax.reshard(x, NamedSharding(mesh, spec)), tree)
