"""Tree attention against dense float64 attention, its messages, and the choice of scheme."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import hlo
from treering.layers.attention.dense import dense_partial
from treering.layers.attention.distributed.arguments import AttentionMesh, TokenData
from treering.layers.attention.distributed.tree import tree_attention, tree_combine, tree_partial
from treering.layers.attention.distributed.tree_schemes import HEAD_SHARDED, SCHEMES, check_scheme, choose_scheme
from treering.layers.attention.mask import Mask
from treering.layers.attention.partial import Partial, merge_stacked, statistics_dtype

TOLERANCE = {"float64": (1e-13, 1e-13), "float32": (2e-6, 5e-6)}
"""Of values and of gradients, at scores up to 20."""


@dataclass(frozen=True)
class Case:
    """One compiled shape."""

    p: int
    scheme: Any = "auto"
    inner: int | None = None
    batch: int = 1
    seq: int = 1
    kv_seq: int = 31
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 8
    mask: Mask = Mask()
    data: str = "none"
    """Which positions and segments are given: none, empty (empty slots, an empty shard, an empty row), documents."""
    axes: tuple[tuple[str, int], ...] = ()
    head_sharded: bool = True

    def __str__(self) -> str:
        heads, kv_heads = self.heads
        shape = f"p{self.p}-{self.scheme}-{self.batch}x{self.seq}x{self.kv_seq}-{heads}/{kv_heads}x{self.head_dim}"
        return shape + "".join(f"-{name}{size}" for name, size in self.axes) + f"-{self.data}"


def arrays(case: Case, dtype, seed: int = 0, scale: float = 1.0) -> Any:
    """q, k, v of the dtype, and the keyword arguments of positions and segments."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = case.heads
    q = rng.normal(size=(case.batch, case.seq, heads, case.head_dim)) * scale
    k, v = rng.normal(size=(2, case.batch, case.kv_seq, kv_heads, case.head_dim))
    data: dict[str, Any] = {}
    if case.data != "none":
        # In no order: nothing may depend on where a token is.
        positions = np.stack([rng.permutation(case.kv_seq) for _ in range(case.batch)])
        q_positions = np.stack([np.sort(rng.permutation(case.kv_seq)[: case.seq]) for _ in range(case.batch)])
        if case.data == "empty":
            share = -(-case.kv_seq // case.p)
            positions[0, share * (case.p // 2) : share * (case.p // 2 + 1)] = -1
            positions[rng.random(positions.shape) < 0.3] = -1
            positions[-1] = -1 if case.batch > 1 else positions[-1]
        if case.data == "documents":
            data["segments"] = rng.integers(0, 4, (case.batch, case.kv_seq))
            data["q_segments"] = rng.integers(0, 4, (case.batch, case.seq))
        data |= {"positions": positions, "q_positions": q_positions}
    return [jnp.asarray(x, dtype) for x in (q, k, v)], {name: jnp.asarray(x, jnp.int32) for name, x in data.items()}


@functools.cache
def oracle(mask: Mask):
    return jax.jit(lambda *args, **data: dense_partial(*args, mask=mask, **data))


def dense(case: Case, q, k, v, data) -> Partial:
    """The oracle, in float64, of queries that are last where nothing else is said."""
    data = {name if name.startswith("q_") else f"kv_{name}": x for name, x in data.items()}
    if not data:
        positions = jnp.broadcast_to(jnp.arange(case.kv_seq), (case.batch, case.kv_seq))
        data = {"q_positions": positions[:, case.kv_seq - case.seq :], "kv_positions": positions}
    return oracle(case.mask)(*(x.astype(jnp.float64) for x in (q, k, v)), **data)


def with_gradients(attend, cotangent: Partial, q, k, v, data):
    """out and lse, and the gradients of q, k, v for cotangents of both; those of empty rows count too."""
    partial, pull = jax.vjp(lambda q, k, v: attend(q, k, v, data), q, k, v)
    return partial, pull(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangent, partial))


def error(got, want) -> float:
    """max |difference| / max |want|; equal infinities differ by nothing."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert not np.isnan(got).any() and (np.isinf(got) == np.isinf(want)).all()
    got, want = got[np.isfinite(want)], want[np.isfinite(want)]
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-300)) if want.size else 0.0


def by_side(data: dict[str, Any]) -> dict[str, TokenData]:
    """Positions and segments of keys and queries, as `tree_attention` takes them."""
    keys = {name: x for name, x in data.items() if not name.startswith("q_")}
    queries = {name.removeprefix("q_"): x for name, x in data.items() if name.startswith("q_")}
    return {"tokens": TokenData(**keys), "q_tokens": TokenData(**queries)}


def check(mesh, case: Case, dtype: str, scale: float = 1.0, slack: float = 1.0) -> None:
    """Values and gradients of a case against the oracle."""
    (q, k, v), data = arrays(case, dtype, scale=scale)
    rng = np.random.default_rng(1)
    cotangent = Partial(jnp.asarray(rng.normal(size=q.shape)), jnp.asarray(rng.normal(size=q.shape[:3])))
    where: Any = dict(case.axes)
    here = mesh(context=case.p, **where)

    def attend(q, k, v, data):
        return tree_partial(
            q,
            k,
            v,
            on=here,
            mask=case.mask,
            scheme=case.scheme,
            inner=case.inner,
            head_sharded=case.head_sharded,
            **by_side(data),
        )

    got = jax.jit(lambda *args: with_gradients(attend, cotangent, *args))(q, k, v, data)
    want = jax.jit(lambda *args: with_gradients(functools.partial(dense, case), cotangent, *args))(
        *(x.astype(jnp.float64) for x in (q, k, v)), data
    )
    value, gradient = TOLERANCE[dtype]
    assert got[0].out.dtype == statistics_dtype(jnp.dtype(dtype))
    for name, x, y in (("out", got[0].out, want[0].out), ("lse", got[0].lse, want[0].lse)):
        assert error(x, y) < value * slack, name
    for name, x, y in zip(("dq", "dk", "dv"), got[1], want[1], strict=True):
        assert error(x, y) < gradient * slack, name


FIXED = [
    Case(1),
    Case(2, batch=2, seq=3, head_dim=40),
    Case(3, kv_seq=97, heads=(5, 5), head_sharded=False, data="empty", batch=2),
    Case(4, "two_level", 2, batch=3, seq=3, data="documents"),
    Case(4, axes=(("tensor", 2),), batch=2, data="empty", mask=Mask(window=5, softcap=3.0)),
    Case(5, kv_seq=3, heads=(5, 1), head_dim=59, batch=2),
    Case(8, "all_to_all", heads=(16, 8), kv_seq=128, seq=128, head_dim=16),
    Case(8, "all_gather", kv_seq=5, batch=2, data="empty", mask=Mask(softcap=2.0)),
    Case(8, "two_level_gather", 4, heads=(5, 5), seq=3, data="empty", batch=2, mask=Mask(window=20)),
    Case(2, axes=(("data", 2), ("tensor", 2)), batch=2, seq=3, mask=Mask(causal=False, scale=0.5), data="empty"),
]
SWEEP = [
    Case(p, scheme, inner, batch, seq, kv_seq, heads, head_dim, mask, data)
    for p, inner in ((2, None), (3, None), (4, 2), (5, None), (8, 2))
    for scheme, heads in (("auto", (40, 8)), ("all_gather", (8, 8)), ("two_level_gather", (8, 1)))
    for batch, seq, kv_seq, head_dim, mask, data in (
        (3, 1, 384, 64, Mask(), "none"),
        (2, 31, 1024, 128, Mask(window=20), "documents"),
        (8, 3, 400, 32, Mask(softcap=5.0), "empty"),
    )
]


@pytest.mark.parametrize("case", FIXED, ids=str)
def test_against_dense_float64(mesh, x64, case):
    check(mesh, case, "float64")


@pytest.mark.parametrize("case", [FIXED[i] for i in (3, 8)], ids=str)
def test_against_dense_float32(mesh, case):
    with jax.enable_x64(True):
        check(mesh, case, "float32")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_sweep_against_dense(mesh, x64, case, dtype):
    check(mesh, case, dtype)


@pytest.mark.parametrize("scale", [25.0, 120.0])
def test_large_scores(mesh, x64, scale):
    """Scores to +-500 and +-2500: float32 errors grow as the scores do, and nothing overflows."""
    case = Case(8, "all_to_all", batch=2, seq=3, kv_seq=96, data="empty")
    (q, k, _), _ = arrays(case, "float64", scale=scale)
    largest = float(jnp.abs(jnp.einsum("bqgd,bkd->bgqk", q[:, :, :4], k[:, :, 0])).max()) / 8**0.5
    assert largest > 4 * scale
    check(mesh, case, "float32", scale, slack=largest / 20)


def bfloat16_rms(mesh, p, scheme, inner=None, wire_dtype=None) -> float:
    """rms of the error over rms of the exact result, values of mean zero: parts that nearly cancel."""
    case = Case(p, scheme, inner, 2, 4, 1024, (8, 2), 64)
    (q, k, v), data = arrays(case, jnp.bfloat16)
    here = mesh(context=p)
    got = jax.jit(lambda *args: tree_attention(*args, on=here, scheme=scheme, inner=inner, wire_dtype=wire_dtype))(
        q, k, v
    )
    assert got.dtype == jnp.bfloat16
    want = dense(case, q, k, v, data).out
    return float(jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2)))


def test_bfloat16_error_does_not_grow_with_devices(mesh, x64):
    one = bfloat16_rms(mesh, 1, "all_gather")
    assert one < 3e-3
    for p, scheme, inner in ((8, "all_to_all", None), (8, "two_level", 4)):
        assert bfloat16_rms(mesh, p, scheme, inner) < min(1.1 * one, 3e-3)
    assert 1.1 * one < bfloat16_rms(mesh, 8, "all_to_all", wire_dtype=jnp.bfloat16) < 1.5 * one


def test_equal_scores_sum_exactly_in_bfloat16(mesh):
    """4096 equal keys with value 1: out 1, lse log 4096 (a bfloat16 sum would stop at 256)."""
    q, k = jnp.zeros((1, 1, 8, 16), jnp.bfloat16), jnp.ones((1, 4096, 2, 16), jnp.bfloat16)
    got = jax.jit(lambda q, k, v: tree_partial(q, k, v, on=mesh(context=8)))(q, k, k)
    np.testing.assert_allclose(got.out, 1, rtol=2**-8)
    np.testing.assert_allclose(got.lse, np.log(4096), rtol=1e-6)


def random_partial(p: int, heads: int, dtype, *, batch=2, seq=3, head_dim=8) -> Partial:
    """Parts of `p` devices, side by side in the batch; some rows are empty on one device, one on all."""
    rng = np.random.default_rng(p)
    out = rng.normal(size=(p, batch, seq, heads, head_dim))
    lse = rng.normal(size=(p, batch, seq, heads)) * 5
    lse[0, 0] = lse[:, 1, 0] = -np.inf
    out[lse == -np.inf] = 0
    return Partial(
        jnp.asarray(out.reshape(-1, *out.shape[2:]), dtype),
        jnp.asarray(lse.reshape(-1, *lse.shape[2:]), statistics_dtype(jnp.dtype(dtype))),
    )


def combine(mesh, p: int, scheme, inner=None, wire_dtype=None):
    """`tree_combine` as a function of all devices' parts."""
    heads = PartitionSpec(None, None, "context") if scheme in HEAD_SHARDED else PartitionSpec()
    return jax.jit(
        jax.shard_map(
            lambda part: tree_combine(part, "context", scheme=scheme, inner=inner, wire_dtype=wire_dtype),
            mesh=mesh(context=p),
            in_specs=PartitionSpec("context"),
            out_specs=heads,
        )
    )


SIZES = [(1, None), (2, None), (3, None), (4, 2), (5, None), (8, 2), (8, 4)]
FITTING = [
    (p, scheme, inner)
    for p, inner in SIZES
    for scheme in SCHEMES
    if not (scheme == "two_level" and inner is None)
    if not (scheme in ("all_to_all", "all_gather") and inner == 2 and p == 8)
]


def message_bytes(p: int, scheme: str, inner: int | None, rows: int, heads: int, head_dim: int, itemsize: int):
    """The bytes that each scheme delivers to a device (DESIGN's table), for float32 log-sums."""
    message = rows * heads * (head_dim * itemsize + 4)
    inner = p if inner is None else inner
    outer = p // inner
    padded = rows * (heads + -heads % inner) * (head_dim * itemsize + 4)
    return {
        "all_to_all": message * (p - 1) // p,
        "all_gather": message * (p - 1),
        "two_level": message * (inner - 1) // inner + message // inner * (outer - 1) // outer,
        "two_level_gather": padded * (inner - 1) // inner + padded // inner * (p - 1),
    }[scheme]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("p, scheme, inner", FITTING)
def test_launches_and_bytes(mesh, p, scheme, inner, dtype):
    heads = 2 * p if scheme in HEAD_SHARDED else 2 * p + 1
    part = random_partial(p, heads, dtype)
    program = hlo.read(combine(mesh, p, scheme, inner).lower(part).compile())
    launches = {
        "all_to_all": {"all-to-all": 1},
        "all_gather": {"all-gather": 1},
        "two_level": {"all-to-all": 2},
        "two_level_gather": {"all-to-all": 1, "all-gather": 1},
    }
    assert program.launches() == (launches[scheme] if p > 1 else {})
    assert program.received_bytes() == message_bytes(p, scheme, inner, 2 * 3, heads, 8, part.out.dtype.itemsize)


@pytest.mark.parametrize("p, scheme, inner", [x for x in FITTING if x[0] in (1, 3) or x[::2] == (8, 4)])
def test_combine_equals_the_merge_of_all_parts(mesh, x64, p, scheme, inner):
    part = random_partial(p, 2 * p, jnp.float64)

    def merged(part):
        return merge_stacked(jax.tree.map(lambda x: x.reshape(p, -1, *x.shape[1:]), part))

    def loss(joined):
        return jnp.sum(jnp.sin(joined.out)) + jnp.sum(jnp.where(joined.lse > -jnp.inf, joined.lse, 0) ** 2)

    got, want = combine(mesh, p, scheme, inner)(part), jax.jit(merged)(part)
    assert error(got.out, want.out) < 1e-14 and error(got.lse, want.lse) < 1e-14
    got = jax.jit(jax.grad(lambda part: loss(combine(mesh, p, scheme, inner)(part))))(part)
    want = jax.jit(jax.grad(lambda part: loss(merged(part))))(part)
    # The one device of p = 1 passes an empty row on as it is, with the gradient of what came.
    some = np.asarray(part.lse > -jnp.inf)
    assert error(got.out[some], want.out[some]) < 1e-14 and error(got.lse, want.lse) < 1e-14


@pytest.mark.parametrize(
    "p, scheme, inner", [(3, "all_gather", None), (8, "all_gather", None), (8, "two_level_gather", 4)]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_replicated_results_are_equal_to_the_last_bit(mesh, p, scheme, inner, dtype):
    joined = combine(mesh, p, scheme, inner)(random_partial(p, 6, dtype))
    for x in jax.tree.leaves(joined):
        first, *others = (np.asarray(shard.data) for shard in x.addressable_shards)
        assert len(others) == p - 1 and first.shape == x.shape
        assert all((first == other).all() for other in others)


@pytest.mark.parametrize("scheme, inner", [("all_to_all", None), ("all_gather", None), ("two_level", 2)])
def test_log_sums_travel_in_full_next_to_bfloat16(mesh, scheme, inner):
    """Any float32 bits: as two bfloat16 numbers some would be NaN, or too small to keep."""
    bits = np.random.default_rng(0).integers(0, 2**32, (2, 64, 8), dtype=np.uint32)
    lse = bits.view(np.float32)
    lse = np.where(np.isfinite(lse) & (np.abs(lse) > 1e-30), lse, np.float32(1.5))
    # One device has keys: the whole is its part.
    parts = np.full((4, *lse.shape), -np.inf, np.float32)
    parts[2] = lse
    part = Partial(jnp.zeros((8, 64, 8, 4)), jnp.asarray(parts.reshape(8, 64, 8)))
    joined = combine(mesh, 4, scheme, inner, jnp.bfloat16)(part)
    assert (np.asarray(joined.lse).view(np.uint32) == lse.view(np.uint32)).all()


def test_wire_dtype_rounds_what_travels_and_nothing_else(mesh):
    part = random_partial(4, 8, jnp.float32)
    wide, narrow = combine(mesh, 4, "all_to_all")(part), combine(mesh, 4, "all_to_all", wire_dtype=jnp.bfloat16)
    got = narrow(part)
    assert got.out.dtype == got.lse.dtype == jnp.float32
    assert (np.asarray(got.lse) == np.asarray(wide.lse)).all()
    assert 1e-4 < error(got.out, wide.out) < 2**-8
    half = hlo.read(narrow.lower(part).compile()).received_bytes()
    assert half == 3 / 4 * part.lse.size / 4 * (8 * 2 + 4)


@pytest.mark.smoke
def test_one_message_in_a_decoded_step_and_its_gradient(mesh):
    case = Case(8, "all_to_all", batch=2, kv_seq=96, data="empty")
    (q, k, v), data = arrays(case, jnp.float32)
    here = mesh(context=8)
    attend = jax.jit(lambda q, k, v: tree_attention(q, k, v, on=here, scheme=case.scheme, **by_side(data)))
    assert hlo.read(attend.lower(q, k, v).compile()).launches() == {"all-to-all": 1}
    gradient = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v).sum(), (0, 1, 2)))
    # Back goes one message, and the queries' gradients are summed over the devices that all hold them.
    assert hlo.read(gradient.lower(q, k, v).compile()).launches() == {"all-to-all": 2, "all-reduce": 1}


