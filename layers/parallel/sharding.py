"""From dims to shardings: every array declares its dims once, and a plan's rule table says which mesh axes split them.

Shardings of parameters, decode states, batches and restored checkpoints all come from the same declarations. A new dim
goes into `DIMS`, and into `RULES` where an axis splits it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from treering.configs.errors import UserError
from treering.configs.mesh import AXES, Axis, divisors

T = TypeVar("T")
# An abstract mesh serves where devices are not asked for; a type checker would want that shown at every use of them.
if TYPE_CHECKING:
    _Mesh = Mesh
else:
    _Mesh = Mesh | AbstractMesh

DIMS = (
    "batch seq kv_seq embed heads out_heads kv_heads head_dim mlp vocab layers "
    "pages row_pages "  # of the KV cache: all pages, and the pages of one row
    "ends"  # the tokens that end a row's text
).split()

Table = Literal["train", "prefill", "decode"]
Role = Literal["activations", "parameters"]


class Dims(tuple[str, ...]):
    """The dims of one array, in order. A leaf to JAX, unlike a plain tuple."""


@dataclass(frozen=True)
class Rule:
    """The mesh axes that split a dim.

    `required_axes` must divide the dim. `optional_axes` are added, in order, only where they divide it too: they split
    work that would otherwise be repeated, so leaving them out costs time, never correctness.
    """

    required_axes: tuple[Axis, ...] = ()
    optional_axes: tuple[Axis, ...] = ()


_BATCH = Rule(("data", "fsdp"))
_TENSOR = Rule(("tensor",))
_CONTEXT = Rule(("context",))
# One token per row: each device should read only its part of the weights, so attention's output, the MLP and the
# vocabulary are split over tensor x context (Helix, arXiv 2507.07120).
_TENSOR_CONTEXT = Rule(("tensor",), optional_axes=("context",))
_STATE = {"pages": _BATCH, "kv_seq": _CONTEXT}
_DECODE: dict[Role, dict[str, Rule]] = {
    "activations": {
        "batch": _BATCH,
        "heads": _TENSOR,
        "kv_heads": _TENSOR,
        "out_heads": _TENSOR_CONTEXT,
        "mlp": _TENSOR_CONTEXT,
        "vocab": Rule(optional_axes=("tensor", "context")),
        **_STATE,
    },
    "parameters": {
        "heads": _TENSOR,
        "kv_heads": _TENSOR,
        "out_heads": _TENSOR_CONTEXT,
        "mlp": _TENSOR_CONTEXT,
        "vocab": Rule(optional_axes=("tensor", "context")),
    },
}
RULES: dict[Table, dict[Role, dict[str, Rule]]] = {
    "train": {
        "activations": {
            "batch": _BATCH,
            "seq": _CONTEXT,
            "kv_seq": _CONTEXT,
            "heads": _TENSOR,
            "kv_heads": _TENSOR,
            "out_heads": _TENSOR,
            "mlp": _TENSOR,
            "vocab": Rule(optional_axes=("tensor",)),
        },
        "parameters": {
            "embed": Rule(optional_axes=("fsdp", "context")),
            "heads": _TENSOR,
            "kv_heads": _TENSOR,
            "out_heads": _TENSOR,
            "mlp": _TENSOR,
            "vocab": Rule(optional_axes=("tensor",)),
        },
    },
    # A long chunk of a prompt: its tokens are sharded over context. Stored weights are sharded as in decode, and a
    # layer's are gathered while it runs.
    "prefill": {
        "activations": {
            "batch": _BATCH,
            "seq": Rule(optional_axes=("context",)),
            "heads": _TENSOR,
            "kv_heads": _TENSOR,
            "out_heads": _TENSOR,
            "mlp": _TENSOR,
            "vocab": Rule(optional_axes=("tensor", "context")),
            **_STATE,
        },
        "parameters": _DECODE["parameters"],
    },
    "decode": _DECODE,
}


def array_field(dims: str | Callable[[Any], tuple[str, ...]], **kwargs: Any) -> Any:
    """Declares a field that holds one array, with its dims.

    `dims` is a string of words of `DIMS`, or a function from the module to its dims where instances differ.
    """
    return eqx.field(metadata={"dims": dims}, **kwargs)


def stacked_field(dim: str = "layers", **kwargs: Any) -> Any:
    """Declares a field whose arrays all carry one more leading dim."""
    return eqx.field(metadata={"stacked": dim}, **kwargs)


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(node, key.name)
    if isinstance(key, jax.tree_util.SequenceKey):
        return node[key.idx]
    return node[key.key]


def dims_of(tree: T) -> T:
    """The same tree with each array replaced by its `Dims`. A scalar has none to declare.

    Raises ValueError naming an array that no field on its path declares, or whose rank differs from its declaration.
    """

    def declared(path: tuple[Any, ...], leaf: Any) -> Dims:
        node: Any = tree
        prefix: tuple[str, ...] = ()
        dims: tuple[str, ...] | None = None
        for key in path:
            if isinstance(node, eqx.Module):
                metadata = type(node).__dataclass_fields__[key.name].metadata
                if "stacked" in metadata:
                    prefix += (metadata["stacked"],)
                if "dims" in metadata:
                    words = metadata["dims"]
                    dims = tuple(words.split()) if isinstance(words, str) else tuple(words(node))
            node = _child(node, key)
        name = jax.tree_util.keystr(path)
        if dims is None and leaf.ndim == 0:
            return Dims()
        if dims is None:
            raise ValueError(f"{name} declares no dims: write its field with array_field(dims)")
        if len(prefix + dims) != leaf.ndim:
            raise ValueError(f"{name} has shape {tuple(leaf.shape)} and declares the dims {' '.join(prefix + dims)}")
        return Dims(prefix + dims)

    return jax.tree_util.tree_map_with_path(declared, tree)


def unstacked(dims: Dims) -> Dims:
    """The dims of one layer's array."""
    return Dims(dim for dim in dims if dim != "layers")


