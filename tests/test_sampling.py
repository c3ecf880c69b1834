"""Choosing tokens: Hugging Face's processors and warpers as the oracle, and the same draw on every mesh."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

VOCAB = 64


def plan_of(mesh, **sizes):
    from treering.layers.parallel.sharding import Plan

    return Plan(mesh(**sizes), "decode")


def rows_of(batch, **settings):
    from treering.infer.sampling import SamplingRows

    neutral = SamplingRows.neutral(batch, VOCAB)
    values = {name: jnp.full_like(getattr(neutral, name), value) for name, value in settings.items()}
    return dataclasses.replace(neutral, **values)


def random_logits(batch=8, seed=0):
    return jnp.asarray(3 * np.random.default_rng(seed).normal(size=(batch, VOCAB)), jnp.float32)


@pytest.mark.parametrize(
    "sizes", [{"context": 1}, {"context": 8}, {"context": 2, "tensor": 4}, {"data": 2, "context": 4}]
)
def test_argmax_takes_the_lowest_id_among_equals(mesh, sizes):
    from treering.infer.sampling import argmax

    plan = plan_of(mesh, **sizes)
    logits = np.array(np.random.default_rng(0).normal(size=(4, VOCAB)), np.float32)
    logits[0, [3, 40, 63]] = 9.0
    logits[1, [40, 63]] = 9.0
    logits[2] = 0.0
    logits[3] = -np.inf
    logits[3, 7] = -1e30
    found = jax.jit(lambda x: argmax(x, plan))(jax.device_put(logits, plan.sharding("batch vocab", logits.shape)))
    assert found.tolist() == [3, 40, 0, 7]


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.9},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"top_p": 1.0},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_warpers_keep_what_those_of_transformers_keep(settings):
    torch = pytest.importorskip("torch")
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    from treering.infer.sampling import keep_min_p, keep_top_k, keep_top_p

    classes = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    logits = random_logits()
    theirs = LogitsProcessorList([classes[name](value) for name, value in settings.items()])
    expected = theirs(torch.zeros(8, 0, dtype=torch.long), torch.tensor(np.asarray(logits))).numpy()
    rows = rows_of(8, **settings)
    warm = logits / settings.get("temperature", 1.0)
    ours = keep_min_p(keep_top_p(keep_top_k(warm, rows.top_k), rows.top_p), rows.min_p)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(expected))
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_known_supports():
    from treering.infer.sampling import keep_top_k, keep_top_p

    scores = jnp.log(jnp.array([[0.2, 0.4, 0.1, 0.3]]))
    for p, kept in ((0.8, [0, 1, 3]), (0.65, [1, 3]), (1e-6, [1]), (1.0, [0, 1, 2, 3])):
        assert np.flatnonzero(np.isfinite(keep_top_p(scores, jnp.array([p]))[0])).tolist() == kept
    tied = jnp.array([[1.0, 2.0, 2.0, 0.0]])
    assert np.isfinite(keep_top_k(tied, jnp.array([1]))[0]).tolist() == [False, True, True, False]


def test_penalties():
    """Repetition as Hugging Face does it, on prompt and answer; presence and frequency on the answer alone."""
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    from treering.infer.sampling import penalise

    logits = random_logits(2)
    prompt, answer = [3, 5, 5], [5, 9, 9, 9]
    rows = rows_of(2, repetition_penalty=2.0)
    prompted = rows.prompted.at[:, jnp.array(prompt)].set(True)
    counts = jnp.tile(jnp.bincount(jnp.array(answer), length=VOCAB)[None], (2, 1))
    rows = dataclasses.replace(rows, prompted=prompted, counts=counts)
    expected = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([prompt + answer] * 2), torch.tensor(logits.tolist()))
    np.testing.assert_allclose(penalise(logits, rows), expected.numpy(), rtol=1e-6)
    rows = dataclasses.replace(
        rows,
        repetition_penalty=jnp.ones(2),
        presence_penalty=jnp.full(2, 0.5),
        frequency_penalty=jnp.full(2, 0.25),
        bias=rows.bias.at[:, 0].set(7.0),
    )
    lowered = np.asarray(logits - penalise(logits, rows))
    np.testing.assert_allclose(lowered[:, [0, 3, 5, 9]], [[-7, 0, 0.75, 1.25]] * 2, atol=1e-5)


@pytest.mark.smoke
def test_temperature_zero_and_tiny_are_the_argmax(mesh):
    from treering.infer.sampling import draw

    plan = plan_of(mesh, context=8)
    logits = random_logits(2)
    best = np.argmax(logits, axis=-1).tolist()
    sampler = jax.jit(lambda rows, drawn: draw(logits, rows, drawn, "temperature", plan))
    for seed in range(20):
        rows = rows_of(2, seed=seed)
        rows = dataclasses.replace(rows, temperature=jnp.array([0.0, 1e-6]))
        assert sampler(rows, jnp.zeros(2, jnp.int32)).tolist() == best


@pytest.mark.parametrize("kind", ["temperature", "full"])
def test_draws_follow_the_softmax_and_not_the_mesh(mesh, kind):
    """4,000 draws of a known distribution: chi-square below its 0.999 quantile; the same ones on every mesh."""
    from treering.infer.sampling import draw

    weights = np.array([0.4, 0.3, 0.2, 0.1])
    heat = 0.5
    logits = np.full((4000, VOCAB), -np.inf, np.float32)
    logits[:, :4] = np.log(weights) * heat
    rows = dataclasses.replace(rows_of(4000, temperature=heat), seed=jnp.arange(4000, dtype=jnp.uint32))
    made = []
    for sizes in ({"context": 1}, {"context": 8}):
        plan = plan_of(mesh, **sizes)
        sampler = jax.jit(lambda x, rows, plan=plan: draw(x, rows, jnp.zeros(4000, jnp.int32), kind, plan))
        made.append(np.asarray(sampler(jax.device_put(logits, plan.sharding("batch vocab", logits.shape)), rows)))
    assert np.array_equal(*made)
    counts = np.bincount(made[0], minlength=VOCAB)
    assert counts[4:].sum() == 0
    expected = weights * 4000
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.27


def test_a_draw_depends_on_neither_row_nor_neighbours(mesh):
    from treering.infer.sampling import draw

    plan = plan_of(mesh)
    logits = random_logits(4)
    rows = dataclasses.replace(rows_of(4, temperature=1.0), seed=jnp.array([7, 8, 9, 7], jnp.uint32))
    same = logits.at[3].set(logits[0])
    steps = jnp.array([5, 5, 5, 5])
    together = draw(same, rows, steps, "temperature", plan)
    assert together[0] == together[3]
    alone = draw(same[:1], jax.tree.map(lambda leaf: leaf[:1], rows), steps[:1], "temperature", plan)
    assert alone[0] == together[0]
    later = [
        int(draw(same[:1], jax.tree.map(lambda x: x[:1], rows), jnp.array([n]), "temperature", plan)[0])
        for n in range(8)
    ]
    assert len(set(later)) > 1


def test_logprobs_are_those_of_the_raw_distribution():
    from treering.infer.sampling import log_probabilities

    logits = random_logits(3)
    tokens = jnp.array([0, 5, 63])
    own, values, ids = log_probabilities(logits, tokens, 4)
    table = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    np.testing.assert_allclose(own, table[np.arange(3), [0, 5, 63]], rtol=1e-6)
    np.testing.assert_array_equal(ids, np.argsort(-table, axis=-1)[:, :4])
    np.testing.assert_allclose(values, np.sort(table, axis=-1)[:, ::-1][:, :4], rtol=1e-6)


@pytest.mark.parametrize(
    "setting,value",
    [
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e300),
        ("repetition_penalty", 1e-300),
        ("temperature", 1e300),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", -1),
    ],
)
def test_settings_outside_their_bounds_are_refused_by_name(setting, value):
    from treering.configs.sampling import SamplingConfig

    with pytest.raises(ValueError, match=re.escape(f"{setting} {value}: it must be")):
        SamplingConfig(**{setting: value})


@pytest.mark.parametrize("settings", [{"temperature": 1.0, "top_k": 10**12}, {"temperature": 2e-38}])
def test_settings_far_beyond_what_could_matter_choose_as_the_nearest_that_does(mesh, settings):
    """More tokens than there are are all; temperatures that would make logits overflow take the most likely."""
    from treering.configs.sampling import SamplingConfig
    from treering.infer.sampling import draw
    from treering.infer.sequence_state import SequenceState

    same = {"temperature": 1.0} if "top_k" in settings else {"temperature": 1e-6}
    logits, plan = random_logits(1) * 10, plan_of(mesh, context=1)
    rows = [SequenceState.of_request([1], 1, [], SamplingConfig(**one), VOCAB).sampling for one in (settings, same)]
    one, other = (draw(logits, jax.tree.map(jnp.asarray, row), jnp.zeros(1, jnp.int32), "full", plan) for row in rows)
    assert one == other