@pytest.mark.smoke
def test_heads_come_out_as_the_output_projection_takes_them(mesh, x64):
    case = Case(4, batch=2, axes=(("tensor", 2),))
    (q, k, v), data = arrays(case, jnp.float32)
    out = jax.jit(lambda q, k, v: tree_attention(q, k, v, on=mesh(context=4, tensor=2)))(q, k, v)
    want = jax.sharding.NamedSharding(mesh(context=4, tensor=2), PartitionSpec(None, None, ("tensor", "context")))
    assert out.sharding.is_equivalent_to(want, 4)
    assert error(out, dense(case, q, k, v, data).out) < 2e-6


def test_batch_and_heads_stay_where_they_are(mesh):
    """Rows over data and fsdp and heads over tensor add no message."""
    (q, k, v), _ = arrays(Case(2, batch=4, kv_seq=64), jnp.float32)
    here = mesh(data=2, context=2, tensor=2)

    def place(x, *spec):
        return jax.device_put(x, jax.sharding.NamedSharding(here, PartitionSpec(*spec)))

    args = (
        place(q, "data", None, "tensor"),
        place(k, "data", "context", "tensor"),
        place(v, "data", "context", "tensor"),
    )
    program = jax.jit(lambda q, k, v: tree_attention(q, k, v, on=here)).lower(*args)
    assert hlo.read(program.compile()).launches() == {"all-to-all": 1}


