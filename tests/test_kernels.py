"""The kernel seam: a kernel that knows static geometry alone, and one for pages, in all that users run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import test_engine
import training
from bench.attention import computed_pairs
from treering.configs.llama import TINY
from treering.configs.precision import Precision
from treering.layers.attention import kernels
from treering.layers.attention.kernels import BlockMask, Geometry, Kernel, Problem, kernel_for, tiles
from treering.layers.attention.mask import Mask, visible
from treering.layers.attention.order import order_positions
from treering.layers.attention.partial import Partial
from treering.train.data.batch import shard_batch
from treering.train.step import batch_gradients

folder = test_engine.folder
STATIC = (Geometry.FULL, Geometry.DIAGONAL, Geometry.BAND)


def seen(block: BlockMask, seq: int, kv_seq: int) -> Array:
    """Which pairs see each other, `[batch seq kv_seq]`, by the definition of each geometry."""
    i, j = jnp.arange(seq)[None, :, None], jnp.arange(kv_seq)[None, None, :]
    found = jnp.broadcast_to(jnp.asarray(True), (1, seq, kv_seq))
    if block.geometry is Geometry.DIAGONAL:
        found = j <= i
    if block.band is not None:
        found = (j - i >= block.band[:, 0, None, None]) & (j - i <= block.band[:, 1, None, None])
    if block.q_segments is not None and block.kv_segments is not None:
        q, k = block.q_segments[:, :, None], block.kv_segments[:, None, :]
        found = found & (q == k) & (q > 0)
    return found


def static_forward(q: Array, k: Array, v: Array, block: BlockMask, mask: Mask) -> tuple[Array, Array]:
    scores = jnp.einsum("bkgqd,bksd->bkgqs", q, k) * mask.score_scale(q.shape[-1])
    scores = jnp.where(seen(block, q.shape[3], k.shape[2])[:, None, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0))
    total = jnp.sum(weights, axis=-1)
    lse = jnp.where(total > 0, peak[..., 0] + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    return jnp.einsum("bkgqs,bksd->bkgqd", weights / jnp.where(total > 0, total, 1)[..., None], v), lse


def static_backward(q, k, v, block, mask, lse, delta, d_out) -> tuple[Array, Array, Array]:
    scale = mask.score_scale(q.shape[-1])
    scores = jnp.einsum("bkgqd,bksd->bkgqs", q, k) * scale
    some = jnp.isfinite(lse)[..., None] & seen(block, q.shape[3], k.shape[2])[:, None, None]
    weights = jnp.where(some, jnp.exp(jnp.where(some, scores - lse[..., None], 0)), 0)
    slopes = weights * (jnp.einsum("bkgqd,bksd->bkgqs", d_out, v) - delta[..., None]) * scale
    dq, dk = jnp.einsum("bkgqs,bksd->bkgqd", slopes, k), jnp.einsum("bkgqs,bkgqd->bksd", slopes, q)
    return dq, dk, jnp.einsum("bkgqs,bkgqd->bksd", weights, d_out)


def paged_forward(q, keys, values, layer, table, positions, rank, devices, mask) -> Partial:
    """All pages of a row side by side, as one block by definition."""
    batch, seq, heads, head_dim = q.shape
    k = jnp.moveaxis(keys[layer][table], 4, 2).reshape(batch, -1, *keys.shape[2:4])
    v = jnp.moveaxis(values[layer][table], 3, 2).reshape(batch, -1, values.shape[2], head_dim)
    group = heads // k.shape[2]
    scores = jnp.einsum("bqkgd,bskd->bqkgs", q.reshape(batch, seq, -1, group, head_dim), k) * mask.score_scale(head_dim)
    slots = jnp.broadcast_to(jnp.arange(k.shape[1]) * devices + rank, (batch, k.shape[1]))
    scores = jnp.where(visible(mask, positions, slots)[:, :, None, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0))
    total = jnp.sum(weights, axis=-1)
    safe = jnp.where(total > 0, total, 1)
    out = jnp.einsum("bqkgs,bskd->bqkgd", weights / safe[..., None], v)
    lse = jnp.where(total > 0, peak[..., 0] + jnp.log(safe), -jnp.inf)
    return Partial(out.reshape(q.shape), lse.reshape(batch, seq, heads))


STAND_INS = (
    Kernel(
        name="static",
        takes=lambda problem: problem.geometry in STATIC,
        forward=static_forward,
        backward=static_backward,
        branch_free=True,
    ),
    Kernel(name="paged", takes=lambda problem: problem.geometry is Geometry.PAGED, forward=paged_forward),
)
"""They refuse positions, and no other kernel is there to take them."""


def problem(**changes: Any) -> Problem:
    usual: dict[str, Any] = dict(platform="cpu", dtype=jnp.dtype("float32"), head_dim=64, group=4, segments=False)
    return Problem(**{"geometry": Geometry.FULL, **usual, **changes})


def test_the_first_kernel_that_takes_a_problem_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for geometry in Geometry:
        wanted = kernels.PAGED_XLA if geometry is Geometry.PAGED else kernels.XLA
        assert kernel_for(problem(geometry=geometry)) is wanted
    half = Kernel(
        name="half",
        takes=lambda p: p.platform == "gpu" and p.dtype == jnp.bfloat16 and not p.segments and p.geometry in STATIC,
        forward=static_forward,
    )
    monkeypatch.setattr(kernels, "KERNELS", (half, *kernels.KERNELS))
    assert kernel_for(problem(platform="gpu", dtype=jnp.dtype("bfloat16"))) is half
    for other in (dict(), dict(platform="gpu"), dict(platform="gpu", dtype=jnp.dtype("bfloat16"), segments=True)):
        assert kernel_for(problem(**other)) is kernels.XLA


def windowed(model: Any, window: int | None) -> Any:
    """The model with a window in each layer."""
    (block,) = model.blocks.pattern
    block = dataclasses.replace(block, attention=dataclasses.replace(block.attention, mask=Mask(window=window)))
    return dataclasses.replace(model, blocks=dataclasses.replace(model.blocks, pattern=(block,)))


def gradients_of(
    mesh: Any, context: int, window: int | None, algorithm: str = "ring", dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Loss and gradients of a packed batch, whose documents cross the edges of shards."""
    plan = training.train_plan(mesh(context=context))
    model = windowed(training.make_model(TINY, plan, dtype), window)
    precision = Precision(params=dtype, compute=dtype, reduce=dtype)
    step = dataclasses.replace(training.FLOAT32, attention=algorithm, precision=precision)
    batch = shard_batch(training.batches(1)[0], plan)
    with jax.default_matmul_precision("highest"):
        total, _, gradients = jax.jit(lambda model, batch: batch_gradients(model, batch, step, plan))(model, batch)
    return training.named(gradients) | {"loss": np.asarray(total.objective)}


