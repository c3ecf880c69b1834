"""Attention is the gradient of a scalar energy (arXiv 2408.04093, section 3)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treering.layers.attention.dense import dense_partial
from treering.layers.attention.energy import attention_energy
from treering.layers.attention.mask import Mask

pytestmark = pytest.mark.usefixtures("x64")


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def close(got, want, tolerance=1e-13):
    assert got.shape == want.shape
    assert float(jnp.abs(got - want).max()) <= tolerance * float(jnp.abs(want).max())


attention = jax.jit(jax.grad(attention_energy, argnums=3), static_argnames="causal")


def test_one_query():
    """Equations 5 and 6; equation 23 is the same sum written out."""
    q, k, v = draw((1, 8), (50, 8), (50, 8))
    weights = jnp.exp(k @ q[0])
    close(attention(q, k, v, jnp.zeros_like(q))[0], weights @ v / weights.sum())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 5])
def test_every_query_and_head(causal, heads):
    """Equations 25 to 28: heads and queries only add up."""
    q, k, v = draw(*[(heads, 33, 16)] * 3)
    got = attention(q, k, v, jnp.zeros_like(q), causal=causal)
    dense = jax.jit(lambda *args: dense_partial(*args, mask=Mask(causal=causal, scale=1.0)).out)
    want = dense(*(x.swapaxes(0, 1)[None] for x in (q, k, v)))
    close(got, want[0].swapaxes(0, 1))


def test_sums_of_bfloat16_are_float32():
    q, k, v = (jax.random.normal(key, (300, 8), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))
    energy = attention_energy(q, k, v, jnp.zeros_like(q))
    want = attention_energy(*(x.astype(jnp.float32) for x in (q, k, v, jnp.zeros_like(q))))
    assert energy.dtype == jnp.float32 and abs(energy - want) < 1e-5 * abs(want)


def test_shapes_that_do_not_fit(unchecked):
    x = jnp.ones((2, 5, 4))
    for bad in ((x, x[:1], x[:1], x), (x, x, x[:, :1], x), (x, x, x, x[:, :1]), (x, x[..., :2], x[..., :2], x)):
        with pytest.raises(ValueError, match=r"q and source must be \[\*rows seq head_dim\], k and v"):
            attention_energy(*bad)


def test_by_differences_alone():
    """Not by the gradient of a program: the derivative's definition, one coordinate at a time."""
    q, k, v = draw((1, 4), (20, 4), (20, 4))
    step = 1e-5
    got = [
        (attention_energy(q, k, v, source) - attention_energy(q, k, v, -source)) / (2 * step)
        for source in step * jnp.eye(4)[:, None]
    ]
    close(jnp.stack(got), attention(q, k, v, jnp.zeros_like(q))[0], 1e-9)


def test_second_derivatives_are_covariances():
    """Equation 20 with n = 2."""
    q, k, v = draw((1, 6), (30, 6), (30, 6))
    weights = jax.nn.softmax(k @ q[0])
    mean = weights @ v
    want = jnp.einsum("a,ai,aj->ij", weights, v - mean[None], v - mean[None])
    close(jax.jit(jax.hessian(attention_energy, argnums=3))(q, k, v, jnp.zeros_like(q))[0, :, 0], want)


def test_a_shift_of_scores_changes_nothing():
    """Equations 36 to 38: what keeps the exponentials in range drops out of the gradient."""
    q, k, v = draw((1, 8), (40, 8), (40, 8))
    large = 300 * q
    shifted = jnp.concatenate([large, jnp.ones((1, 1))], axis=1)
    keys = jnp.concatenate([k, jnp.full((40, 1), 1e4)], axis=1)
    values = jnp.concatenate([v, jnp.zeros((40, 1))], axis=1)
    got = attention(shifted, keys, values, jnp.zeros_like(shifted))[:, :8]
    close(got, attention(large, k, v, jnp.zeros_like(q)), 1e-10)


def test_parts_of_the_keys_add_up_in_any_grouping():
    """Theorem 1: the energy of all keys is the logsumexp of the energies of parts."""
    q, k, v, source = draw((1, 8), (48, 8), (48, 8), (1, 8))
    parts = [attention_energy(q, k[i : i + 12], v[i : i + 12], source) for i in range(0, 48, 12)]
    close(jax.nn.logsumexp(jnp.stack(parts)), attention_energy(q, k, v, source))