def test_a_query_that_is_not_the_newest(mesh, x64):
    case = Case(4, batch=2, kv_seq=32)
    (q, k, v), _ = arrays(case, jnp.float64)
    at = jnp.asarray([[0], [17]], jnp.int32)
    got = jax.jit(lambda q, k, v: tree_attention(q, k, v, on=mesh(context=4), q_tokens=TokenData(positions=at)))(
        q, k, v
    )
    assert error(got, dense(case, q, k, v, {"q_positions": at}).out) < 1e-13
    assert error(got[0, 0], jnp.repeat(v[0, 0], 4, axis=0)) < 1e-13


def test_no_key_at_all(mesh):
    case = Case(4, batch=2, seq=3, kv_seq=8)
    (q, k, v), _ = arrays(case, jnp.float32)
    nowhere = jnp.full((2, 8), -1, jnp.int32)

    def attend(q, k, v):
        return tree_partial(
            q,
            k,
            v,
            on=mesh(context=4),
            tokens=TokenData(positions=nowhere),
            q_tokens=TokenData(positions=jnp.zeros((2, 3), jnp.int32)),
        )

    got = jax.jit(attend)(q, k, v)
    assert (got.out == 0).all() and (got.lse == -jnp.inf).all()
    gradients = jax.jit(jax.grad(lambda *args: attend(*args).out.sum(), (0, 1, 2)))(q, k, v)
    assert all((x == 0).all() for x in gradients)


