"""What a kernel knows of the pairs of queries and keys that it computes."""

import equinox as eqx
from jaxtyping import Array, Int

from treering.layers.attention.mask import BlockClass


class BlockMask(eqx.Module):
    """The class of all pairs together and, where that is MIXED, the data that tells them apart.

    Positions and segments have a batch of 1 where all rows share them.
    """

    kind: BlockClass = eqx.field(static=True)
    q_positions: Int[Array, "#batch seq"] | None = None
    kv_positions: Int[Array, "#batch kv_seq"] | None = None
    q_segments: Int[Array, "#batch seq"] | None = None
    kv_segments: Int[Array, "#batch kv_seq"] | None = None

    def __check_init__(self):
        assert self.kind is not BlockClass.EMPTY, "empty pairs are not computed"
        assert (self.kind is BlockClass.MIXED) == (self.q_positions is not None) == (self.kv_positions is not None)
        assert (self.q_segments is None) == (self.kv_segments is None)
