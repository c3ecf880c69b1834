"""Ring and gather attention on simulated devices: the same numbers as dense attention, and what they send."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import hlo
from attention_cases import Case, check, covering_array, error, errors, with_gradients
from bench.attention import computed_pairs
from treering.layers.attention.dense import dense_attention, dense_partial
from treering.layers.attention.distributed import global_arrays
from treering.layers.attention.distributed.arguments import AttentionMesh, TokenData
from treering.layers.attention.distributed.gather import gather_attention, gather_partial
from treering.layers.attention.distributed.ring import ring_attention, ring_local, ring_partial
from treering.layers.attention.distributed.tree import tree_attention
from treering.layers.attention.kernels import tiles
from treering.layers.attention.local import LSE_NAME, OUT_NAME, local_attention
from treering.layers.attention.mask import Mask
from treering.layers.attention.order import from_order, to_order
from treering.layers.attention.partial import Partial

CASES = [case for case in covering_array() if case.algorithm != "local"]
LONG = [case for case in covering_array(seed=30, start=()) if case.algorithm != "local"]


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
def test_equals_dense_attention_small(mesh, x64):
    check(Case("ring", 4, length=16, order="zigzag"), mesh)


def test_every_pair_of_factors_is_covered():
    """The array is what its name says, and small."""
    from attention_cases import FACTORS, _pairs

    cases = covering_array()
    assert len(cases) <= 60 and all(case.is_possible() for case in cases)
    covered = {pair for case in cases for pair in _pairs(case)}
    for a, b in (("p", "length"), ("heads", "head_dim"), ("length", "mask"), ("p", "dtype"), ("batch", "tile")):
        for x in FACTORS[a]:
            for y in FACTORS[b]:
                assert ((a, x), (b, y)) in covered, (a, x, b, y)


def arrays(batch=1, seq=64, heads=4, kv_heads=2, head_dim=8, dtype: str = "float64", seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(rng.normal(size=(batch, seq, n, head_dim)), dtype) for n in (heads, kv_heads, kv_heads, heads)
    )


def test_large_scores(mesh, x64, monkeypatch):
    """Scores to about 500 over eight shards: errors in proportion."""
    limit_tiles(monkeypatch, 16)
    check(Case("ring", 8, length=128, head_dim=64, mask="data", dtype="float32"), mesh, scales=(1.0, 100.0))


@pytest.mark.parametrize("attend", [ring_partial, gather_partial], ids=["ring", "gather"])
def test_bfloat16_errors_do_not_grow_with_the_axis(attend, mesh, x64):
    """Eight devices within 1.1 times one, in every output and gradient."""
    q, k, v, d_out = arrays(seq=512, heads=8, head_dim=64, dtype="bfloat16")
    d_lse = jnp.asarray(np.random.default_rng(2).normal(size=q.shape[:3]), jnp.float32)
    sizes = {}
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), (q, k, v, Partial(d_out, d_lse)))
    want = jax.jit(lambda q, k, v, d: with_gradients(lambda q, k, v, _: dense_partial(q, k, v), d, q, k, v, None))(
        *wide
    )
    for p in (1, 8):

        def subject(q, k, v, _):
            q, k, v = (to_order(x, "zigzag", p) for x in (q, k, v))  # noqa: B023
            partial = attend(q, k, v, on=mesh(context=p), tokens=TokenData(order="zigzag"))  # noqa: B023
            return jax.tree.map(lambda x: from_order(x, "zigzag", p), partial)  # noqa: B023

        got = jax.jit(lambda *args: with_gradients(subject, Partial(d_out, d_lse), *args))(q, k, v, None)  # noqa: B023
        sizes[p] = errors(got, want, mean_square=True)
    for name, size in sizes[8].items():
        assert size <= 3e-3 and size <= 1.1 * sizes[1][name] + 1e-7, (name, size, sizes[1][name])


@functools.cache
def _four_devices():
    return Mesh(np.array(jax.devices()[:4]), ("context",), axis_types=(AxisType.Auto,))


def _with_data(attend):
    def run(q, k, v, d_out, positions, segments):
        def both(q, k, v):
            return attend(q, k, v, positions, segments)

        partial, pull = jax.vjp(both, q, k, v)
        return partial, pull(Partial(d_out, jnp.sin(d_out[..., 0])))

    return jax.jit(run)


_MASK = Mask(window=17)
_RING = _with_data(
    lambda q, k, v, positions, segments: ring_partial(
        q, k, v, on=_four_devices(), mask=_MASK, tokens=TokenData(positions=positions, segments=segments)
    )
)
_DENSE = _with_data(
    lambda q, k, v, positions, segments: dense_partial(
        q,
        k,
        v,
        mask=_MASK,
        q_positions=positions,
        kv_positions=positions,
        q_segments=segments,
        kv_segments=segments,
    )
)


@given(
    st.lists(st.integers(-1, 40), min_size=32, max_size=32),
    st.lists(st.integers(0, 2), min_size=32, max_size=32),
)
@settings(max_examples=25)
def test_any_positions_and_segments(positions, segments):
    """One compiled ring; what positions and segments do, empty shards among it, is data."""
    with jax.enable_x64(True):
        data = jnp.array([positions]), jnp.array([segments])
        got, want = _RING(*arrays(seq=32), *data), _DENSE(*arrays(seq=32), *data)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert error(x, y) < 1e-13 or np.abs(np.asarray(x) - np.asarray(y)).max() < 1e-14


def test_a_late_token_changes_nothing_before_it(mesh):
    """And the first token changes the last one's output, on the other side of the ring."""
    q, k, v, _ = arrays(dtype="float32")
    attend = jax.jit(lambda q, k, v: ring_attention(q, k, v, on=mesh(context=8), tokens=TokenData(order="zigzag")))
    out = attend(*(to_order(x, "zigzag", 8) for x in (q, k, v)))
    for token in (0, 63):
        moved = attend(*(to_order(x, "zigzag", 8) for x in (q, k.at[:, token].add(1.0), v.at[:, token].add(1.0))))
        changed = np.asarray(from_order(moved != out, "zigzag", 8)).any((0, 2, 3))
        assert changed.tolist() == [index >= token for index in range(64)]


