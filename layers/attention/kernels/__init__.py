"""Kernels of attention on one device, and the one place where a device's kernel is chosen.

To add a kernel: write a module beside `xla` or `paged_xla` that ends with a `Kernel`, and put that into `KERNELS`
before those that take anything. `kernel_for` gives the first that takes a problem, in training, prefill and decoding.

A kernel of blocks has two functions on folded arrays, q `[batch kv_heads group seq head_dim]` (query heads grouped by
the key head that serves them), k, v `[batch kv_heads kv_seq head_dim]`, both of the same dtype:

- `forward(q, k, v, block, mask) -> (out, lse)`: out is normalised, lse the natural log of the sum of exponentiated
  scores, both in `statistics_dtype(q.dtype)`; a row without keys is (0, -inf).
- `backward(q, k, v, block, mask, lse, delta, d_out) -> (dq, dk, dv)` in the statistics' dtype, where lse is of all the
  keys a query has, here or elsewhere, and delta is rowsum(d_out * out) - d_lse, also over all.

`block` is a `BlockMask`: its geometry says which pairs may see each other, and where it has segments only pairs of one
segment do. `mask` gives scale and softcap; its causality and window matter for the geometry POSITIONS alone, since the
others say it already. The kernel skips tiles, by geometry and by the least and greatest segment of a tile; callers
skip nothing, and may hand over blocks in which no pair sees each other.

A kernel of pages has `forward` alone, with the arguments of `paged_xla.attend_pages`; nothing is differentiated there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array

from treering.layers.attention.kernels import paged_xla, xla
from treering.layers.attention.kernels.block_mask import NO_WINDOW as NO_WINDOW
from treering.layers.attention.kernels.block_mask import BlockMask as BlockMask
from treering.layers.attention.kernels.block_mask import Geometry as Geometry


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a kernel is chosen by."""

    platform: str
    """As JAX calls it: "cpu", "gpu", "tpu"."""
    dtype: jax.numpy.dtype
    """Of queries, keys and values."""
    head_dim: int
    group: int
    """Query heads that share a key head."""
    geometry: Geometry
    segments: bool
    """Whether there are segments."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel and what it takes."""

    name: str
    takes: Callable[[Problem], bool]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    branch_free: bool = False
    """Whether a ring should give it blocks of static geometry (two full halves a step in zigzag order), where the order
    of tokens allows. Else it gets each step whole, by positions: what XLA on CPU is faster with."""


XLA = Kernel(
    name="xla",
    takes=lambda problem: problem.geometry is not Geometry.PAGED,
    forward=xla.forward,
    backward=xla.backward,
)
PAGED_XLA = Kernel(
    name="paged_xla", takes=lambda problem: problem.geometry is Geometry.PAGED, forward=paged_xla.attend_pages
)
KERNELS: tuple[Kernel, ...] = (XLA, PAGED_XLA)
"""The first that takes a problem computes it. XLA's take all."""


def kernel_for(problem: Problem) -> Kernel:
    """The kernel that computes a problem."""
    return next(kernel for kernel in KERNELS if kernel.takes(problem))


def kernel_of_blocks(q: Array, block: BlockMask) -> Kernel:
    """`kernel_for` folded queries `[batch kv_heads group seq head_dim]`, on the default platform."""
    return kernel_for(problem_of(q, block.geometry, segments=block.q_segments is not None))


def wants_branch_free(q: Array, segments: bool) -> bool:
    """Whether the kernel for folded queries wants the branch-free schedule of a ring."""
    return kernel_for(problem_of(q, Geometry.FULL, segments=segments)).branch_free


def problem_of(q: Array, geometry: Geometry, *, segments: bool) -> Problem:
    """The problem that folded queries are part of."""
    return Problem(
        platform=jax.default_backend(),
        dtype=q.dtype,
        head_dim=q.shape[-1],
        group=q.shape[2],
        geometry=geometry,
        segments=segments,
    )
