"""From global arrays to `shard_map` and back, for the attention algorithms that are public."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from treering.layers.attention.checks import check_shapes
from treering.layers.attention.distributed.arguments import AttentionMesh, TokenData
from treering.layers.attention.mask import Mask
from treering.layers.attention.order import check_order
from treering.layers.attention.partial import Partial

T = TypeVar("T")


def shard_map_attention(
    local: Callable[..., Partial],
    q: Array,
    k: Array,
    v: Array,
    on: AttentionMesh | Mesh,
    mask: Mask,
    tokens: TokenData | None,
) -> Partial:
    """Runs `local` on each device's part of self-attention's global arrays, `[batch seq heads head_dim]`.

    Raises ValueError, naming dims and sizes that would work, where shapes, axes or order do not fit.
    """
    on, tokens = AttentionMesh.of(on), tokens or TokenData()
    check_shapes(q, k, v)
    batch, length = q.shape[:2]
    if k.shape[1] != length:
        raise ValueError(f"seq {length} of q and {k.shape[1]} of k: self-attention takes one sequence")
    tokens.check(batch, length)
    on.check(batch=batch, heads=q.shape[2], kv_heads=k.shape[2])
    padding = -length % on.size if tokens.order == "contiguous" else 0
    check_order(tokens.order, on.size, length + padding)

    given = jax.typeof(q).sharding.spec
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
        tokens = tokens.padded(padding)

    def per_device(q, k, v, tokens, all_tokens):
        last = length if padding else None
        partial = local(q, k, v, axis=on.axis, mask=mask, tokens=tokens, all_tokens=all_tokens, length=last)
        return partial.out, partial.lse

    heads, rows = on.spec("batch", "seq", "heads"), on.spec("batch", "seq")
    # Keys of every rank need their positions and segments on every device. They are few: one gather, outside the ring.
    specs = (heads, heads, heads, rows, on.spec("batch"))
    arrays = (reshard_explicit(x, on.mesh, spec) for x, spec in zip((q, k, v, tokens, tokens), specs, strict=True))
    out, lse = jax.shard_map(per_device, mesh=on.mesh, in_specs=specs, out_specs=(heads, heads))(*arrays)
    # As q came, so out goes; where padding is cut off, no axis divides what remains.
    out, lse = reshard_explicit(out, on.mesh, given), reshard_explicit(lse, on.mesh, PartitionSpec(*given[:3]))
    return Partial(out[:, :length], lse[:, :length]) if padding else Partial(out, lse)


def reshard_explicit(tree: T, mesh: Mesh, spec: PartitionSpec) -> T:
    """Puts arrays where they are needed, where a mesh's Explicit axes leave that to the caller."""
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    return jax.tree.map(lambda x: jax.reshard(x, NamedSharding(mesh, spec)), tree)