def lowered(function, mesh_, *shapes, dtype: str = "float32"):
    sharding = NamedSharding(mesh_, PartitionSpec(None, "context"))
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes))


def compiled(function, mesh_, *shapes) -> hlo.Program:
    return hlo.read(lowered(function, mesh_, *shapes).compile())


def layers_of(attend, count: int, policy=None):
    """The gradient of `count` layers in a scan, rematerialised, as a model runs attention."""

    def layer(x, _):
        # q, k and v differ, as projections make them.
        return x + attend(x, 2 * x[:, :, ::2], x[:, :, 1::2]), None

    def loss(x):
        body = jax.checkpoint(layer, prevent_cse=False, policy=policy)
        return jnp.sum(jax.lax.scan(body, x, None, length=count)[0].astype(jnp.float32))

    return jax.grad(loss)


SAVED = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_a_ring_sends_one_less_than_its_devices(p, mesh):
    here = mesh(context=p)
    b, t, h, d = 1, 32, 2, 8
    program = compiled(
        lambda q, k, v: ring_attention(q, k, v, on=here, tokens=TokenData(order="zigzag")),
        here,
        *[(b, t * p, n, d) for n in (4, h, h)],
    )
    assert program.launches() == ({"collective-permute": p - 1} if p > 1 else {})
    assert program.received_bytes() == (p - 1) * 2 * b * t * h * d * 4