def test_a_row_without_keys_leaves_the_others_alone(mesh):
    case = Case(8, batch=2, seq=3, kv_seq=64)
    (q, k, v), _ = arrays(case, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), (2, 64))
    at = jnp.full((2, 3), 63, jnp.int32)

    @jax.jit
    def gradients(q, k, v, positions):
        def loss(q, k, v):
            attended = tree_attention(
                q, k, v, on=mesh(context=8), tokens=TokenData(positions=positions), q_tokens=TokenData(positions=at)
            )
            return jnp.sum(jnp.sin(attended[1]))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    with_keys = gradients(q, k, v, positions)
    without = gradients(q, k, v, positions.at[0].set(-1))
    for x, y in zip(with_keys, without, strict=True):
        assert np.isfinite(y).all() and (np.asarray(x) == np.asarray(y)).all()


SHAPE = Case(8, "all_to_all", batch=2, seq=3, kv_seq=24, data="documents")


@settings(max_examples=40)
@given(st.data())
def test_any_positions_and_segments(mesh, data):
    """One compiled program, whatever is in the cache."""

    def numbers(low, high, *shape):
        size = int(np.prod(shape))
        drawn = data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        return jnp.asarray(np.reshape(drawn, shape), jnp.int32)

    tokens = {
        "positions": numbers(-1, 9, 2, 24),
        "segments": numbers(0, 2, 2, 24),
        "q_positions": numbers(0, 9, 2, 3),
        "q_segments": numbers(0, 2, 2, 3),
    }
    with jax.enable_x64(True):
        (q, k, v), _ = arrays(SHAPE, jnp.float64)
        got, want = any_tokens(mesh)(q, k, v, tokens), dense(SHAPE, q, k, v, tokens)
        assert error(got.out, want.out) < 1e-13 and error(got.lse, want.lse) < 1e-13


