"""Attention on one device: values and gradients, empty rows, large scores, windows, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hlo
from attention_cases import Case, check, covering_array, error
from treering.layers.attention.dense import dense_attention, dense_partial
from treering.layers.attention.kernels import tiles
from treering.layers.attention.local import local_attention
from treering.layers.attention.mask import Mask
from treering.layers.attention.partial import Partial

CASES = [case for case in covering_array() if case.algorithm == "local"]
LONG = [case for case in covering_array(seed=30, start=()) if case.algorithm == "local"]


def limit_tiles(monkeypatch, size: int) -> None:
    monkeypatch.setattr(tiles, "Q_TILE", size)
    monkeypatch.setattr(tiles, "KV_TILE", size)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_dense_attention(case, mesh, x64, monkeypatch):
    limit_tiles(monkeypatch, case.tile)
    check(case, mesh)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG, ids=str)
def test_equals_dense_attention_in_other_combinations(case, mesh, x64, monkeypatch):
    limit_tiles(monkeypatch, case.tile)
    check(case, mesh)


@pytest.mark.smoke
def test_equals_dense_attention_small(mesh, x64, monkeypatch):
    limit_tiles(monkeypatch, 8)
    check(Case("local", length=31, batch=2, mask="data"), mesh)


def test_errors_grow_no_faster_than_scores(mesh, x64, monkeypatch):
    """Scores to about 5, 60, 300 and 1500."""
    limit_tiles(monkeypatch, 16)
    check(Case("local", length=97, head_dim=64, mask="data", dtype="float32"), mesh, scales=(1, 12.0, 60.0, 300.0))


def arrays(batch=1, seq=32, kv_seq=None, heads=4, kv_heads=2, head_dim=8, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    kv_seq = kv_seq or seq
    return (
        jnp.asarray(rng.normal(size=(batch, length, n, head_dim)), dtype)
        for length, n in ((seq, heads), (kv_seq, kv_heads), (kv_seq, kv_heads))
    )


def test_dense_attention_is_the_definition(x64):
    """One row by hand: the oracle itself."""
    q, k, v = arrays(batch=2, dtype=jnp.float64)
    out = dense_attention(q, k, v, mask=Mask(scale=0.7))
    for row, token, head in ((0, 0, 0), (1, 9, 1), (1, 31, 3)):
        scores = 0.7 * np.asarray(k)[row, : token + 1, head // 2] @ np.asarray(q)[row, token, head]
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(
            out[row, token, head], weights @ np.asarray(v)[row, : token + 1, head // 2], rtol=1e-13
        )


@given(
    st.lists(st.integers(-1, 40), min_size=33, max_size=33),
    st.lists(st.integers(0, 2), min_size=33, max_size=33),
)
@settings(max_examples=40)
def test_any_positions_and_segments(positions, segments):
    """One compiled shape, in tiles of 8; what positions and segments do is data."""
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        limit_tiles(patch, 8)
        q, k, v = arrays(seq=33, dtype=jnp.float64)
        data = (jnp.array([positions]), jnp.array([segments]))
        for x, y in zip(
            jax.tree.leaves(_compiled(q, k, v, *data)), jax.tree.leaves(_oracle(q, k, v, *data)), strict=True
        ):
            assert error(x, y) < 1e-13 or np.abs(np.asarray(x) - np.asarray(y)).max() < 1e-14


def _with_gradients(attend):
    def run(q, k, v, positions, segments):
        def both(q, k, v):
            sides = {
                "q_positions": positions,
                "kv_positions": positions,
                "q_segments": segments,
                "kv_segments": segments,
            }
            return attend(q, k, v, mask=Mask(window=9), **sides)

        partial, pull = jax.vjp(both, q, k, v)
        return partial, pull(Partial(jnp.cos(q), jnp.sin(q[..., 0])))

    return jax.jit(run)


_compiled, _oracle = _with_gradients(local_attention), _with_gradients(dense_partial)


def test_a_row_without_keys_changes_nothing_else(x64, monkeypatch):
    """(0, -inf), and the other rows' gradients are those of a batch without it."""
    limit_tiles(monkeypatch, 8)
    q, k, v = arrays(batch=3, dtype=jnp.float64)
    segments = jnp.ones((3, 32), int).at[1].set(0).at[2, 20:].set(0)

    def loss(q, k, v, segments, rows):
        partial = local_attention(q, k, v, q_segments=segments, kv_segments=segments)
        return jnp.sum(jnp.sin(partial.out[rows])) + jnp.sum(jnp.cos(partial.lse[rows][:, :20])), partial

    run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    rows = jnp.array([0, 2])
    grads, partial = run(q, k, v, segments, rows)
    assert (partial.out[1] == 0).all() and jnp.isneginf(partial.lse[1]).all() and (partial.out[2, 20:] == 0).all()
    alone, _ = run(q[rows], k[rows], v[rows], segments[rows], jnp.arange(2))
    for x, y in zip(grads, alone, strict=True):
        assert (x[1] == 0).all()
        np.testing.assert_array_equal(x[rows], y)