@pytest.mark.parametrize(("p", "documents"), [(2, False), (4, False), pytest.param(4, True, marks=pytest.mark.long)])
def test_a_layer_sends_3p_minus_2_and_its_ring_runs_forward_once(p, documents, mesh):
    """Under the policy nothing is sent twice."""
    here = mesh(context=p)
    b, t, h, d, count = 1, 32, 2, 8, 5
    segments = jnp.ones((b, t * p), jnp.int32) if documents else None

    def attend(q, k, v):
        return ring_attention(q, k, v, on=here, tokens=TokenData(segments=segments, order="zigzag"))

    program = compiled(layers_of(attend, count, SAVED), here, (b, t * p, 2 * h, d))
    assert program.launches()["collective-permute"] == count * (3 * p - 2)
    sent = [x for x in program.collectives if x.kind == "collective-permute"]
    assert sum(x.received * (x.count or 0) for x in sent) == count * (3 * p - 2) * 2 * b * t * h * d * 4


@pytest.mark.parametrize(
    ("attend", "collectives"),
    [(ring_attention, "collective_permute"), (gather_attention, "all_gather|reduce_scatter")],
    ids=["ring", "gather"],
)
def test_only_gradients_travel_in_float32(attend, collectives, mesh):
    """Keys and values as they are. Read before XLA's CPU backend, which sends every bfloat16 as float32."""
    here = mesh(context=2)

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v, on=here).astype(jnp.float32))

    text = lowered(jax.grad(loss, (0, 1, 2)), here, *[(1, 64, n, 8) for n in (4, 2, 2)], dtype="bfloat16").as_text()
    types = re.findall(rf'stablehlo\.(?:{collectives})".*?-> tensor<[\dx]*(\w+?)>', text, re.DOTALL)
    # The keys forward, the keys backward, and their gradients.
    assert sorted(types) == ["bf16", "bf16"] + ["f32"] * (2 if attend is ring_attention else 1)


def test_without_the_policy_the_ring_would_run_again(mesh):
    """What the names in the forward rule are for. The second forward and the backward share their first send."""
    here, p, count = mesh(context=4), 4, 5
    run = layers_of(lambda q, k, v: ring_attention(q, k, v, on=here, tokens=TokenData(order="zigzag")), count)
    assert compiled(run, here, (1, 128, 4, 8)).launches()["collective-permute"] == count * 4 * (p - 1)


def test_gather_launches(mesh):
    """One all-gather forward, one more backward, one reduce-scatter in float32."""
    here, p, count = mesh(context=4), 4, 5
    b, t, h, d = 1, 32, 2, 8

    def attend(q, k, v):
        return gather_attention(q, k, v, on=here, tokens=TokenData(order="zigzag"))

    forward = compiled(attend, here, *[(b, t * p, n, d) for n in (4, h, h)])
    message = (p - 1) * 2 * b * t * h * d
    assert forward.launches() == {"all-gather": 1} and forward.received_bytes() == message * 4
    program = compiled(layers_of(attend, count, SAVED), here, (b, t * p, 2 * h, d))
    launches = program.launches()
    assert launches["all-gather"] == 2 * count and launches.get("reduce-scatter", 0) == count
    assert program.received_bytes() == count * message * 3 * 4


@pytest.mark.parametrize("documents", [False, pytest.param(True, marks=pytest.mark.long)], ids=["zigzag", "documents"])
def test_temporary_memory_is_flat_in_the_axis(documents, mesh):
    """At a fixed number of tokens per device, forward and backward."""
    sizes = []
    for p in (3, 8):
        here = mesh(context=p)
        segments = jnp.ones((1, 256 * p), jnp.int32) if documents else None

        def loss(q, k, v):
            out = ring_attention(q, k, v, on=here, tokens=TokenData(segments=segments, order="zigzag"))  # noqa: B023
            return jnp.sum(out.astype(jnp.float32))

        shapes = [(1, 256 * p, n, 64) for n in (4, 2, 2)]
        sizes.append(compiled(jax.grad(loss, (0, 1, 2)), here, *shapes).temporary_bytes)
    assert sizes[1] <= 1.02 * sizes[0], sizes