@pytest.mark.parametrize(
    ("context", "window", "algorithm"),
    [
        (4, None, "ring"),
        (8, 9, "ring"),
        pytest.param(1, 9, "ring", marks=pytest.mark.long),
        pytest.param(1, None, "ring", marks=pytest.mark.long),
        pytest.param(8, None, "ring", marks=pytest.mark.long),
        pytest.param(4, 9, "gather", marks=pytest.mark.long),
    ],
)
def test_a_training_step_runs_on_static_geometry_alone(mesh, monkeypatch, x64, context, window, algorithm) -> None:
    """In float64, where no rounding hides a wrong pair."""
    usual = gradients_of(mesh, context, window, algorithm, "float64")
    monkeypatch.setattr(kernels, "KERNELS", STAND_INS)
    found = gradients_of(mesh, context, window, algorithm, "float64")
    assert training.difference(found, usual) <= 1e-12


LONG = [pytest.param(n, marks=pytest.mark.long) for n in (1, 8)]


@pytest.mark.parametrize("context", [4, *LONG])
def test_prefill_and_decoding_run_on_the_stand_ins(mesh, monkeypatch, x64, folder, context) -> None:
    """A fresh long chunk by the ring, a later one by passing queries, then tokens one by one."""
    from treering.infer.chunks import Chunks
    from treering.infer.engine import Engine

    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 96, n).tolist() for n in (24, 17)]

    def logits() -> list[np.ndarray]:
        engine = test_engine.make_engine(folder, mesh, {"context": context}, batch=2, capacity=64)
        wide = Precision(compute="float64", cache="float64")
        engine = Engine(engine.model, engine.plan, wide, batch=2, capacity=64)
        if context > 1:
            engine.chunks = Chunks(24, 1)
        state, found = engine.empty_state(), []
        for part in (rows, [row[:9] for row in rows], [[5], [7]]):
            row_logits, state = engine.append(state, part)
            found.append(np.asarray(row_logits))
            engine.chunks = engine.chunks if part is rows else Chunks()
        return found

    usual = logits()
    monkeypatch.setattr(kernels, "KERNELS", STAND_INS)
    for ours, right in zip(logits(), usual, strict=True):
        assert np.abs(ours - right).max() <= 1e-12 * np.abs(right).max()


def test_forced_to_branch_free_no_class_comes_from_positions(mesh, monkeypatch) -> None:
    """XLA's own kernel, with the schedule that device kernels want: it would have to be asked for positions."""
    usual = gradients_of(mesh, 4, 9)
    forced = dataclasses.replace(kernels.XLA, takes=lambda p: p.geometry in STATIC, branch_free=True)
    monkeypatch.setattr(kernels, "KERNELS", (forced,))
    found = gradients_of(mesh, 4, 9)
    assert abs(found["loss"] - usual["loss"]) <= 1e-6 * abs(usual["loss"])
    assert training.difference(found, usual) <= 1e-5


@pytest.mark.parametrize("branch_free", [False, True], ids=["by-position", "branch-free"])
def test_either_schedule_computes_the_pairs_that_see_each_other(mesh, monkeypatch, branch_free) -> None:
    """In tiles of one token each: their number is that of the definition."""
    monkeypatch.setattr(tiles, "Q_TILE", 1)
    monkeypatch.setattr(tiles, "KV_TILE", 1)
    p, local = 4, 8
    for order in ("zigzag", "contiguous", "striped"):
        for window in (None, 5):
            for documents in (None, np.repeat([1, 2, 3, 0], [7, 13, 9, 3])):
                segments = None
                if documents is not None:
                    segments = jnp.asarray(documents[np.asarray(order_positions(order, p, p * local))][None], jnp.int32)
                mask = Mask(window=window)
                found = computed_pairs(mesh(context=p), order, mask, local, segments, branch_free=branch_free)
                at = jnp.arange(p * local)
                own = None if documents is None else jnp.asarray(documents)
                assert found.sum() == np.asarray(visible(mask, at, at, own, own)).sum(), (order, window)
