"""What a kernel is told about the pairs of queries and keys that it computes."""

import enum

import equinox as eqx
from jaxtyping import Array, Int

NO_WINDOW = -(2**30)
"""The low end of a band without a window: before every key."""


class Geometry(enum.Enum):
    """Which pairs the order of tokens lets see each other, of a block of queries and a block of keys.

    All but POSITIONS are known when a program is built. Documents and padding are not geometry: segments take pairs
    away from any of them.
    """

    FULL = "full"
    """Every query sees every key."""
    DIAGONAL = "diagonal"
    """The same tokens on both sides, under plain causality: query i sees keys 0 ... i."""
    BAND = "band"
    """Query i sees the keys from i + low to i + high: causality and windows between runs of tokens at a distance.

    The two numbers are data, since they differ from device to device and step to step.
    """
    POSITIONS = "positions"
    """Only the mask and each token's position say."""
    PAGED = "paged"
    """Queries against the pages of a KV cache (`layers.attention.kernels.paged_xla`)."""


class BlockMask(eqx.Module):
    """The geometry of all pairs together, and the data that it and the documents need.

    Data have a batch of 1 where all rows share them. Segments: a query sees keys of its own segment only, and segment 0
    is padding, which neither sees nor is seen.
    """

    geometry: Geometry = eqx.field(static=True)
    band: Int[Array, "#batch 2"] | None = None
    """Of BAND: (low, high) of each row."""
    q_positions: Int[Array, "#batch seq"] | None = None
    kv_positions: Int[Array, "#batch kv_seq"] | None = None
    q_segments: Int[Array, "#batch seq"] | None = None
    kv_segments: Int[Array, "#batch kv_seq"] | None = None

    def __check_init__(self):
        assert self.geometry is not Geometry.PAGED, "pages are no block"
        assert (self.geometry is Geometry.BAND) == (self.band is not None)
        assert (
            (self.geometry is Geometry.POSITIONS) == (self.q_positions is not None) == (self.kv_positions is not None)
        )
        assert (self.q_segments is None) == (self.kv_segments is None)