@functools.cache
def any_tokens(mesh):
    """The program of `SHAPE`, compiled once."""
    here = mesh(context=8)
    return jax.jit(lambda q, k, v, tokens: tree_partial(q, k, v, on=here, scheme=SHAPE.scheme, **by_side(tokens)))


MODEL: dict[str, Any] = dict(batch=1, seq=1, heads=32, head_dim=128, itemsize=2)
"""A decoded token of Llama-3.1-8B in bfloat16."""


@pytest.mark.parametrize(
    "scheme, asked",
    [
        ("all_to_all", dict(p=1)),
        ("all_to_all", dict(p=2)),
        ("all_to_all", dict(p=8)),
        ("all_to_all", dict(p=8, batch=256)),
        ("all_to_all", dict(p=16, inner=8)),
        ("all_to_all", dict(p=16, inner=1, batch=1024)),
        ("two_level", dict(p=16, inner=8, batch=512)),
        ("all_to_all", dict(p=32, inner=8, batch=32)),
        ("two_level", dict(p=32, inner=8, batch=256)),
        ("two_level", dict(p=32, inner=8, seq=256)),
        ("all_to_all", dict(p=32, inner=8, batch=256, launch_bytes=10**8)),
        ("all_gather", dict(p=1, head_sharded=False)),
        ("all_gather", dict(p=2, head_sharded=False, batch=256)),
        ("all_gather", dict(p=8, head_sharded=False)),
        ("all_gather", dict(p=8, head_sharded=False, batch=128)),
        ("two_level_gather", dict(p=8, head_sharded=False, batch=256)),
        ("all_gather", dict(p=16, inner=8, head_sharded=False)),
        ("two_level_gather", dict(p=16, inner=8, head_sharded=False, batch=32)),
        ("all_gather", dict(p=3, heads=8)),
        ("all_gather", dict(p=8, heads=9)),
        ("two_level_gather", dict(p=8, heads=9, seq=4096)),
        ("all_gather", dict(p=64)),
        ("two_level_gather", dict(p=64, inner=8, batch=4)),
    ],
)
def test_choice_of_scheme(scheme, asked):
    asked = MODEL | asked
    assert choose_scheme(**asked) == scheme
    check_scheme(scheme, p=asked["p"], heads=asked["heads"], inner=asked.get("inner"))


