"""The mask's definition, and the classes of pairs of blocks that follow from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.layers.attention.kernels import NO_WINDOW, BlockMask, Geometry
from treering.layers.attention.kernels.tiles import Tiles
from treering.layers.attention.mask import BlockClass, Bounds, Mask, classify, visible

MASKS = [Mask(), Mask(causal=False), Mask(window=1), Mask(window=5)]


def test_visible_by_hand():
    positions = jnp.array([0, 1, 2, -1, 0, 1])
    segments = jnp.array([1, 1, 1, 0, 2, 2])
    expected = [
        "100000",
        "110000",
        "011000",
        "000000",
        "000010",
        "000011",
    ]
    seen = visible(Mask(window=2), positions, positions, segments, segments)
    assert ["".join(str(int(x)) for x in row) for row in np.asarray(seen)] == expected


def test_a_window_holds_its_own_position():
    seen = visible(Mask(window=4), jnp.arange(8), jnp.arange(8))
    assert np.asarray(seen).sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]


def test_an_empty_slot_is_never_seen():
    for mask in MASKS:
        assert not visible(mask, jnp.arange(4), jnp.full(4, -1)).any()


@pytest.mark.parametrize(
    "bad",
    [
        dict(window=0),
        dict(window=2**31),
        dict(window=3, causal=False),
        dict(softcap=0.0),
        dict(softcap=-1.0),
        dict(softcap=float("inf")),
        dict(scale=float("nan")),
    ],
    ids=str,
)
def test_masks_that_cannot_be(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Mask(**bad)


tokens = st.tuples(
    st.lists(st.integers(-1, 12), min_size=8, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8)
)


@given(tokens, tokens, st.sampled_from(MASKS), st.booleans())
def test_classes_agree_with_the_definition(q, kv, mask, documents):
    (q_positions, q_segments), (kv_positions, kv_segments) = (
        (jnp.array(positions).reshape(2, 4), jnp.array(segments).reshape(2, 4) if documents else None)
        for positions, segments in (q, kv)
    )
    classes = classify(
        mask,
        broadcast(Bounds.of(q_positions, q_segments, slots=False), (2, 1)),
        broadcast(Bounds.of(kv_positions, kv_segments, slots=True), (1, 2)),
    )
    for i in range(2):
        for j in range(2):
            parts = (None, None) if q_segments is None or kv_segments is None else (q_segments[i], kv_segments[j])
            seen = np.asarray(visible(mask, q_positions[i], kv_positions[j], *parts))
            # Bounds may not tell that a pair is empty or full, but what they tell is true.
            if classes[i, j] == BlockClass.EMPTY:
                assert not seen.any()
            if classes[i, j] == BlockClass.FULL:
                assert seen.all()


def broadcast(bounds: Bounds, shape: tuple[int, int]) -> Bounds:
    return Bounds(**{name: getattr(bounds, name).reshape(shape) for name in bounds.__dataclass_fields__})


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 5), st.sampled_from(MASKS))
def test_runs_of_tokens_are_told_exactly(q_block, kv_block, length, mask):
    """Runs of one document: both functions say empty or full exactly where the definition does."""
    q_start, kv_start = q_block * length, kv_block * length
    q, kv = jnp.arange(length) + q_start, jnp.arange(length) + kv_start
    seen = np.asarray(visible(mask, q, kv))
    expected = BlockClass.FULL if seen.all() else BlockClass.MIXED if seen.any() else BlockClass.EMPTY
    assert classify(mask, Bounds.of(q, None, slots=False), Bounds.of(kv, None, slots=True)) == expected
    if not mask.causal:
        return
    # The same from their distance alone, as a schedule of static geometry gives it.
    distance = q_start - kv_start
    low = NO_WINDOW if mask.window is None else distance - mask.window + 1
    q_like = jax.ShapeDtypeStruct((1, 1, 1, length, 8), jnp.float32)
    kv_like = jax.ShapeDtypeStruct((1, 1, length, 8), jnp.float32)
    tiles = Tiles(q_like, kv_like, BlockMask(Geometry.BAND, jnp.array([[low, distance]])), mask)
    tile = jnp.asarray(0)
    assert tiles._classes(tile)[0] == expected and (np.asarray(tiles.seen(tile, tile))[0, 0] == seen).all()
    if distance == 0 and (mask.window or length) >= length:
        tiles = Tiles(q_like, kv_like, BlockMask(Geometry.DIAGONAL), mask)
        assert (np.asarray(tiles.seen(tile, tile))[0, 0] == seen).all()


def test_a_padded_tile_is_still_told_empty():
    """Padding and other documents in a tile do not hide that nothing in it is seen."""
    q = Bounds.of(jnp.array([0, 1, 2, 3]), jnp.array([1, 1, 0, 0]), slots=False)
    kv = Bounds.of(jnp.array([4, 5, 6, -1]), jnp.array([2, 2, 2, 0]), slots=True)
    assert classify(Mask(causal=False), q, kv) == BlockClass.EMPTY
    late = Bounds.of(jnp.array([4, 5, -1, -1]), None, slots=True)
    assert classify(Mask(), Bounds.of(jnp.arange(4), None, slots=False), late) == BlockClass.EMPTY
