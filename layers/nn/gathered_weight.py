"""Sharded weights that are gathered while they are used: in a training step, and in a long chunk of a prompt.

A matrix is sharded over devices that also split the batch (arXiv 1910.02054, 2304.11277). `GatheredWeight` gathers it
only while a product runs, forward and again backward, so that nothing kept for the backward pass is a gathered matrix;
and its gradient has a dtype of its own, so that devices and accumulation steps add up float32 numbers while the product
itself runs in bfloat16.
"""

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from treering.configs.mesh import Axis
from treering.layers.attention.varying import vary_over, varying_axes
from treering.layers.nn.embed import lookup
from treering.layers.nn.linear import project
from treering.layers.parallel.sharding import Dims, Plan, dims_of, is_matrix, unstacked

T = TypeVar("T")


@dataclass(frozen=True)
class WeightSharding:
    """How a matrix is stored, sharded, and how it is gathered to multiply."""

    plan: Plan
    dims: Dims
    shape: tuple[int, ...]

    @property
    def sharded(self) -> PartitionSpec:
        """The sharding of the stored matrix, and of its gradient."""
        return self.plan.spec(self.dims, self.shape, "parameters")

    @property
    def gathered(self) -> PartitionSpec:
        """Its sharding while it multiplies: by heads, mlp or vocabulary, over tensor alone."""
        return self.plan.spec(self.dims, self.shape, "activations")

    def gather(self, value: Array) -> Array:
        """The gathered matrix."""
        return self.plan.constrain(value, self.dims)

    def shard(self, gradient: Array) -> Array:
        """A gradient, sharded as the stored matrix is."""
        return lax.with_sharding_constraint(gradient, self.plan.sharding(self.dims, self.shape, "parameters"))

    def reduce_scatter(self, gradient: Array) -> Array:
        """Inside `shard_map`: the sum of the gradients from each device's tokens, sharded as the stored matrix is."""
        everywhere: set[Axis] = set()
        for place, (dim, size) in enumerate(zip(self.dims, self.shape, strict=True)):
            gathered, sharded = self.plan.axes(dim, size, "activations"), self.plan.axes(dim, size, "parameters")
            axes = tuple(axis for axis in sharded if axis not in gathered)
            if axes:
                gradient = lax.psum_scatter(gradient, axes, scatter_dimension=place, tiled=True)
            everywhere.update(sharded)
        others = tuple(sorted(varying_axes(gradient) - everywhere))
        return lax.psum(gradient, others) if others else gradient

    def vocab_axes(self) -> tuple[Axis, ...]:
        """The axes that shard the vocabulary of a gathered table `vocab embed`."""
        return self.plan.axes("vocab", self.shape[0])


