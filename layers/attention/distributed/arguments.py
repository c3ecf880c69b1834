"""What the functions over a mesh take beside q, k and v: where arrays are, and what their tokens are."""

import math
from dataclasses import dataclass

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from treering.layers.attention.checks import check_token_data, divisors
from treering.layers.attention.order import Order


class TokenData(eqx.Module):
    """Positions and segments of tokens `[batch seq]`, and the order that they are in.

    Without `positions` the order gives them; with `segments` a token sees its own document only, and segment 0 is
    padding. Where causality follows the order of tokens, leave positions out: then the order fixes which blocks meet.
    """

    positions: Int[Array, "..."] | None = None
    segments: Int[Array, "..."] | None = None
    order: Order = eqx.field(static=True, default="contiguous")

    def check(self, batch: int, seq: int, prefix: str = "") -> None:
        """Raises ValueError where an array is not `[batch seq]`, or not of whole numbers."""
        check_token_data(f"{prefix}positions", self.positions, batch, seq)
        check_token_data(f"{prefix}segments", self.segments, batch, seq)

    def positioned(self, batch: int, start: int, stop: int) -> "TokenData":
        """With positions: those given, or start ... stop - 1 in every row."""
        positions = self.positions
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(start, stop, dtype=jnp.int32), (batch, stop - start))
        return TokenData(positions, self.segments, self.order)

    def padded(self, count: int) -> "TokenData":
        """With `count` tokens of padding at the end: empty slots, of segment 0."""

        def pad(x: Array | None, fill: int) -> Array | None:
            return None if x is None else jnp.pad(x, ((0, 0), (0, count)), constant_values=fill)

        return TokenData(pad(self.positions, -1), pad(self.segments, 0), self.order)


@dataclass(frozen=True)
class AttentionMesh:
    """Where the arrays of attention are: the sequence over `axis` of a mesh, rows and heads over other axes.

    `batch_axes` and `head_axes` default to ("data", "fsdp") and ("tensor",) as far as the mesh has them. Raises
    ValueError where an axis is not the mesh's, or would split two dims.
    """

    mesh: Mesh
    axis: str = "context"
    batch_axes: tuple[str, ...] | None = None
    head_axes: tuple[str, ...] | None = None

    @staticmethod
    def of(on: "AttentionMesh | Mesh") -> "AttentionMesh":
        """`on` itself, or a mesh with the axes that it has by name."""
        return on if isinstance(on, AttentionMesh) else AttentionMesh(on)

    def __post_init__(self):
        if self.axis not in self.mesh.shape:
            raise ValueError(f"axis {self.axis!r}: the mesh has {', '.join(self.mesh.shape)}")
        rows = self._axes("batch_axes", ("data", "fsdp"), taken=(self.axis,))
        object.__setattr__(self, "batch_axes", rows)
        object.__setattr__(self, "head_axes", self._axes("head_axes", ("tensor",), taken=(self.axis, *rows)))

    def _axes(self, argument: str, default: tuple[str, ...], *, taken: tuple[str, ...]) -> tuple[str, ...]:
        asked, names = getattr(self, argument), ", ".join(self.mesh.shape)
        if asked is None:
            return tuple(name for name in default if name in self.mesh.shape and name not in taken)
        if isinstance(asked, str) or len(set(asked)) < len(asked):
            raise ValueError(f"{argument} {asked!r}: it must be a tuple of different axes, of {names}")
        for name in asked:
            if name not in self.mesh.shape:
                raise ValueError(f"{argument} {asked}: the mesh has no axis {name!r} (it has {names})")
            if name in taken:
                raise ValueError(f"{argument} {asked}: axis {name!r} shards another dim already")
        return asked

    @property
    def size(self) -> int:
        """Devices along `axis`."""
        return self.mesh.shape[self.axis]

    def parts(self, axes: tuple[str, ...] | None) -> int:
        """Devices along `axes` together."""
        return math.prod(self.mesh.shape[name] for name in axes or ())

    def check(self, *, batch: int, heads: int, kv_heads: int) -> None:
        """Raises ValueError, naming sizes that work, where axes do not divide their dims."""
        for axes, dims in (
            (self.batch_axes, {"batch": batch}),
            (self.head_axes, {"heads": heads, "kv_heads": kv_heads}),
        ):
            size = self.parts(axes)
            for dim, length in dims.items():
                if length % size:
                    hint = "; the context axis takes any number of heads" if "heads" in dim else ""
                    raise ValueError(
                        f"{dim} {length} over mesh axes {', '.join(axes or ())} of size {size}: it must divide (sizes "
                        f"that work: {divisors(length)}{hint})"
                    )

    def spec(self, *dims: str | None) -> PartitionSpec:
        """How an array is split of whose dims some are "batch", "seq" or "heads", and others None."""
        axes = {"batch": self.batch_axes, "seq": self.axis, "heads": self.head_axes, None: None}
        return PartitionSpec(*(axes[dim] for dim in dims))
