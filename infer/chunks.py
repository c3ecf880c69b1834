"""How many tokens of a prompt one call takes, and which of these chunks are spread over the context axis."""

import math
from dataclasses import dataclass

import jax

from treering.layers.parallel.sharding import Plan
from treering.models.transformer import Transformer

PREFILL_CHUNKS = (16, 64, 128, 256)
"""Tokens of a short chunk. Few, since each is a program to compile; a prompt's last chunk is padded."""
BESIDE_OTHERS = 128
"""Tokens of a short chunk at most while other requests wait for their next token."""


@dataclass(frozen=True)
class Chunks:
    """The sizes of chunks that prompts are taken in."""

    long: int | None = None
    """Tokens of a chunk that is spread over context; None where no prompt is worth one."""
    least: int = 0
    """Tokens that are worth a long chunk, padded."""

    def next(self, tokens: int, *, beside_others: bool = False) -> int:
        """The next chunk of a prompt that has `tokens` left: a long one, or the smallest short one that holds them, or
        the largest. `beside_others` says whether other requests wait for tokens."""
        if self.long is not None and tokens >= self.least:
            return self.long
        sizes = [size for size in PREFILL_CHUNKS if size <= BESIDE_OTHERS or not beside_others]
        return next((size for size in sizes if size >= tokens), sizes[-1])

    def of(self, tokens: int) -> list[int]:
        """All chunks of a prompt of `tokens`."""
        sizes: list[int] = []
        while tokens > 0:
            sizes.append(self.next(tokens))
            tokens -= sizes[-1]
        return sizes


def choose_chunks(model: Transformer, plan: Plan, capacity: int) -> Chunks:
    """The chunks for a model at rest in the layout of `plan`, and rows of `capacity` tokens.

    A short chunk is on every device of the context axis: each reads its share of a layer's weights, and the layer's two
    results are summed over devices, 4 tokens x embed numbers. A long chunk is spread over them, and they gather the
    weights instead. On p devices both ways a device receives (p - 1) / p of these numbers, so that a chunk pays from a
    quarter of the weights / embed tokens on. Its length is p times a power of two.
    """
    devices = plan.size("context")
    weights = 0
    for leaf, sharding in zip(
        jax.tree.leaves(model.blocks), jax.tree.leaves(plan.shardings(model.blocks, "parameters")), strict=True
    ):
        if any("context" in (axes or ()) for axes in sharding.spec):
            weights += devices * math.prod(sharding.shard_shape(leaf.shape))
    config = model.config
    least = max(-(-weights // (4 * config.layers * config.embed)), PREFILL_CHUNKS[-1])
    if devices == 1 or not weights or capacity < least:
        return Chunks()
    local_seq = 1 << (-(-least // devices) - 1).bit_length()
    return Chunks(local_seq * devices, least)