@given(
    st.integers(1, 128), st.integers(1, 256), st.integers(1, 512), st.integers(1, 64), st.booleans(), st.integers(0, 6)
)
def test_every_choice_fits(p, batch, seq, heads, head_sharded, inner_place):
    divisors = [n for n in range(1, p + 1) if p % n == 0]
    inner = divisors[inner_place % len(divisors)]
    shape = dict(batch=batch, seq=seq, head_dim=64, itemsize=2)
    scheme = choose_scheme(p=p, heads=heads, inner=inner, head_sharded=head_sharded, **shape)
    check_scheme(scheme, p=p, heads=heads, inner=inner)
    assert head_sharded or scheme not in HEAD_SHARDED


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(heads=(8, 3)), r"kv_heads 3 does not divide heads 8.*kv_heads that work: 1, 2, 4, 8"),
        (dict(heads=(6, 2), scheme="all_to_all"), r"size 4 does not divide the 6 heads.*sizes that work: 1, 2, 3, 6;"),
        (dict(heads=(6, 2), scheme="two_level", inner=2), r"'two_level' splits heads.*1, 2, 3, 6"),
        (dict(scheme="two_level"), r"inner 4: .*sizes that work: 2"),
        (dict(scheme="two_level", inner=3), r"inner 3: .*sizes that work: 2"),
        (dict(scheme="two_level_gather", inner=3), r"inner 3: .*sizes that work: 1, 2, 4"),
        (dict(inner=3), r"inner 3: .*sizes that work: 1, 2, 4"),
        (dict(scheme="all_to_all", head_sharded=False), r"head_sharded is False: take 'all_gather'"),
        (dict(axis="ring"), r"axis 'ring': the mesh has data, fsdp, context, tensor"),
        (dict(batch_axes=("rows",)), r"no axis 'rows'"),
        (dict(batch_axes=("context",)), r"'context' shards another dim"),
        (dict(batch=3), r"batch 3 over mesh axes data, fsdp of size 2.*sizes that work: 1, 3"),
        (dict(kv_seq=8, seq=9), r"seq 9 .*kv_seq 8"),
        (dict(positions=(2, 30)), r"positions has shape \(2, 30\): it must be \[batch kv_seq\], here \(2, 31\)"),
        (dict(positions=(2, 31)), r"positions of keys without those of q_tokens"),
        (dict(q_positions=(2, 2)), r"q_positions has shape \(2, 2\): it must be \[batch seq\]"),
        (dict(wire_dtype="int8"), r"wire_dtype int8: it must be floating"),
        (dict(segments=(2, 31)), r"segments of tokens and of q_tokens: give both"),
    ],
)
def test_wrong_use_says_what_would_work(mesh, changes, message):
    shape = {name: changes.pop(name) for name in ("batch", "seq", "kv_seq", "heads") if name in changes}
    (q, k, v), _ = arrays(replace(Case(4, batch=2), **shape), jnp.float32)
    tokens = ("positions", "q_positions", "segments", "q_segments")
    asked: Any = {name: jnp.zeros(x, jnp.int32) if name in tokens else x for name, x in changes.items()}
    with pytest.raises(ValueError, match=message):
        axes: Any = {name: asked.pop(name) for name in ("axis", "batch_axes", "head_axes") if name in asked}
        on = AttentionMesh(mesh(data=2, context=4), **axes)
        sides = by_side({name: asked.pop(name) for name in tokens if name in asked})
        jax.eval_shape(lambda q, k, v: tree_attention(q, k, v, on=on, **sides, **asked), q, k, v)


