"""Long chunks of a prompt, spread over the context axis: the same numbers, at a share of the work on each device."""

import dataclasses

import equinox as eqx
import jax
import numpy as np
import pytest

import hlo
import test_engine
import test_scheduler
from test_engine import LENGTHS, name, token_rows

folder, oracle, alone = test_engine.folder, test_engine.oracle, test_scheduler.alone

MESHES = [
    {"context": 2},
    {"context": 3},
    {"context": 4},
    {"context": 8},
    {"context": 4, "tensor": 2},
    {"data": 2, "context": 2, "tensor": 2},
]


def make_engine(folder, mesh, sizes, *, long, least=1, **options):
    """An engine whose chunks of `long` tokens are spread."""
    from treering.infer.chunks import Chunks

    engine = test_engine.make_engine(folder, mesh, sizes, **options)
    engine.chunks = Chunks(long, least)
    return engine


@pytest.fixture
def small_pages(monkeypatch):
    """Rows of several pages, taken two at a time, and queries in several tiles."""
    from treering.infer import engine
    from treering.layers.attention.kernels import paged_xla
    from treering.layers.operations import paged

    monkeypatch.setattr(engine, "PAGE_SLOTS", 4)
    monkeypatch.setattr(paged, "QUERY_TILE", 8)
    monkeypatch.setattr(paged_xla, "MANY_QUERIES", 8)
    monkeypatch.setattr(paged_xla, "KEY_TILE", 8)


@pytest.mark.parametrize("sizes", MESHES, ids=name)
def test_spread_chunks_equal_one_pass(folder, mesh, oracle, sizes, small_pages):
    """Rows of unequal length: a first chunk by the ring, the next by passing queries, then tokens one by one."""
    from treering.infer.chunks import Chunks

    rows, logits = oracle
    engine = make_engine(folder, mesh, sizes, long=24, batch=len(rows), capacity=48)
    done = np.zeros(len(rows), int)
    state = engine.empty_state()
    # Second chunks begin at positions of any remainder, and some rows get nothing.
    for step, more in enumerate((LENGTHS, [5, 0, 1, 2, 3, 4, 0, 5], [1] * len(rows))):
        if step == 2:
            engine.chunks = Chunks()
        prompts = [row[n : n + k] for row, n, k in zip(rows, done, more, strict=True)]
        ours, state = engine.append(state, prompts)
        done += more
        for row in np.flatnonzero(more):
            expected = logits[row, done[row] - 1]
            assert np.abs(np.asarray(ours)[row] - expected).max() <= 1e-5 * np.abs(logits).max(), (step, row)
    assert np.array_equal(np.asarray(state.cache.lengths), done)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"context": 4}, marks=pytest.mark.long),
        pytest.param({"data": 2, "context": 2, "tensor": 2}, marks=pytest.mark.long),
    ],
    ids=name,
)
def test_requests_of_any_length_get_the_answers_that_they_get_alone(folder, mesh, alone, sizes):
    """Long chunks next to short ones, while other rows decode."""
    from treering.infer.scheduler import Scheduler

    wanted, results = alone
    scheduler = Scheduler(make_engine(folder, mesh, sizes, long=16, least=10, batch=4, capacity=64))
    made, reasons = test_scheduler.answers(scheduler, wanted)
    for index, (tokens, reason) in enumerate(results):
        assert made[index] == tokens and reasons[index] == reason, index


def test_pages_may_lie_anywhere(folder, mesh, small_pages):
    rows = token_rows(4, 60, seed=5)
    engine = make_engine(folder, mesh, {"context": 4}, long=32, batch=4, capacity=64)
    fresh, _ = engine.append(engine.empty_state(), rows)
    state = engine.empty_state()
    table = np.asarray(state.cache.table)
    shuffled = np.random.default_rng(0).permutation(table.size).astype(np.int32).reshape(table.shape)
    moved = jax.device_put(shuffled, state.cache.table.sharding)
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, table=moved))
    moved, _ = engine.append(state, rows)
    assert np.array_equal(np.asarray(fresh), np.asarray(moved))


