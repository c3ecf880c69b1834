"""What the compiled decode step of a 32-head model does, read from its program."""

import jax
import pytest

import hlo


def decode_program(mesh, sizes, *, unrolled, batch=1, capacity=16384, loops: hlo.Loops = 1):
    from treering.configs.llama import LLAMA_3_2_1B_CUT
    from treering.configs.precision import Precision
    from treering.infer.engine import Engine
    from treering.layers.parallel.sharding import Plan
    from treering.models.families import families

    plan = Plan(mesh(**sizes), "decode")
    family = families()["llama"]
    model = plan.init(lambda: family.init(LLAMA_3_2_1B_CUT, jax.random.key(0)), "parameters")
    if unrolled:
        model = model.unrolled()
    engine = Engine(model, plan, Precision(), batch=batch, capacity=capacity)
    return engine, hlo.read(engine.decode_program().compiled, loops=loops)


@pytest.mark.parametrize(
    ("sizes", "unrolled"),
    [
        pytest.param({"context": 8}, False, id="context8-stacked"),
        pytest.param({"context": 8}, True, id="context8-unrolled", marks=pytest.mark.long),
        pytest.param({"context": 4, "tensor": 2}, False, id="context4-tensor2-stacked", marks=pytest.mark.long),
        pytest.param({"context": 4, "tensor": 2}, True, id="context4-tensor2-unrolled"),
    ],
)
def test_one_all_to_all_and_two_all_reduces_a_layer(mesh, sizes, unrolled):
    """In one step (`loops=1`): in addition to those, one all-reduce for the embedding's lookup, one all-gather of pairs
    for the argmax."""
    engine, program = decode_program(mesh, sizes, unrolled=unrolled)
    config = engine.model.config
    assert program.launches() == {
        "all-to-all": config.layers,
        "all-reduce": 2 * config.layers + 1,
        "all-gather": 1,
    }
    gathered = [c for c in program.collectives if c.kind == "all-gather"]
    assert all(collective.received <= 2 * 4 * 8 for collective in gathered), "logits were gathered"
    # A layer's local cache: keys of one layer on one device.
    cache = engine.cache_bytes_per_device()
    local = cache // 2 // config.layers
    assert program.moves(at_least=local) == []
    assert program.alias_bytes >= cache, "the cache is not donated"
    # XLA on CPU copies a layer's weights out of the stack: one layer's share of them, never the cache.
    layer = sum(leaf.nbytes // 8 for leaf in jax.tree.leaves(engine.model.blocks)) // config.layers
    assert program.temporary_bytes < local + (0 if unrolled else 2 * layer)


@pytest.mark.long
def test_temporary_memory_does_not_grow_with_the_capacity(mesh):
    """Reading and writing go page by page: no program ever holds a layer's keys twice."""
    small, large = (
        decode_program(mesh, {"context": 8}, unrolled=True, capacity=capacity)[1].temporary_bytes
        for capacity in (4096, 65536)
    )
    assert large <= small + 2**16


@pytest.mark.parametrize(
    "context, unrolled, least, most",
    # XLA on CPU copies each layer's weights out of the stack, then multiplies by the copy: the reader sees both.
    [(1, True, 1, 1.15), (8, True, 1, 1.15), (8, False, 1.5, 2.5)],
    ids=["context1", "context8", "context8-stacked"],
)
def test_a_step_reads_each_weight_and_each_filled_page_once(mesh, context, unrolled, least, most):
    """In one step, with a quarter of the pages filled: bytes read over the bytes of weights and filled pages."""
    filled = 16 // context
    engine, program = decode_program(
        mesh,
        {"context": context},
        unrolled=unrolled,
        loops=lambda source: filled if "cached_attention" in source else 1,
    )
    arguments = program.parameters.values()
    weights = sum(x.bytes for x in arguments if x.source.startswith("kept"))
    cache = sum(x.bytes for x in arguments if ".pools" in x.source) * filled // engine.group_pages
    # In addition to the pages a few numbers, where a new token's slot is written.
    assert cache <= program.read_bytes(lambda path: ".pools" in path) <= 1.01 * cache
    read = program.read_bytes(lambda path: path.startswith("kept") or ".pools" in path)
    assert least <= read / (weights + cache) <= most
