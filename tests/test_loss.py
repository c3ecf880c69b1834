"""Cross entropy in chunks, over a split vocabulary: equal to its definition, with gradients, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlo
from treering.layers.nn.gathered_weight import GatheredWeight, WeightSharding
from treering.layers.parallel.sharding import Dims, Plan
from treering.train.loss import cross_entropy, token_losses

BATCH, SEQ, EMBED, VOCAB = 4, 16, 32, 48
CASES = [
    ({}, 0.0),
    ({}, 0.1),
    ({"context": 8}, 0.0),
    ({"fsdp": 2, "context": 2, "tensor": 2}, 0.1),
    ({"data": 2, "tensor": 4}, 0.0),
]


def weight(plan: Plan, table: jax.Array, slot: jax.Array | None) -> GatheredWeight:
    return GatheredWeight(table, slot, WeightSharding(plan, Dims(("vocab", "embed")), table.shape))


def inputs(dtype=jnp.float64, scale=1.0):
    """Hidden states, a table and targets, of which a third are not trained, written in both usual ways."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(scale * rng.normal(size=(BATCH, SEQ, EMBED)), dtype)
    table = jnp.asarray(rng.normal(size=(VOCAB, EMBED)), dtype)
    targets = rng.integers(0, VOCAB, (BATCH, SEQ)).astype(np.int32)
    targets[rng.random((BATCH, SEQ)) < 0.2] = -1
    targets[rng.random((BATCH, SEQ)) < 0.2] = -100
    targets[0] = -1
    return hidden, table, jnp.asarray(targets)


def by_definition(hidden, table, targets, z_loss=0.0):
    """Each token's loss, from whole logits in float64."""
    logits = jnp.einsum("bse,ve->bsv", hidden.astype(jnp.float64), table.astype(jnp.float64))
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(targets >= 0, lse - chosen + z_loss * lse**2, 0)


def error(ours, theirs) -> float:
    return float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs)))


@pytest.mark.parametrize(("sizes", "z_loss"), CASES, ids=str)
def test_loss_and_gradients_equal_the_definition(x64, mesh, sizes, z_loss):
    hidden, table, targets = inputs()
    plan = Plan(mesh(**sizes), "train")

    def ours(hidden, slot):
        # A factor, so that the cotangent is not 1.
        return 3 * cross_entropy(hidden, weight(plan, table, slot), targets, chunk=5, z_loss=z_loss).objective

    def theirs(hidden, table):
        return 3 * jnp.sum(by_definition(hidden, table, targets, z_loss))

    loss, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, jnp.zeros_like(table))
    expected, expected_gradients = jax.value_and_grad(theirs, (0, 1))(hidden, table)
    assert abs(loss - expected) <= 1e-13 * abs(expected)
    assert error(gradients[0], expected_gradients[0]) <= 1e-13
    assert error(gradients[1], expected_gradients[1]) <= 1e-13
    per_token = jax.jit(lambda h, t: token_losses(h, weight(plan, table, None), t, chunk=5))(hidden, targets)
    assert error(per_token, by_definition(hidden, table, targets)) <= 1e-13


@pytest.mark.smoke
def test_it_equals_torch_with_ignored_labels(mesh):
    torch = pytest.importorskip("torch")
    hidden, table, targets = inputs(jnp.float32)
    plan = Plan(mesh(), "train")
    h, t = (torch.tensor(np.asarray(x), requires_grad=True) for x in (hidden, table))
    labels = torch.tensor(np.where(np.asarray(targets) < 0, -100, np.asarray(targets))).long()
    expected = torch.nn.functional.cross_entropy((h @ t.T).flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()

    def ours(hidden, slot):
        return cross_entropy(hidden, weight(plan, table, slot), targets, chunk=7).objective

    loss, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, jnp.zeros_like(table))
    assert abs(float(loss) - expected.item()) <= 1e-6 * expected.item()
    assert error(gradients[0], h.grad.numpy()) <= 2e-6
    assert error(gradients[1], t.grad.numpy()) <= 2e-6


def test_no_trained_token_is_no_loss_and_no_nan(mesh):
    hidden, table, _ = inputs(jnp.float32)
    plan = Plan(mesh(tensor=2), "train")
    nothing = jnp.full((BATCH, SEQ), -100, jnp.int32)

    def ours(hidden, slot):
        return cross_entropy(hidden, weight(plan, table, slot), nothing, chunk=8, z_loss=0.1).objective

    loss, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, jnp.zeros_like(table))
    assert float(loss) == 0
    assert all(not np.any(np.asarray(g)) for g in gradients)


def test_z_loss_is_trained_but_not_reported(mesh):
    hidden, table, targets = inputs(jnp.float32)
    plan = Plan(mesh(), "train")
    with_z = cross_entropy(hidden, weight(plan, table, None), targets, chunk=8, z_loss=0.1)
    without = cross_entropy(hidden, weight(plan, table, None), targets, chunk=8)
    assert with_z.objective > with_z.cross_entropy == without.objective == without.cross_entropy
    gradient = jax.grad(lambda h: cross_entropy(h, weight(plan, table, None), targets, chunk=8).cross_entropy)(hidden)
    assert not np.any(np.asarray(gradient))


def test_bfloat16_products_keep_float32_losses_and_weight_gradients(x64, mesh):
    """At logits of 20, 40 and 80 against float64 on the same rounded inputs."""
    unscaled, table, targets = inputs(jnp.float32)
    largest = jnp.max(jnp.abs(jnp.einsum("bse,ve->bsv", unscaled, table)))
    table = table.astype(jnp.bfloat16)
    plan = Plan(mesh(context=2, tensor=2), "train")

    @jax.jit
    def ours(hidden, slot):
        def loss(hidden, slot):
            return cross_entropy(hidden, weight(plan, table, slot), targets, chunk=8).objective

        return jax.value_and_grad(loss, (0, 1))(hidden, slot)

    @jax.jit
    def theirs(hidden, table):
        return jax.value_and_grad(lambda h, t: jnp.sum(by_definition(h, t, targets)), (0, 1))(hidden, table)

    for scale in (20, 40, 80):
        hidden = (unscaled * (scale / largest)).astype(jnp.bfloat16)
        loss, gradients = ours(hidden, jnp.zeros(table.shape, jnp.float32))
        expected, expected_gradients = theirs(hidden.astype(jnp.float64), table.astype(jnp.float64))
        assert loss.dtype == jnp.float32 and gradients[1].dtype == jnp.float32
        assert abs(loss - expected) <= 1e-5 * expected
        for mine, exact in zip(gradients, expected_gradients, strict=True):
            assert jnp.linalg.norm((mine - exact).ravel()) <= 0.02 * jnp.linalg.norm(exact.ravel())


def test_logits_never_exist_whole(mesh):
    """One device of two holds half of the tokens and all of the vocabulary, but no more than a chunk of logits."""
    plan = Plan(mesh(context=2), "train")
    vocab, chunk, tokens = 1000, 64, 512
    hidden, table = jnp.zeros((1, tokens, EMBED)), jnp.zeros((vocab, EMBED))

    def ours(hidden, slot):
        return cross_entropy(
            hidden, weight(plan, table, slot), jnp.zeros((1, tokens), jnp.int32), chunk=chunk
        ).objective

    program = hlo.read(jax.jit(jax.grad(ours, (0, 1))).lower(hidden, table).compile())
    assert hlo.largest_beside(program, vocab) == max(chunk, EMBED)