def test_the_ring_sees_keys_as_the_cache_rounds_them(folder, mesh):
    """Within float noise, except on the prompts where that noise flips the rounding of a key."""
    from treering.infer.engine import Engine

    exact = make_engine(folder, mesh, {"context": 4}, long=32, batch=1, capacity=64)
    precision = dataclasses.replace(exact.precision, cache="bfloat16")
    engine = Engine(exact.model, exact.plan, precision, batch=1, capacity=64)
    engine.chunks = exact.chunks
    of_ring, of_unrounded = [], []
    for seed in range(8):
        prompt = np.array(token_rows(1, 32, seed=seed))
        arguments = [engine.put(x.astype(np.int32)) for x in (np.zeros(1), prompt, np.full(1, 32))]
        ring, pages = (
            np.asarray(engine.append_program(1, 32, fresh=fresh)(engine.model, engine.empty_state(), *arguments)[1])
            for fresh in (True, False)
        )
        unrounded, _ = exact.append(exact.empty_state(), prompt.tolist())
        scale = np.abs(pages).max()
        of_ring.append(np.abs(ring - pages).max() / scale)
        of_unrounded.append(np.abs(np.asarray(unrounded) - pages).max() / scale)
    assert np.median(of_ring) <= 1e-5 < min(of_unrounded)
    assert max(of_ring) < min(of_unrounded) / 10


# ---- What compiled programs do.

CHUNK = 8192


def chunk_program(mesh, sizes, *, spread, fresh=False, chunk=CHUNK, capacity=16384, loops: hlo.Loops = 1):
    """The program that appends a chunk to one row, from shapes alone."""
    from treering.configs.llama import LLAMA_3_2_1B_CUT
    from treering.configs.precision import Precision
    from treering.infer.chunks import Chunks
    from treering.infer.engine import Engine
    from treering.layers.parallel.sharding import Plan
    from treering.models.families import families

    plan = Plan(mesh(**sizes), "decode")
    shapes = eqx.filter_eval_shape(lambda: families()["llama"].init(LLAMA_3_2_1B_CUT, jax.random.key(0)))
    engine = Engine(plan.abstract(shapes, "parameters"), plan, Precision(), batch=1, capacity=capacity)
    if sizes == {"context": 8}:
        assert engine.chunks == Chunks(CHUNK, least=6656)
    engine.chunks = Chunks(chunk, least=1) if spread else Chunks()
    return engine, hlo.read(engine.append_program(1, chunk, fresh=fresh).compiled, loops=loops)


def test_context_divides_the_products_of_a_long_chunk(mesh):
    """Against a full row, whose pages each device reads an eighth of; two tiles of queries, to compile soon."""

    def flops(context, spread):
        filled = 16384 // (256 * context)
        _, program = chunk_program(
            mesh,
            {"context": context},
            spread=spread,
            chunk=512,
            loops=lambda source: filled if "cached_attention" in source else 1,
        )
        return program.product_flops()

    whole = flops(1, False)
    assert whole / 8 <= flops(8, True) <= 1.02 * whole / 8
    # A short chunk is on every device, and so are its products with the weights of queries, keys and values.
    assert flops(8, False) > 1.2 * whole / 8


@pytest.mark.parametrize("fresh", [True, False], ids=["ring", "queries"])
def test_a_long_chunk_gathers_weights_and_passes_keys_or_queries(mesh, fresh):
    engine, program = chunk_program(mesh, {"context": 8}, spread=True, fresh=fresh)
    layers = engine.model.config.layers
    weights = {"all-gather": 4 * layers}  # the output projection, gate, up and down
    others = {"reduce-scatter": 1, "all-reduce": 1}  # the embedding's lookup; the last token's hidden state
    messages = {"collective-permute": 7 * layers} if fresh else {"all-gather": 5 * layers, "all-to-all": layers}
    assert program.launches() == weights | others | messages
    # The cache is written in place, and its reading takes pages as they are.
    assert program.alias_bytes >= engine.cache_bytes_per_device()
    _, larger = chunk_program(mesh, {"context": 8}, spread=True, fresh=fresh, capacity=65536)
    assert larger.temporary_bytes <= program.temporary_bytes + 2**16
    # It pays, by the rule that chose its length.
    _, short = chunk_program(mesh, {"context": 8}, spread=False)
    assert program.received_bytes() < short.received_bytes()
