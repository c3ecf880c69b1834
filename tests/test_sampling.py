"""Choosing tokens from logits that are split over the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def plan_of(mesh, **sizes):
    from layers.sharding import Plan

    return Plan(mesh(**sizes), "decode")


@pytest.mark.parametrize(
    "sizes", [{"context": 1}, {"context": 8}, {"context": 2, "tensor": 4}, {"data": 2, "context": 4}]
)
def test_argmax_takes_the_lowest_id_among_equals(mesh, sizes):
    from infer.sampling import argmax

    plan = plan_of(mesh, **sizes)
    logits = np.array(np.random.default_rng(0).normal(size=(4, 64)), np.float32)
    logits[0, [3, 40, 63]] = 9.0
    logits[1, [40, 63]] = 9.0
    logits[2] = 0.0
    logits[3] = -np.inf
    logits[3, 7] = -1e30
    found = jax.jit(lambda x: argmax(x, plan))(jax.device_put(logits, plan.sharding("batch vocab", logits.shape)))
    assert found.tolist() == [3, 40, 0, 7]


def test_temperature_zero_and_tiny_are_the_argmax(mesh):
    from infer.sampling import argmax, sample

    plan = plan_of(mesh, context=8)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 64)), jnp.float32)
    best = jax.jit(lambda x: argmax(x, plan))(logits).tolist()
    draw = jax.jit(lambda key, heat: sample(logits, key, heat, plan))
    for seed in range(20):
        assert draw(jax.random.key(seed), jnp.array([0.0, 1e-6])).tolist() == best


def test_draws_follow_the_softmax_and_not_the_mesh(mesh):
    """4,000 draws of a known distribution: chi-square below its 0.999 quantile; equal keys draw equally anywhere."""
    from infer.sampling import sample

    weights = np.array([0.4, 0.3, 0.2, 0.1])
    heat = 0.5
    logits = np.full((4000, 8), -np.inf, np.float32)
    logits[:, :4] = np.log(weights) * heat
    draws = {}
    for sizes in ({"context": 1}, {"context": 8}):
        plan = plan_of(mesh, **sizes)
        temperature = jnp.full(len(logits), heat)
        draws[str(sizes)] = np.asarray(
            jax.jit(lambda x, plan=plan, t=temperature: sample(x, jax.random.key(7), t, plan))(
                jax.device_put(logits, plan.sharding("batch vocab", logits.shape))
            )
        )
    one, eight = draws.values()
    assert np.array_equal(one, eight)
    counts = np.bincount(one, minlength=8)
    assert counts[4:].sum() == 0
    expected = weights * len(logits)
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.27
