"""Which dtype each part of a computation uses."""

from dataclasses import dataclass
from typing import Literal

DType = Literal["float16", "bfloat16", "float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One object decides all dtypes.

    Statistics (softmax, norms, rotary angles, losses, merges of partial results) are never below float32, whatever
    is chosen here.
    """

    params: DType = "float32"
    """Stored parameters."""
    compute: DType = "float32"
    """Activations, and parameters as they enter a product."""
    cache: DType = "float32"
    """Keys and values of the decode state."""
    reduce: DType = "float32"
    """Gradients while they are summed over devices and accumulation steps."""
    matmul: Literal["default", "high", "highest"] = "highest"
    """How float32 products are computed where a chip has faster, coarser modes; without effect on bfloat16."""