def test_nothing_leaks_between_documents(monkeypatch):
    """Values and gradients of document 2 are the same bits, whatever is in document 1."""
    limit_tiles(monkeypatch, 8)
    q, k, v = arrays()
    segments = jnp.where(jnp.arange(32) < 13, 1, 2)[None]

    def second(q, k, v):
        out = local_attention(q, k, v, q_segments=segments, kv_segments=segments).out
        return jnp.sum(jnp.sin(out[:, 13:])), out[:, 13:]

    def changed(x):
        return x.at[:, :13].set(100 * x[:, :13] + 7)

    run = jax.jit(jax.grad(second, (0, 1, 2), has_aux=True))
    grads, out = run(q, k, v)
    other_grads, other = run(changed(q), changed(k), changed(v))
    np.testing.assert_array_equal(out, other)
    for x, y in zip(grads, other_grads, strict=True):
        np.testing.assert_array_equal(x[:, 13:], y[:, 13:])
        assert (x[:, :13] == 0).all()


def test_a_window_is_exact(monkeypatch):
    """Window 4 at token 20: key 17 matters, key 16 does not."""
    limit_tiles(monkeypatch, 8)
    q, k, v = arrays()
    attend = jax.jit(lambda q, k, v: local_attention(q, k, v, mask=Mask(window=4)).out)
    out = attend(q, k, v)
    for key, matters in ((16, False), (17, True), (20, True), (21, False)):
        moved = attend(q, k.at[:, key].add(1.0), v.at[:, key].add(1.0))
        assert bool((moved[:, 20] != out[:, 20]).any()) == matters


def test_bfloat16_sums_do_not_saturate():
    """4096 equal scores and values of 1: the output is 1 and lse is ln 4096, in float32."""
    q, k, v = (jnp.zeros((1, n, 1, 8), jnp.bfloat16) for n in (1, 4096, 4096))
    partial = local_attention(q, k, v + 1, mask=Mask(causal=False))
    assert (partial.out == 1).all() and partial.lse.dtype == jnp.float32
    np.testing.assert_allclose(partial.lse, np.log(4096), rtol=1e-6)


def test_scores_of_ten_thousand():
    """The peak takes all the weight: no overflow, no NaN, in values or gradients."""
    q, k, v = arrays()
    q = q * 1e4

    def loss(q, k, v):
        partial = local_attention(q, k, v)
        return jnp.sum(partial.out) + jnp.sum(partial.lse), partial.lse

    (value, lse), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in grads)
    assert error(lse, dense_partial(q, k, v).lse) < 2e-6


def test_under_vmap(x64, monkeypatch):
    """Each example with its own documents, which decide what its loops visit."""
    limit_tiles(monkeypatch, 8)
    q, k, v = (jnp.stack([x, x[::-1]]) for x in arrays(batch=2, seq=24, dtype=jnp.float64))
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (2, 2, 24))))

    def loss(attend):
        def total(q, k, v, segments):
            return jnp.sum(jnp.sin(attend(q, k, v, q_segments=segments, kv_segments=segments).out))

        return jax.jit(jax.vmap(jax.value_and_grad(total, (0, 1, 2))))

    for x, y in zip(
        jax.tree.leaves(loss(local_attention)(q, k, v, segments)),
        jax.tree.leaves(loss(dense_partial)(q, k, v, segments)),
        strict=True,
    ):
        assert error(x, y) < 1e-13


