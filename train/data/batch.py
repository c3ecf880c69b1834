"""What one training step reads."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int

from treering.configs.errors import UserError
from treering.configs.mesh import divisors
from treering.layers.attention.order import check_order, to_order
from treering.layers.operations.context import ORDER
from treering.layers.parallel.sharding import Plan, array_field

IGNORED = -1
"""The target of a token that is not trained on: padding, a prompt, the last token of a document."""


class Batch(eqx.Module):
    """Rows of packed documents, on the host (NumPy) or on devices.

    Targets are shifted already, so tokens can be in any order. The documents of a row follow one another.
    """

    tokens: Int[Any, "batch seq"] = array_field("batch seq")
    targets: Int[Any, "batch seq"] = array_field("batch seq")
    """The token that follows each token in its document, or `IGNORED`; any negative number is ignored."""
    positions: Int[Any, "batch seq"] = array_field("batch seq")
    """Position of each token in its document; -1 for padding."""
    segments: Int[Any, "batch seq"] = array_field("batch seq")
    """Document of each token, from 1; 0 for padding."""


def check_batch(plan: Plan, *, batch: int, seq: int, accumulation: int = 1) -> None:
    """Raises ValueError, naming what works, where a batch of `batch` windows of `seq` does not divide over the mesh."""
    groups = plan.size("data", "fsdp")
    parts = groups * accumulation
    if batch % parts:
        products = ", ".join(map(str, divisors(batch)))
        raise UserError(
            f"it must be a multiple of mesh.data {plan.size('data')} x mesh.fsdp {plan.size('fsdp')} x "
            f"step.accumulation {accumulation} = {parts}, a product that may also be {products}",
            field="data.batch",
            value=batch,
            works=[size for size in (batch // parts * parts, (batch // parts + 1) * parts) if size],
        )
    check_order(ORDER, plan.size("context"), seq)


def shard_batch(batch: Batch, plan: Plan, *, rows: int | None = None, first_row: int = 0) -> Batch:
    """A host batch in token order, put onto the plan's devices in zigzag order over the context axis.

    With several processes `rows` is the number of rows of the global batch, and `batch` holds those from `first_row`
    on that this process's devices need, in full length: processes that share a row feed their parts of it.

    Raises ValueError for a window that the context axis does not divide.
    """

    def put(x: np.ndarray) -> jax.Array:
        shape = (x.shape[0] if rows is None else rows, x.shape[1])
        ordered = to_order(x, ORDER, plan.size("context"))

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            assert first_row <= start and stop <= first_row + len(ordered), "a row of this process's devices is missing"
            return ordered[start - first_row : stop - first_row, index[1]]

        return jax.make_array_from_callback(shape, plan.sharding("batch seq", shape), part)

    return jax.tree.map(put, batch)


def abstract_batch(plan: Plan, *, batch: int, seq: int) -> Batch:
    """Shapes and shardings of a batch on devices."""
    shapes = eqx.filter_eval_shape(lambda: Batch(*(jnp.zeros((batch, seq), jnp.int32) for _ in range(4))))
    return plan.abstract(shapes, "activations")


def split(batch: Batch, parts: int, plan: Plan) -> Batch:
    """A batch on devices as `[parts batch/parts seq]`, without moving a row: each device splits its own."""
    groups = plan.size("data", "fsdp")

    def cut(x: Int[jax.Array, "batch seq"]) -> jax.Array:
        rows, seq = x.shape
        x = x.reshape(groups, parts, rows // (groups * parts), seq).swapaxes(0, 1).reshape(parts, rows // parts, seq)
        spec = PartitionSpec(None, *plan.spec("batch seq", x.shape[1:]))
        return jax.lax.with_sharding_constraint(x, NamedSharding(plan.mesh, spec))

    return jax.tree.map(cut, batch)
