"""One training step: the same however it is computed, safe against what is not finite, and apart for each document."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import training
from treering.configs.llama import TINY
from treering.configs.precision import Precision
from treering.configs.train import OptimizerConfig, ScheduleConfig, StepConfig
from treering.layers.nn.gathered_weight import cast_matrices, gather_on_use
from treering.train.data.batch import shard_batch
from treering.train.evaluate import empty_sums, evaluation_program
from treering.train.step import abstract_state, batch_gradients, init_state, step_program
from treering.train.step import hidden_states as forward

SGD = OptimizerConfig(kind="sgd", learning_rate=0.1, schedule=ScheduleConfig(kind="constant"), clip_norm=None)


@pytest.fixture(scope="module")
def plan(mesh):
    """Four devices, of which two share a row."""
    return training.train_plan(mesh(fsdp=2, context=2))


@pytest.fixture(scope="module")
def usual(plan):
    return training.run(plan)


@pytest.mark.parametrize(
    "changes",
    [{"remat": "none", "loss_chunk": 7}, {"remat": "full", "attention": "gather", "accumulation": 4}],
    ids=str,
)
def test_how_a_step_computes_changes_nothing(plan, usual, changes):
    done = training.run(plan, step=dataclasses.replace(training.FLOAT32, **changes))
    assert done.tokens == usual.tokens
    assert np.allclose(done.losses, usual.losses, rtol=1e-6, atol=0)
    assert np.allclose(done.norms, usual.norms, rtol=1e-5, atol=0)
    assert training.difference(done.gradients, usual.gradients) <= 5e-6
    assert training.difference(done.parameters, usual.parameters) <= 5e-6


@pytest.mark.long
def test_accumulation_is_no_mean_of_means(mesh):
    """Answers of 1, 2, 5 and 40 tokens: together in one batch, and one a part."""
    rng = np.random.default_rng(0)
    rows = [[(rng.integers(0, TINY.vocab, 44), 44 - 1 - answer)] for answer in (1, 2, 5, 40)]
    batch = training.pack(rows, 48)
    assert [int(n) for n in np.sum(batch.targets >= 0, axis=1)] == [1, 2, 5, 40]
    plan = training.train_plan(mesh())
    runs = [
        training.run(plan, step=dataclasses.replace(training.FLOAT32, accumulation=parts), optimizer=SGD, data=[batch])
        for parts in (1, 4)
    ]
    assert runs[0].tokens == runs[1].tokens == [48]
    assert abs(runs[0].losses[0] - runs[1].losses[0]) <= 1e-6 * runs[0].losses[0]
    assert training.difference(runs[0].parameters, runs[1].parameters) <= 1e-6


@pytest.fixture(scope="module")
def bfloat16(plan):
    """A step in bfloat16 over float32 parameters, compiled for one-row windows, and its first state."""
    optimizer = OptimizerConfig(learning_rate=1e-5, schedule=ScheduleConfig(kind="constant"))
    shapes = abstract_state(TINY, optimizer, plan)
    step = step_program(shapes, StepConfig(loss_chunk=24), optimizer, plan, steps=100, batch=8, seq=32)
    return step, lambda: init_state(training.make_model(TINY, plan), optimizer, plan)


def test_parameters_move_at_small_rates(plan, bfloat16):
    """Where parameters themselves are bfloat16, a step of 1e-5 leaves them where they are."""
    step, start = bfloat16
    state = start()
    before = training.named(state.model)
    data = [shard_batch(batch, plan) for batch in training.batches(2)]
    losses = []
    for number in range(60):
        state, metrics = step(None, state, data[number % 2])
        losses.append(float(metrics.loss))
    after = training.named(state.model)
    moved = [np.mean(after[name] != x) for name, x in before.items() if name != "embed.table"]
    assert min(moved) > 0.95
    assert {x.dtype for x in jax.tree.leaves((state.model, state.optimizer[0].mu, state.optimizer[0].nu))} == {
        jnp.dtype("float32")
    }
    assert losses[-1] < losses[1]


def test_bfloat16_gradients_are_near_those_of_float32(plan, usual, bfloat16):
    step, start = bfloat16
    state, metrics = step(None, start(), shard_batch(training.batches(1)[0], plan))
    assert abs(float(metrics.loss) - usual.losses[0]) <= 0.01 * usual.losses[0]
    assert abs(float(metrics.grad_norm) - usual.norms[0]) <= 0.05 * usual.norms[0]
    assert metrics.loss.dtype == metrics.grad_norm.dtype == jnp.float32


def test_a_step_that_is_not_finite_is_skipped_and_counted(plan, bfloat16):
    step, start = bfloat16
    first, second = training.batches(2)
    infinite = jax.tree.map(np.array, first)
    infinite.tokens[3, 5] = TINY.vocab - 1
    # A token that no other batch has, with a vector beyond all numbers.
    second = dataclasses.replace(second, tokens=np.minimum(second.tokens, TINY.vocab - 2))
    state = start()
    table = state.model.embed.table.at[TINY.vocab - 1].set(jnp.inf)
    table = jax.device_put(table, state.model.embed.table.sharding)
    state = eqx.tree_at(lambda state: state.model.embed.table, state, table)
    before = training.named((state.model, state.optimizer))
    for times in (1, 2):
        state, metrics = step(None, state, shard_batch(infinite, plan))
        assert bool(metrics.skipped) and int(metrics.skipped_in_row) == int(state.skipped) == int(state.step) == times
        assert not np.isfinite(float(metrics.grad_norm)) or not np.isfinite(float(metrics.loss))
    after = training.named((state.model, state.optimizer))
    assert all(np.array_equal(after[name], x) for name, x in before.items())
    state, metrics = step(None, state, shard_batch(second, plan))
    assert not bool(metrics.skipped) and int(metrics.skipped_in_row) == int(state.skipped_in_row) == 0
    assert int(state.skipped) == 2 and int(state.step) == 3
    assert np.any(training.named(state.model)["output.weight"] != before["0.output.weight"])


def test_a_batch_without_a_trained_token_is_no_nan(plan, bfloat16):
    step, start = bfloat16
    batch = training.batches(1)[0]
    batch = dataclasses.replace(batch, targets=np.full_like(batch.targets, -100))
    state, metrics = step(None, start(), shard_batch(batch, plan))
    assert float(metrics.loss) == 0 and int(metrics.tokens) == 0 and float(metrics.grad_norm) == 0
    assert not bool(metrics.skipped)
    assert all(np.all(np.isfinite(x)) for x in training.named(state.model).values())


@pytest.mark.parametrize("sizes", [pytest.param({}, marks=pytest.mark.long), {"context": 4}], ids=str)
def test_documents_do_not_see_each_other(mesh, sizes):
    """Another first document leaves the second's hidden states and gradients as they were, bit for bit.

    In a window of 64 over four devices, zigzag's shards have edges at each 8 tokens, so both documents cross some.
    """
    plan = training.train_plan(mesh(**sizes))
    rng = np.random.default_rng(0)
    second = (rng.integers(0, TINY.vocab, 37), 0)
    batches = []
    for _ in range(2):
        batch = training.pack([[(rng.integers(0, TINY.vocab, 21), 21), second]], 64)
        batches.append(shard_batch(batch, plan))
    assert np.any(np.asarray(batches[0].tokens) != np.asarray(batches[1].tokens))
    model = training.make_model(TINY, plan)

    @jax.jit
    def both(model, batch):
        whole = gather_on_use(cast_matrices(model, jnp.dtype("float32")), None, plan)
        hidden = forward(whole, batch, training.FLOAT32, plan)
        _, tokens, gradients = batch_gradients(model, batch, training.FLOAT32, plan)
        return jnp.where((batch.segments == 2)[..., None], hidden, 0), tokens, gradients

    (hidden, tokens, gradients), (hidden_2, _, gradients_2) = (both(model, batch) for batch in batches)
    assert int(tokens) == 36 and np.any(np.asarray(hidden))
    assert np.array_equal(np.asarray(hidden), np.asarray(hidden_2))
    for name, gradient in training.named(gradients).items():
        assert np.any(gradient) and np.array_equal(gradient, training.named(gradients_2)[name]), name


def test_evaluation_sums_losses_by_position(plan, usual):
    """All positions together have the loss that a step tells."""
    batch, edges = training.batches(1)[0], (0, 4, 16)
    model = training.make_model(TINY, plan)
    program = evaluation_program(model, training.FLOAT32, plan, batch=8, seq=32, edges=edges)
    sums = empty_sums(plan, len(edges))
    for _ in range(2):
        sums = program(model, sums, shard_batch(batch, plan))
    ranges = [(batch.positions >= low) & (batch.positions < high) for low, high in ((0, 4), (4, 16), (16, 99))]
    assert np.asarray(sums.tokens).tolist() == [2 * np.sum((batch.targets >= 0) & inside) for inside in ranges]
    assert float(sums.loss.sum()) / 2 == pytest.approx(usual.losses[0] * usual.tokens[0], rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"accumulation": 0}, "step.accumulation 0: it must be at least 1"),
        ({"loss_chunk": 0}, "step.loss_chunk 0: it must be at least 1"),
        ({"z_loss": -1.0}, "step.z_loss -1.0: it must be at least 0"),
        ({"precision": Precision(params="bfloat16")}, "step.precision.params bfloat16: .*works: float32, float64"),
        ({"precision": Precision(reduce="bfloat16")}, "step.precision.reduce bfloat16"),
        ({"precision": Precision(compute="float16")}, "step.precision.compute float16: .*bfloat16, float32, float64"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        StepConfig(**fields)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"batch": 6, "seq": 32}, r"data.batch 6: it must be a multiple of .* = 4, .*1, 2, 3, 6 .works: 4, 8"),
        ({"batch": 8, "seq": 34}, r"seq 34 in zigzag order over 2 devices: it must be a multiple of 4 .*32 and 36"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_compiling(plan, sizes, said):
    state = abstract_state(TINY, training.ADAMW, plan)
    step = dataclasses.replace(training.FLOAT32, accumulation=2)
    with pytest.raises(ValueError, match=said):
        step_program(state, step, training.ADAMW, plan, steps=3, **sizes)


def test_a_schedule_longer_than_the_run_is_refused_before_compiling(plan):
    optimizer = OptimizerConfig(schedule=ScheduleConfig(warmup_steps=9))
    with pytest.raises(ValueError, match="schedule.warmup_steps 9: it must be at most 3, the steps of the run"):
        step_program(abstract_state(TINY, optimizer, plan), training.FLOAT32, optimizer, plan, steps=3, batch=8, seq=32)


def test_unrolled_blocks_are_refused(mesh):
    plan = training.train_plan(mesh())
    model = training.make_model(TINY, plan)
    with pytest.raises(ValueError, match="unrolled"):
        init_state(model.unrolled(), training.ADAMW, plan)