def test_memory_is_that_of_blocks():
    """Four times the tokens take four times the memory, not sixteen."""

    def temporary(seq):
        shapes = [jax.ShapeDtypeStruct((1, seq, n, 64), jnp.float32) for n in (4, 2, 2)]
        run = jax.jit(jax.grad(lambda q, k, v: jnp.sum(local_attention(q, k, v).out), (0, 1, 2)))
        size = hlo.read(run.lower(*shapes).compile()).temporary_bytes
        assert size is not None
        return size

    assert temporary(8192) < 4.2 * temporary(2048)


def test_lse_alone_has_a_gradient(x64):
    q, k, v = arrays(dtype=jnp.float64)
    got = jax.jit(jax.grad(lambda q: jnp.sum(jnp.sin(local_attention(q, k, v).lse))))(q)
    want = jax.jit(jax.grad(lambda q: jnp.sum(jnp.sin(dense_partial(q, k, v).lse))))(q)
    assert error(got, want) < 1e-13


def test_numbers_of_numpy(x64, unchecked):
    """In a mask, where a strong float64 would widen float32 scores, and as positions."""
    q, k, v = (x.astype(jnp.float32) for x in arrays(batch=1))
    mask = Mask(scale=np.float64(0.3), softcap=np.float64(2), window=np.int64(9))
    positions = np.arange(q.shape[1])[None]
    partial = local_attention(q, k, v, mask=mask, q_positions=positions, kv_positions=positions)
    want = dense_partial(q, k, v, mask=Mask(scale=0.3, softcap=2.0, window=9))
    assert partial.lse.dtype == want.lse.dtype == jnp.float32
    assert error(partial.out, want.out) < 2e-6


@pytest.mark.parametrize("attend", [local_attention, dense_partial], ids=["local", "dense"])
def test_what_holds_no_attention_is_refused(attend, unchecked):
    q, k, v = arrays(batch=2)
    with pytest.raises(ValueError, match="q has dtype int32: it must be floating"):
        attend(q.astype(int), k, v)
    with pytest.raises(ValueError, match=r"k has shape .* 0, .*every dim must be at least 1"):
        attend(q, k[:, :, :0], v[:, :, :0])
    for dtype in (jnp.float32, jnp.uint32, jnp.int8):
        with pytest.raises(ValueError, match=rf"q_positions has dtype {dtype.__name__}: it must be int32"):
            attend(q, k, v, q_positions=jnp.zeros(q.shape[:2], dtype))
    with pytest.raises(ValueError, match=r"kv_positions has shape \(32,\)"):
        attend(q, k, v, kv_positions=jnp.arange(32))
    with pytest.raises(ValueError, match="q_segments and kv_segments: give both or neither"):
        attend(q, k, v, q_segments=jnp.ones(q.shape[:2], jnp.int32))


def test_errors_name_dims_and_sizes():
    q, k, v = arrays(batch=2, heads=6, kv_heads=4)
    with pytest.raises(ValueError, match=r"kv_heads 4 does not divide heads 6.*1, 2, 3, 6"):
        local_attention(q, k, v)
    q, k, v = arrays(batch=2)
    with pytest.raises(ValueError, match=r"q_positions has shape \(32,\).*\[batch seq\], here \(2, 32\)"):
        local_attention(q, k, v, q_positions=jnp.arange(32))
    with pytest.raises(ValueError, match=r"kv_segments has shape \(2, 31\).*\[batch kv_seq\], here \(2, 32\)"):
        local_attention(q, k, v, q_segments=jnp.ones((2, 32), int), kv_segments=jnp.ones((2, 31), int))
    with pytest.raises(ValueError, match="q_segments and kv_segments: give both or neither"):
        local_attention(q, k, v, q_segments=jnp.ones((2, 32), int))
