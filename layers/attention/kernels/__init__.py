"""Kernels of local attention, and the one place where a device's kernel is chosen.

A kernel has two functions on folded arrays, q `[batch kv_heads group seq head_dim]` (query heads grouped by the key
head that serves them), k, v `[batch kv_heads kv_seq head_dim]`:

- `forward(q, k, v, pairs, mask) -> (out, lse)`: out is normalised, lse the natural log of the sum of exponentiated
  scores, both in `statistics_dtype(q.dtype)`; a row without keys is (0, -inf).
- `backward(q, k, v, pairs, mask, lse, delta, d_out) -> (dq, dk, dv)` in the statistics' dtype, where lse is of all the
  keys a query has, here or elsewhere, and delta is rowsum(d_out * out) - d_lse, also over all.

A new kernel is a module here with these two functions, chosen in `kernel_for`. It may compute FULL and DIAGONAL pairs
only: zigzag's branch-free ring needs no others. XLA's computes MIXED ones too.
"""

from types import ModuleType

from treering.layers.attention.kernels import xla
from treering.layers.attention.kernels.block_mask import BlockMask as BlockMask
from treering.layers.attention.mask import Mask


def kernel_for(pairs: BlockMask, mask: Mask) -> ModuleType:
    """The kernel that computes `pairs` under `mask`. XLA's is the only one so far, on every platform."""
    return xla