def test_an_unknown_scheme_names_those_that_exist():
    with pytest.raises(ValueError, match="'butterfly': the schemes are all_to_all, all_gather, two_level"):
        check_scheme("butterfly", p=4, heads=8)


def test_tensor_axis_larger_than_kv_heads_names_the_context_axis(mesh):
    (q, k, v), _ = arrays(Case(2, heads=(8, 1)), jnp.float32)
    with pytest.raises(ValueError, match=r"kv_heads 1 over mesh axes tensor of size 2.*that work: 1; the context"):
        jax.eval_shape(lambda q, k, v: tree_attention(q, k, v, on=mesh(context=2, tensor=2)), q, k, v)


def test_a_choice_names_groups_that_fit():
    with pytest.raises(ValueError, match=r"inner 12: .*sizes that work: 1, 2, 4, 8"):
        choose_scheme(p=8, batch=1, seq=1, heads=8, head_dim=8, itemsize=4, inner=12)


@pytest.mark.parametrize("kv_seq", [32, 31])
def test_explicit_axes(kv_seq, x64):
    """A mesh as `jax.make_mesh` makes it by default, and arrays that are elsewhere."""
    here = jax.make_mesh((2, 4), ("data", "context"))
    assert jax.sharding.AxisType.Explicit in here.axis_types
    case = Case(4, batch=2, kv_seq=kv_seq)
    (q, k, v), data = arrays(case, jnp.float32)
    out = jax.jit(lambda q, k, v: tree_attention(q, k, v, on=here))(q, k, v)
    assert error(out, dense(case, q, k, v, data).out) < 2e-6


def test_a_mesh_of_one_axis(x64):
    """For models that are not ours: any axis name, and no other axis."""
    ring = jax.make_mesh((4,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    case = Case(4, batch=2, seq=3)
    (q, k, v), data = arrays(case, jnp.float32)
    out = jax.jit(lambda q, k, v: tree_attention(q, k, v, on=AttentionMesh(ring, axis="ring")))(q, k, v)
    assert error(out, dense(case, q, k, v, data).out) < 2e-6


def test_combine_of_parts_that_do_not_vary(mesh):
    """What is the same on every device counts once for each of them."""

    def function(out, lse):
        return tree_combine(Partial(out, lse), "context", scheme="all_gather")

    out, lse = jnp.ones((1, 1, 2, 4)), jnp.zeros((1, 1, 2))
    joined = jax.jit(
        jax.shard_map(function, mesh=mesh(context=4), in_specs=PartitionSpec(), out_specs=PartitionSpec())
    )(out, lse)
    np.testing.assert_allclose(joined.out, 1, rtol=1e-6)
    np.testing.assert_allclose(joined.lse, np.log(4), rtol=1e-6)