def is_matrix(dims: Dims) -> bool:
    """Whether an array maps one space to another: a weight or a table, not a norm or a bias.

    Its declaration says so, since a stacked norm and a bias over heads have as many dims as a weight. Heads and their
    `head_dim` are one space.
    """
    return len([dim for dim in unstacked(dims) if dim != "head_dim"]) > 1


def make_mesh(sizes: dict[Axis, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the four axes with Auto axis types, over `devices` (default: all of them)."""
    shape = tuple(sizes[axis] for axis in AXES)
    types = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


@dataclass(frozen=True)
class Plan:
    """A mesh and the rule table that is used on it: how code learns where arrays are."""

    mesh: _Mesh
    """An abstract mesh, without devices, serves for shapes and shardings alone."""
    table: Table

    def size(self, *axes: Axis) -> int:
        """Devices along `axes` together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def axes(self, dim: str, size: int, role: Role = "activations") -> tuple[Axis, ...]:
        """The mesh axes that split a dim of `size`.

        Raises ValueError, listing the axis sizes that work, where a required axis does not divide it.
        """
        if dim not in DIMS:
            raise ValueError(f"{dim!r} is not a dim: the dims are {', '.join(DIMS)}")
        rule = RULES[self.table][role].get(dim, Rule())
        taken: list[Axis] = []
        count = 1
        for axis in rule.required_axes + rule.optional_axes:
            here = self.mesh.shape[axis]
            if size % (count * here) == 0:
                count *= here
                taken.append(axis)
            elif axis in rule.required_axes:
                what = f"{dim} {size}" if count == 1 else f"{size // count}, what other axes leave of {dim} {size}"
                raise UserError(
                    f"it must divide {what}",
                    field=f"mesh.{axis}",
                    value=here,
                    works=divisors(size // count),
                )
        return tuple(taken)

    def spec(self, dims: str | tuple[str, ...], shape: tuple[int, ...], role: Role = "activations") -> PartitionSpec:
        """The PartitionSpec of an array with `dims` and global `shape`.

        Raises ValueError where two dims would be split over one axis, or an axis does not divide its dim.
        """
        words = tuple(dims.split()) if isinstance(dims, str) else tuple(dims)
        if len(words) != len(shape):
            raise ValueError(f"dims {' '.join(words)} do not fit shape {shape}")
        used: dict[str, str] = {}
        entries: list[tuple[Axis, ...] | None] = []
        for dim, size in zip(words, shape, strict=True):
            axes = self.axes(dim, size, role)
            for axis in axes:
                if axis in used:
                    raise ValueError(f"dims {used[axis]} and {dim} of one array would both be split over {axis}")
                used[axis] = dim
            entries.append(axes or None)
        return PartitionSpec(*entries)

    def sharding(
        self, dims: str | tuple[str, ...], shape: tuple[int, ...], role: Role = "activations"
    ) -> NamedSharding:
        """The NamedSharding of an array with `dims` and global `shape`."""
        return NamedSharding(self.mesh, self.spec(dims, shape, role))

    def constrain(self, x: Array, dims: str | tuple[str, ...]) -> Array:
        """`x` with the sharding that its dims give, inside jit."""
        return jax.lax.with_sharding_constraint(x, self.sharding(dims, x.shape))

    def shardings(self, tree: T, role: Role) -> T:
        """The sharding of every array of `tree`, from the dims that its modules declare."""
        return jax.tree.map(lambda dims, leaf: self.sharding(dims, leaf.shape, role), dims_of(tree), tree)

    def abstract(self, tree: T, role: Role) -> T:
        """`tree` as ShapeDtypeStructs that carry their shardings."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            tree,
            self.shardings(tree, role),
        )

    def init(self, make: Callable[[], T], role: Role) -> T:
        """Builds a tree sharded, under one jit: no device ever holds all of it."""
        shapes = eqx.filter_eval_shape(make)
        arrays, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        built = jax.jit(lambda: eqx.filter(make(), eqx.is_array), out_shardings=self.shardings(arrays, role))()
        return eqx.combine(built, static)
