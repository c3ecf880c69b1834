"""Optimizers and schedules: what decays, how rates move, how gradients are clipped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import training
from treering.configs.llama import TINY
from treering.configs.train import OptimizerConfig, ScheduleConfig
from treering.layers.nn.linear import Linear
from treering.layers.parallel.sharding import Dims, is_matrix
from treering.models.checkpoint.model import abstract_model, named_leaves
from treering.train.optim import clip, decayed, learning_rate, transformation

pytestmark = pytest.mark.smoke


def test_weights_and_tables_decay_and_stacked_norms_do_not():
    decays = named_leaves(jax.tree.map(lambda yes: np.array(yes), decayed(abstract_model(TINY))))
    kept = {name for name, yes in decays.items() if not yes}
    assert kept == {"norm.weight", *(f"blocks.places.0.{name}_norm.weight" for name in ("attention", "mlp"))}


def test_a_bias_over_heads_does_not_decay():
    """It has two dims, as a matrix has."""
    linear = Linear.init(
        "embed -> heads head_dim", {"embed": 8, "heads": 2, "head_dim": 4}, bias=True, key=jax.random.key(0)
    )
    assert jax.tree.leaves(decayed(linear)) == [True, False]
    assert not is_matrix(Dims(("layers", "head_dim"))) and is_matrix(Dims(("layers", "mlp", "embed")))


def test_without_gradients_only_what_decays_moves():
    config = dataclasses.replace(training.ADAMW, weight_decay=0.1)
    model = jax.tree.map(lambda x: jnp.ones(x.shape), abstract_model(TINY))
    optimizer = transformation(config)
    direction, _ = optimizer.update(jax.tree.map(jnp.zeros_like, model), optimizer.init(model), model)
    moved = {name: float(jnp.max(jnp.abs(x))) for name, x in named_leaves(direction).items()}
    marks = named_leaves(jax.tree.map(lambda yes: np.array(yes), decayed(model)))
    for name, distance in moved.items():
        assert distance == pytest.approx(0.1 if marks[name] else 0.0), name


def rates(schedule: ScheduleConfig, steps: int) -> list[float]:
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule)
    return [float(learning_rate(config, jnp.int32(step), steps)) for step in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_rates_rise_to_the_peak_and_end_at_their_share(kind):
    found = rates(ScheduleConfig(kind=kind, warmup_steps=4, final_share=0.25), 13)
    assert found[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert found[4] == pytest.approx(2.0)
    middle = {"cosine": 1.25, "linear": 1.25, "constant": 2.0}[kind]
    assert found[8] == pytest.approx(middle)
    assert found[12] == pytest.approx(2.0 if kind == "constant" else 0.5)
    quarter = {"cosine": 0.5 + 1.5 * (1 + np.cos(np.pi / 4)) / 2, "linear": 1.625, "constant": 2.0}[kind]
    assert found[6] == pytest.approx(quarter)


def test_wsd_stays_and_then_falls():
    found = rates(ScheduleConfig(kind="wsd", warmup_steps=2, decay_steps=4, final_share=0.0), 10)
    assert found == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0])


def test_rates_stay_beyond_the_end():
    config = OptimizerConfig(learning_rate=1.0, schedule=ScheduleConfig(kind="linear", final_share=0.1))
    assert float(learning_rate(config, jnp.int32(500), 10)) == pytest.approx(0.1)


def test_a_run_of_one_step_has_a_rate():
    for kind in ("cosine", "linear", "constant"):
        assert rates(ScheduleConfig(kind=kind), 1) == [2.0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "wsd"}, "schedule.decay_steps None: optimizer.schedule.kind wsd needs it"),
        (
            {"kind": "cosine", "decay_steps": 3},
            "decay_steps 3: it is for .*kind wsd, which needs it, and not for cosine",
        ),
        ({"kind": "wsd", "decay_steps": 0}, "schedule.decay_steps 0: it must be at least 1"),
        ({"warmup_steps": -1}, "schedule.warmup_steps -1: it must be at least 0"),
        ({"final_share": 1.5}, "schedule.final_share 1.5: it must be a share of the peak, from 0 to 1"),
    ],
)
def test_schedules_that_cannot_be_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        ScheduleConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"learning_rate": -1.0}, "optimizer.learning_rate -1.0: it must be at least 0"),
        ({"b2": 1.0}, "b2 1.0: it must be at least 0 and below 1"),
        ({"momentum": 0.9}, "optimizer.momentum 0.9: it is for optimizer.kind sgd; adamw has optimizer.b1"),
        ({"clip_norm": 0.0}, "None for no clipping"),
        ({"weight_decay": -0.1}, "weight_decay -0.1: it must be at least 0"),
    ],
)
def test_optimizers_that_cannot_be_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        OptimizerConfig(**fields)


def test_a_schedule_longer_than_its_run_is_refused():
    rule = "warmup_steps 8: it must be at most 6, the steps of the run without the 4 of optimizer.schedule.decay_steps"
    with pytest.raises(ValueError, match=rule):
        rates(ScheduleConfig(kind="wsd", warmup_steps=8, decay_steps=4), 10)
    with pytest.raises(ValueError, match="decay_steps 11: it must be at most 10, the steps of the run"):
        rates(ScheduleConfig(kind="wsd", decay_steps=11), 10)


def test_clipping_is_by_the_norm_of_all_gradients_together():
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    norm = optax.tree.norm(gradients)
    clipped = clip(gradients, norm, 1.0)
    assert float(optax.tree.norm(clipped)) == pytest.approx(1.0)
    assert np.allclose(clipped["a"], [0.6, 0.0])
    for limit in (5.0, 100.0, None):
        assert all(np.array_equal(clip(gradients, norm, limit)[name], gradients[name]) for name in gradients)
    zeros = jax.tree.map(jnp.zeros_like, gradients)
    assert not np.any(clip(zeros, optax.tree.norm(zeros), 1.0)["a"])


def test_sgd_keeps_momentum_and_adds_decay_to_the_gradient():
    optimizer = transformation(OptimizerConfig(kind="sgd", momentum=0.5, weight_decay=0.1))
    linear = Linear.init("embed -> mlp", {"embed": 2, "mlp": 2}, key=jax.random.key(0))
    ones = jax.tree.map(jnp.ones_like, linear)
    state = optimizer.init(ones)
    for expected in (1.1, 1.1 + 0.55):
        direction, state = optimizer.update(ones, state, ones)
        assert np.allclose(jax.tree.leaves(direction)[0], expected)
