"""The algebra of partial results: associative, commutative, with an identity; never NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.layers.attention.partial import Partial, merge, merge_all, merge_stacked

ROWS, HEAD_DIM = (3,), 2

lses = st.one_of(
    st.just(-np.inf), st.floats(-700, 700, width=32, allow_subnormal=False), st.sampled_from([-1e30, 1e4, -1e4])
)
parts = st.builds(
    lambda lse, out: Partial(
        jnp.where(jnp.isneginf(jnp.asarray(lse))[:, None], 0, jnp.asarray(out, jnp.float32).reshape(3, 2)),
        jnp.asarray(lse, jnp.float32),
    ),
    st.lists(lses, min_size=3, max_size=3),
    st.lists(st.floats(-8, 8, width=32, allow_subnormal=False), min_size=6, max_size=6),
)


def assert_close(x: Partial, y: Partial, tolerance: float = 2e-6):
    assert not np.isnan(x.out).any() and not np.isnan(x.lse).any()
    assert (np.isneginf(x.lse) == np.isneginf(y.lse)).all()
    scale = 8 * np.maximum(1, np.nan_to_num(np.abs(y.lse), posinf=0))
    np.testing.assert_allclose(np.nan_to_num(x.lse), np.nan_to_num(y.lse), rtol=tolerance, atol=tolerance)
    assert (np.abs(x.out - y.out) <= tolerance * scale[:, None]).all()


def equal(x: Partial, y: Partial) -> bool:
    return bool(np.array_equal(x.out, y.out) and np.array_equal(x.lse, y.lse))


@given(parts, parts)
def test_commutative_to_the_bit(a, b):
    assert equal(merge(a, b), merge(b, a))


@given(parts, parts, parts)
def test_associative(a, b, c):
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), a, b, c)
    assert_close(merge_stacked(stacked), merge_all([a, b, c]))


@given(parts)
def test_identity(a):
    empty = Partial.empty(ROWS, HEAD_DIM)
    assert equal(merge(a, empty), a) and equal(merge(empty, a), a)
    assert equal(merge(empty, empty), empty)


@given(st.permutations(range(8)), st.integers(0, 3))
def test_any_order_of_many_shards(order, seed):
    rng = np.random.default_rng(seed)
    lse = np.where(rng.random((8, 3)) < 0.3, -np.inf, rng.normal(size=(8, 3)) * 100).astype(np.float32)
    out = np.where(np.isneginf(lse)[..., None], 0, rng.normal(size=(8, 3, 2))).astype(np.float32)
    shards = [Partial(jnp.asarray(o), jnp.asarray(x)) for o, x in zip(out, lse, strict=True)]
    assert_close(merge_all([shards[i] for i in order]), merge_all(shards))


def test_equals_the_definition(x64):
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(3, 8)) * 300, rng.normal(size=(3, 8, 2))

    def attend(scores, values):
        lse = jax.nn.logsumexp(scores, axis=-1)
        return Partial(jnp.einsum("rk,rkd->rd", jnp.exp(scores - lse[:, None]), values), lse)

    parts = [attend(scores[:, i : i + 2], values[:, i : i + 2]) for i in range(0, 8, 2)]
    whole = attend(scores, values)
    for merged in (merge_all(parts), merge_stacked(jax.tree.map(lambda *x: jnp.stack(x), *parts))):
        np.testing.assert_allclose(merged.out, whole.out, atol=1e-14)
        np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-14)


@pytest.mark.parametrize("empty", [(False, False), (True, False), (True, True)], ids=str)
def test_gradients_are_those_of_the_definition_and_never_nan(x64, empty):
    rng = np.random.default_rng(1)
    lse = jnp.where(jnp.array(empty)[:, None], -jnp.inf, jnp.asarray(rng.normal(size=(2, 3)) * 50))
    out = jnp.where(jnp.isneginf(lse)[..., None], 0, rng.normal(size=(2, 3, 2)))
    weights = jnp.asarray(rng.normal(size=(3, 2)))

    def loss(merged: Partial):
        return jnp.sum(merged.out * weights) + jnp.sum(jnp.where(merged.lse > -jnp.inf, merged.lse, 0))

    def by_merge(out, lse):
        return loss(merge(Partial(out[0], lse[0]), Partial(out[1], lse[1])))

    def by_definition(out, lse):
        share = jax.nn.softmax(lse, axis=0)
        return jnp.sum(jnp.sum(share[..., None] * out, 0) * weights) + jnp.sum(jax.nn.logsumexp(lse, axis=0))

    got = jax.grad(by_merge, (0, 1))(out, lse)
    assert all(np.isfinite(x).all() for x in got)
    if not all(empty):
        for x, y in zip(got, jax.grad(by_definition, (0, 1))(out, lse), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-13)


def test_merged_out_is_wide():
    half = Partial(jnp.ones((1, 2), jnp.bfloat16), jnp.zeros(1))
    assert merge(half, half).out.dtype == jnp.float32
    assert Partial.empty((1,), 2, jnp.dtype("bfloat16")).lse.dtype == jnp.float32
