"""Types of values inside `shard_map`: over which mesh axes they may differ."""

from typing import TypeVar

import jax
from jax import lax

T = TypeVar("T")


def varying_axes(*trees: object) -> frozenset[str]:
    """The mesh axes over which any leaf of the trees varies; none outside `shard_map`."""
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(trees)))


def vary_over(axes: frozenset[str], tree: T) -> T:
    """The tree with every leaf marked as varying over `axes` too.

    The gradient of the mark is a sum over the axes that it added, so a value shared by devices gets the
    sum of their gradients.
    """

    def mark(leaf):
        missing = axes - varying_axes(leaf)
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(mark, tree)