class GatheredWeight(eqx.Module):
    """A matrix in the compute dtype, and a slot that receives its gradient. A `layers.nn.linear.StoredWeight`."""

    value: Float[Array, "..."]
    """What is multiplied with. It has no gradient itself."""
    slot: Float[Array, "..."] | None
    """Zeros of the matrix's shape, never read: differentiate by them, in their dtype. None where nothing is trained."""
    sharding: WeightSharding = eqx.field(static=True)

    def matmul(self, x: Float[Array, "batch seq in"]) -> Float[Array, "batch seq out"]:
        """`x` times the matrix, its in dims and out dims each taken as one."""
        return _product(self.sharding, self._slot_dtype(), x, self.value, self.slot)

    def take(self, ids: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """The rows of a table `vocab embed` at `ids`."""
        return _take(self.sharding, self._slot_dtype(), ids, self.value, self.slot)

    def _slot_dtype(self) -> jnp.dtype | None:
        return None if self.slot is None else self.slot.dtype


def cast_matrices(model: T, dtype: jnp.dtype) -> T:
    """The model with every matrix cast to `dtype`: once per step, before any is gathered."""
    return jax.tree.map(lambda dims, x: x.astype(dtype) if is_matrix(dims) else x, dims_of(model), model)


def gradient_slots(model: T, dtype: jnp.dtype) -> T:
    """What a step differentiates by: zeros of `dtype` in place of matrices, and the other arrays themselves."""
    return jax.tree.map(lambda dims, x: jnp.zeros(x.shape, dtype) if is_matrix(dims) else x, dims_of(model), model)


def gather_on_use(lowered: T, slots: T | None, plan: Plan) -> T:
    """The model to run: its matrices as `GatheredWeight`s, its other arrays gathered.

    `lowered` is the model from `cast_matrices`, `slots` from `gradient_slots`; without slots nothing has a gradient.
    """

    def weight(dims: Dims, x: Array, slot: Array | None = None) -> Any:
        if not is_matrix(dims):
            return plan.constrain(x if slot is None else slot, dims)
        stacked = len(dims) - len(unstacked(dims))
        return GatheredWeight(x, slot, WeightSharding(plan, unstacked(dims), x.shape[stacked:]))

    return jax.tree.map(weight, dims_of(lowered), lowered, *([] if slots is None else [slots]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(sharding: WeightSharding, wide: jnp.dtype | None, x: Array, value: Array, slot: Array | None) -> Array:
    return project(x, sharding.gather(value).reshape(-1, x.shape[-1]))


def _product_forward(
    sharding: WeightSharding, wide: jnp.dtype | None, x: Array, value: Array, slot: Array | None
) -> tuple:
    return _product(sharding, wide, x, value, slot), (x, value)


def _product_backward(sharding: WeightSharding, wide: jnp.dtype | None, kept: tuple[Array, Array], d_y: Array) -> tuple:
    x, value = kept
    # Two products read it: without the barrier XLA computes what it comes from in each of their layouts.
    d_y = lax.optimization_barrier(d_y)
    d_x = lax.dot_general(d_y, sharding.gather(value).reshape(-1, x.shape[-1]), (((2,), (0,)), ((), ())))
    if wide is None:
        return d_x, None, None
    d_value = _sum_of_products(d_y, x, wide, on_cpu=sharding.plan.mesh.devices.flat[0].platform == "cpu")
    return d_x, None, sharding.shard(d_value.reshape(sharding.shape))


_product.defvjp(_product_forward, _product_backward)


def _sum_of_products(
    d_y: Float[Array, "batch seq out"], x: Float[Array, "batch seq in"], dtype: jnp.dtype, *, on_cpu: bool
) -> Float[Array, "out in"]:
    """The sum over tokens of d_y x^T.

    XLA on CPU turns the left operand round first, within the loop that computes it. Turning the narrower operand by
    itself takes a tenth off a step of a small model.
    """
    tokens = (0, 1)
    if on_cpu and x.shape[2] < d_y.shape[2]:
        turned = lax.optimization_barrier(x.transpose(2, 0, 1))
        products = lax.dot_general(turned, d_y, (((1, 2), tokens), ((), ())), preferred_element_type=dtype)
        return lax.optimization_barrier(products).T
    return lax.dot_general(d_y, x, ((tokens, tokens), ((), ())), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _take(sharding: WeightSharding, wide: jnp.dtype | None, ids: Array, value: Array, slot: Array | None) -> Array:
    return lookup(sharding.gather(value), ids, sharding.plan, value.dtype)


def _take_forward(
    sharding: WeightSharding, wide: jnp.dtype | None, ids: Array, value: Array, slot: Array | None
) -> tuple:
    return _take(sharding, wide, ids, value, slot), ids


def _take_backward(sharding: WeightSharding, wide: jnp.dtype | None, ids: Array, d_rows: Array) -> tuple:
    if wide is None:
        return None, None, None
    plan, (vocab, embed), axes = sharding.plan, sharding.shape, sharding.vocab_axes()
    held_rows = vocab // plan.size(*axes)

    def scatter(ids, d_rows):
        local = ids - (lax.axis_index(axes) * held_rows if axes else 0)
        local = jnp.where((local >= 0) & (local < held_rows), local, held_rows)
        zeros = vary_over(varying_axes(local, d_rows), jnp.zeros((held_rows, embed), wide))
        # Row by row into wide numbers: a frequent token's sum in bfloat16 would soon stop growing.
        return sharding.reduce_scatter(zeros.at[local].add(d_rows.astype(wide), mode="drop"))

    tokens = plan.spec("batch seq", ids.shape)
    in_specs = (tokens, PartitionSpec(*tokens, None))
    d_table = jax.shard_map(scatter, mesh=plan.mesh, in_specs=in_specs, out_specs=sharding.sharded)(ids, d_rows)
    return None, None, d_table


_take.defvjp(_take_forward, _take_backward)
