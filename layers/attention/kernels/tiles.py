"""Cuts of queries and keys into tiles, and which tiles meet."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from treering.layers.attention.kernels.block_mask import BlockMask, Geometry
from treering.layers.attention.mask import BlockClass, Bounds, Mask, classify, same_segment, visible, worse

Q_TILE, KV_TILE = 256, 256
"""The most tokens of a tile."""


class Visits(NamedTuple):
    """The key tiles that one query tile meets: visits 0 ... full need no mask, full ... all do."""

    index: Callable[[Int[Array, ""]], Int[Array, ""]]
    """The key tile of a visit."""
    full: int | Int[Array, ""]
    all: int | Int[Array, ""]


class Tiles:
    """Cuts queries and keys into tiles, and knows which tiles meet. Both sides are padded to whole tiles.

    Folded queries are `[q_tiles rows group*q_tile ...]`, folded keys `[rows kv_tiles*kv_tile head_dim]`, where rows are
    those of batch and kv_heads together.
    """

    def __init__(self, q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, block: BlockMask, mask: Mask):
        self.batch, self.kv_heads, self.group, self.seq = q.shape[:4]
        self.kv_seq = k.shape[2]
        self.block, self.mask = block, mask
        self.q_tile, self.q_tiles = _even_tiles(self.seq, Q_TILE)
        self.kv_tile_size, self.kv_tiles = _even_tiles(self.kv_seq, KV_TILE)
        if block.geometry is Geometry.DIAGONAL:
            assert self.seq == self.kv_seq, "a diagonal block has as many keys as queries"
            self.kv_tile_size, self.kv_tiles = self.q_tile, self.q_tiles
        self.q_segments = self.kv_segments = None
        if block.q_segments is not None:
            # A padded query copies the last one, so that it widens no bounds; a padded key is an empty slot.
            self.q_segments = self._cut_q(block.q_segments)
            self.kv_segments = self._cut_kv(block.kv_segments, fill=0)
        if block.geometry is Geometry.POSITIONS:
            self.q_positions = self._cut_q(block.q_positions)
            self.kv_positions = self._cut_kv(block.kv_positions, fill=-1)
            self.q_bounds = Bounds.of(self.q_positions, self.q_segments, slots=False)
            self.kv_bounds = Bounds.of(self.kv_positions, self.kv_segments, slots=True)
        elif self.q_segments is not None and self.kv_segments is not None:
            self.q_bounds = Bounds.of_segments(self.q_segments)
            self.kv_bounds = Bounds.of_segments(self.kv_segments)

    def _cut_q(self, x: Int[Array, "1 seq"] | None) -> Int[Array, "q_tiles q_tile"]:
        assert x is not None
        return _pad_to(x[0], self.q_tiles * self.q_tile, mode="edge").reshape(self.q_tiles, self.q_tile)

    def _cut_kv(self, x: Int[Array, "1 kv_seq"] | None, *, fill: int) -> Int[Array, "kv_tiles kv_tile"]:
        assert x is not None
        x = _pad_to(x[0], self.kv_tiles * self.kv_tile_size, constant_values=fill)
        return x.reshape(self.kv_tiles, self.kv_tile_size)

    def visits(self, i: Int[Array, ""]) -> Visits:
        """What query tile `i` meets."""
        geometry, segments = self.block.geometry, self.q_segments is not None
        if geometry is Geometry.FULL and not segments:
            whole = self.kv_tiles * self.kv_tile_size == self.kv_seq
            return Visits(lambda n: n, self.kv_tiles if whole else self.kv_tiles - 1, self.kv_tiles)
        if geometry is Geometry.DIAGONAL and not segments:
            return Visits(lambda n: n, i, i + 1)
        if geometry is Geometry.POSITIONS:
            classes = classify(self.mask, jax.tree.map(lambda x: x[i], self.q_bounds), self.kv_bounds)
        else:
            classes = self._classes(i)
            if segments:
                own = jax.tree.map(lambda x: x[i], self.q_bounds)
                classes = worse(classes, classify(Mask(causal=False), own, self.kv_bounds))
        rank = jnp.where(classes == BlockClass.FULL, 0, jnp.where(classes == BlockClass.MIXED, 1, 2))
        order = jnp.argsort(rank, stable=True)
        full = jnp.sum(rank == 0, dtype=jnp.int32)
        return Visits(lambda n: order[n], full, full + jnp.sum(rank == 1, dtype=jnp.int32))

    def _classes(self, i: Int[Array, ""]) -> Int[Array, "kv_tiles"]:
        """How query tile `i` meets each key tile, by geometry alone. Tiles that hold padding need their mask."""
        tile = jnp.arange(self.kv_tiles, dtype=jnp.int32)
        empty, mixed, full = int(BlockClass.EMPTY), int(BlockClass.MIXED), int(BlockClass.FULL)
        if self.block.geometry is Geometry.DIAGONAL:
            return jnp.where(tile < i, full, jnp.where(tile == i, mixed, empty))
        padded = (tile + 1) * self.kv_tile_size > self.kv_seq
        if self.block.geometry is Geometry.FULL:
            return jnp.where(padded, mixed, full)
        low, high = self._band()
        nearest = tile * self.kv_tile_size - ((i + 1) * self.q_tile - 1)
        farthest = (tile + 1) * self.kv_tile_size - 1 - i * self.q_tile
        inside = (nearest >= low) & (farthest <= high) & ~padded
        return jnp.where((nearest > high) | (farthest < low), empty, jnp.where(inside, full, mixed))

    def _band(self) -> tuple[Int[Array, ""], Int[Array, ""]]:
        assert self.block.band is not None
        return self.block.band[0, 0], self.block.band[0, 1]

    def seen(self, i: Int[Array, ""], j: Int[Array, ""]) -> Bool[Array, "1 1 q_tile kv_tile"]:
        """Which pairs of a masked visit count."""
        q_segments = None if self.q_segments is None else self.q_segments[i]
        kv_segments = None if self.kv_segments is None else self.kv_segments[j]
        if self.block.geometry is Geometry.POSITIONS:
            return visible(self.mask, self.q_positions[i], self.kv_positions[j], q_segments, kv_segments)[None, None]
        keys = j * self.kv_tile_size + jnp.arange(self.kv_tile_size)[None, :]
        queries = i * self.q_tile + jnp.arange(self.q_tile)[:, None]
        seen = jnp.broadcast_to(keys < self.kv_seq, (self.q_tile, self.kv_tile_size))
        if self.block.geometry is Geometry.DIAGONAL:
            seen &= keys <= queries
        if self.block.geometry is Geometry.BAND:
            low, high = self._band()
            seen &= (keys - queries >= low) & (keys - queries <= high)
        if q_segments is not None and kv_segments is not None:
            seen &= same_segment(q_segments, kv_segments)
        return seen[None, None]

    def seen_turned(self, i: Int[Array, ""], j: Int[Array, ""]) -> Bool[Array, "1 kv_tile 1 q_tile"]:
        return jnp.moveaxis(self.seen(i, j), 3, 1)

    def unfold_rows(self, scores: Shaped[Array, "rows group_q kv_tile"]) -> Shaped[Array, "rows group q_tile kv_tile"]:
        return scores.reshape(-1, self.group, self.q_tile, scores.shape[-1])

    def unfold_columns(
        self, scores: Shaped[Array, "rows kv_tile group_q"]
    ) -> Shaped[Array, "rows kv_tile group q_tile"]:
        return scores.reshape(*scores.shape[:2], self.group, self.q_tile)

    def fold_q(self, x: Shaped[Array, "batch kv_heads group seq *d"], *, fill: float = 0) -> Array:
        x = _pad_to(x, self.q_tiles * self.q_tile, dim=3, constant_values=fill)
        x = x.reshape(self.batch * self.kv_heads, self.group, self.q_tiles, self.q_tile, *x.shape[4:])
        x = jnp.moveaxis(x, 2, 0)
        return x.reshape(*x.shape[:2], self.group * self.q_tile, *x.shape[4:])

    def unfold_q(self, x: Array) -> Shaped[Array, "batch kv_heads group seq *d"]:
        x = x.reshape(self.q_tiles, -1, self.group, self.q_tile, *x.shape[3:])
        x = jnp.moveaxis(x, 0, 2)
        x = x.reshape(self.batch, self.kv_heads, self.group, -1, *x.shape[4:])
        return x[:, :, :, : self.seq]

    def fold_kv(self, x: Float[Array, "batch kv_heads kv_seq head_dim"]) -> Array:
        x = x.reshape(-1, *x.shape[2:])
        return _pad_to(x, self.kv_tiles * self.kv_tile_size, dim=1)

    def unfold_kv(self, x: Array) -> Float[Array, "batch kv_heads kv_seq head_dim"]:
        return x[:, : self.kv_seq].reshape(self.batch, self.kv_heads, self.kv_seq, -1)

    def kv_tile(self, x: Array, j: Int[Array, ""], *, dim: int = 1) -> Array:
        return lax.dynamic_slice_in_dim(x, j * self.kv_tile_size, self.kv_tile_size, dim)

    def add_to_kv_tile(self, x: Array, j: Int[Array, ""], more: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, self.kv_tile(x, j) + more, j * self.kv_tile_size, 1)


def _even_tiles(length: int, limit: int) -> tuple[int, int]:
    """Size and number of the fewest tiles of at most `limit` tokens, as even as they come."""
    tiles = -(-length // limit)
    return -(-length // tiles), tiles


def _pad_to(x: Array, length: int, *, dim: int = 0, **how) -> Array:
    if x.shape[dim] == length:
        return x
    return jnp.pad(x, [(0, length - x.shape[dim]) if d == dim else (0, 0) for d in range(x.ndim)], **how)