def test_zigzag_is_balanced(mesh):
    """Busiest over mean: 1 for causal zigzag, where contiguous order has nearly 2."""
    here, share = mesh(context=8), 512
    whole = share * 8
    for branch_free in (False, True):
        zigzag = computed_pairs(here, "zigzag", Mask(), share, branch_free=branch_free)
        assert zigzag.max() / zigzag.mean() <= 1.01
        assert whole * (whole + 1) // 2 <= zigzag.sum() <= 1.1 * whole * (whole + 1) // 2
    contiguous = computed_pairs(here, "contiguous", Mask(), share)
    assert contiguous.max() / contiguous.mean() > 1.7
    assert zigzag.sum() >= contiguous.sum()


def test_documents_and_windows_are_skipped(mesh):
    """Blocks that nothing is seen in are not computed."""
    here, share = mesh(context=8), 512
    whole = share * 8
    causal = computed_pairs(here, "zigzag", Mask(), share).sum()
    documents = to_order((1 + np.arange(whole) // (whole // 4))[None].astype(np.int32), "zigzag", 8)
    assert computed_pairs(here, "zigzag", Mask(), share, jnp.asarray(documents)).sum() < 0.4 * causal
    assert computed_pairs(here, "contiguous", Mask(window=256), share).sum() < 0.3 * causal


@pytest.mark.parametrize("attend", [ring_attention, gather_attention], ids=["ring", "gather"])
def test_errors_name_dims_and_sizes(attend, mesh, unchecked):
    q, k, v, _ = arrays(batch=2, heads=4, kv_heads=2, dtype="float32")
    here = mesh(context=4, tensor=2)
    with pytest.raises(ValueError, match=r"kv_heads 3 does not divide heads 4.*1, 2, 4"):
        attend(q, *arrays(batch=2, kv_heads=3, dtype="float32")[1:3], on=here)
    with pytest.raises(ValueError, match=r"positions has shape \(64,\).*\[batch seq\], here \(2, 64\)"):
        attend(q, k, v, on=here, tokens=TokenData(positions=jnp.arange(64)))
    with pytest.raises(ValueError, match=r"segments has shape \(2, 63\)"):
        attend(q, k, v, on=here, tokens=TokenData(segments=jnp.ones((2, 63), jnp.int32)))
    with pytest.raises(ValueError, match=r"axis 'sequence': the mesh has data, fsdp, context, tensor"):
        attend(q, k, v, on=AttentionMesh(here, axis="sequence"))
    with pytest.raises(ValueError, match=r"batch_axes \('rows',\): the mesh has no axis 'rows'"):
        attend(q, k, v, on=AttentionMesh(here, batch_axes=("rows",)))
    for same in ("data", ("data", "data")):
        with pytest.raises(ValueError, match=r"batch_axes .*it must be a tuple of different axes, of data, fsdp"):
            attend(q, k, v, on=AttentionMesh(here, batch_axes=same))
    with pytest.raises(ValueError, match=r"head_axes \('context',\): axis 'context' shards another dim already"):
        attend(q, k, v, on=AttentionMesh(here, head_axes=("context",)))
    with pytest.raises(ValueError, match=r"batch 2 over mesh axes data, fsdp of size 8.*1, 2"):
        attend(q, k, v, on=mesh(data=2, fsdp=4))
    with pytest.raises(ValueError, match=r"kv_heads 2 over mesh axes tensor of size 4.*1, 2; the context axis"):
        attend(q, k, v, on=mesh(tensor=4))
    with pytest.raises(ValueError, match=r"seq 60 in zigzag order over 4 devices.*multiple of 8.*56 and 64"):
        attend(q[:, :60], k[:, :60], v[:, :60], on=here, tokens=TokenData(order="zigzag"))


def test_axes_that_the_mesh_lacks_are_only_an_error_when_named():
    """A drop-in mesh with one axis works with the defaults."""
    q, k, v, _ = arrays(dtype="float32")
    out = jax.jit(lambda q, k, v: ring_attention(q, k, v, on=_four_devices()))(q, k, v)
    assert error(out, dense_partial(q, k, v).out) < 2e-6


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
@pytest.mark.parametrize("attend", [ring_attention, gather_attention, tree_attention], ids=["ring", "gather", "tree"])
def test_outside_of_jit(attend, types):
    """Arrays on one device, any or a given one: values and gradients, by programs that are compiled once."""
    here = jax.make_mesh((4,), ("context",), axis_types=(types,))
    q, k, v, _ = arrays(seq=29, dtype="float32")

    def loss(attend, q, k, v):
        return jnp.sum(jnp.sin(attend(q, k, v)))

    want = jax.jit(jax.value_and_grad(functools.partial(loss, dense_attention), (0, 1, 2)))(q, k, v)
    subject = functools.partial(loss, functools.partial(attend, on=here))
    last = jax.devices()[7]
    before = global_arrays._compiled._cache_size()
    assert error(attend(q, k, v, on=here), dense_partial(q, k, v).out) < 2e-6
    compiled = global_arrays._compiled._cache_size()
    assert compiled <= before + 1
    for given_ in ((q, k, v), jax.device_put((q, k, v), last)):
        got = jax.value_and_grad(subject, (0, 1, 2))(*given_)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert error(x, y) < 5e-6
        attend(*given_, on=here)
    # Gradients of committed arrays are where these are.
    assert all(x.devices() == {last} for x in got[1])
    assert global_arrays._compiled._cache_size() == compiled


def test_a_mask_that_is_not_one_names_what_to_pass(unchecked):
    q, k, v, _ = arrays(dtype="float32")
    over = dict(on=_four_devices())
    for attend, where in (
        (dense_partial, {}),
        (local_attention, {}),
        (ring_attention, over),
        (gather_attention, over),
        (tree_attention, over),
    ):
        with pytest.raises(ValueError, match=r"mask None: it must be a Mask, such as Mask\(\) \(causal\)"):
            attend(q, k, v, mask=None, **where)
        with pytest.raises(ValueError, match=r"mask is an array of shape \(64, 64\): it must be a Mask.*segments"):
            attend(q, k, v, mask=jnp.ones((64, 64), bool), **where)


def test_inside_a_shard_map_of_the_callers(mesh, x64):
    """`ring_local` with a parameter shared by all devices: its gradient is the sum over them."""
    q, k, v, _ = arrays(heads=2)
    here = mesh(context=4)
    spec = PartitionSpec(None, "context")

    def sharded(scale, q, k, v):
        def on_device(scale, q, k, v):
            return ring_local(q * scale, k * scale, v, axis="context").out

        return jax.shard_map(on_device, mesh=here, in_specs=(PartitionSpec(), spec, spec, spec), out_specs=spec)(
            scale, q, k, v
        )

    def whole(scale, q, k, v):
        return dense_partial(q * scale, k * scale, v).out

    def gradient(attend):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(attend(*args))), (0, 1, 2, 3)))

    scale = jnp.asarray(1.3)
    for x, y in zip(gradient(sharded)(scale, q, k, v), gradient(whole)(scale, q, k, v), strict=True):
        assert error(x, y) < 1e-13


@pytest.mark.parametrize("seq", [64, 61])
def test_explicit_axes(seq):
    """A mesh as `jax.make_mesh` makes it by default, and arrays that are elsewhere."""
    here = jax.make_mesh((2, 4), ("data", "context"))
    assert AxisType.Explicit in here.axis_types
    q, k, v, _ = arrays(batch=2, seq=seq, dtype="float32")
    out = jax.jit(lambda q, k, v: ring_attention(q, k, v, on=here))(q, k, v)
    assert error(out, dense_partial(q, k, v).out) < 2e-6
