"""The reader of compiled programs, on programs whose counts are known."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import hlo

CONTEXT = PartitionSpec("context")


def compiled(function, *args, mesh=None, specs: Any = CONTEXT, donate=(), out=CONTEXT):
    if mesh is not None:
        function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)
    return jax.jit(function, donate_argnums=donate).lower(*args).compile()


def shift(x):
    p = lax.axis_size("context")
    return lax.ppermute(x, "context", [(rank, (rank + 1) % p) for rank in range(p)])


ROW = 16 * 4
"""Bytes of one device's share in these programs: float32[1, 16]."""


@pytest.mark.smoke
@pytest.mark.parametrize(
    "kind, function, payload, received",
    [
        ("all-gather", lambda x: lax.all_gather(x, "context").sum(0), 4 * ROW, 3 * ROW),
        ("all-to-all", lambda x: lax.all_to_all(x, "context", 1, 0, tiled=True).reshape(1, 16), ROW, ROW * 3 // 4),
        ("all-reduce", lambda x: x * lax.psum(x, "context"), ROW, ROW * 6 // 4),
        ("collective-permute", shift, ROW, ROW),
        (
            "reduce-scatter",
            lambda x: lax.psum_scatter(x, "context", scatter_dimension=1, tiled=True),
            ROW,
            ROW * 3 // 4,
        ),
    ],
)
@pytest.mark.parametrize("data", [1, 2])
def test_each_kind_of_collective(mesh, kind, function, payload, received, data):
    program = hlo.read(compiled(function, jnp.ones((4, 16)), mesh=mesh(context=4, data=data)))
    (found,) = program.collectives
    assert (found.kind, found.count, found.payload, found.received) == (kind, 1, payload, received)
    assert found.group == (4 * data if kind == "collective-permute" else 4)
    assert program.launches() == {kind: 1} and program.received_bytes() == received


def test_groups_of_one_device_send_nothing(mesh):
    def function(x):
        return lax.all_gather(x, "context").sum(0) + lax.psum(x, "context") + shift(x)

    program = hlo.read(compiled(function, jnp.ones((1, 16)), mesh=mesh(context=1, data=2)))
    assert program.collectives == [] and program.launches() == {} and program.received_bytes() == 0


def test_subgroups_of_an_axis(mesh):
    def function(x):
        return lax.all_gather(x, "context", axis_index_groups=[[0, 1], [2, 3]]).sum(0)

    (found,) = hlo.read(compiled(function, jnp.ones((4, 16)), mesh=mesh(context=4))).collectives
    assert (found.group, found.received) == (2, ROW)


def loops(x):
    def inner(_, y):
        return shift(y) * 2

    def outer(y, _):
        return lax.fori_loop(0, 3, inner, y), None

    return lax.psum(lax.scan(outer, shift(x), length=5)[0], "context")


@pytest.mark.smoke
@pytest.mark.parametrize("noted", [True, False])
def test_trip_counts_multiply_whether_noted_or_derived(mesh, noted):
    text = hlo.read(compiled(loops, jnp.ones((4, 16)), mesh=mesh(context=4), out=PartitionSpec())).text
    bare = re.sub(r',?"known_trip_count":\{"n":"\d+"\}', "", text)
    assert bare != text
    program = hlo.read(text if noted else bare)
    assert program.launches() == {"collective-permute": 1 + 3 * 5, "all-reduce": 1}
    assert program.received_bytes() == 16 * ROW + 2 * 3 / 4 * ROW


@pytest.mark.parametrize(
    "start, bound, step, trips", [(0, 7, 1, 7), (2, 7, 1, 5), (1, 8, 3, 3), (9, 0, -2, 5), (5, 5, 1, 0), (6, 5, 1, 0)]
)
def test_trip_counts_from_start_step_and_bound(start, bound, step, trips):
    compare = "LT" if step > 0 else "GT"
    text = f"""HloModule loop

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %x = f32[4]{{0}} get-tuple-element(%p), index=1
  %y = f32[4]{{0}} all-reduce(%x), replica_groups=[1,2]<=[2], to_apply=%sum
  ROOT %t = (s32[], f32[4]{{0}}) tuple(%next, %y)
}}

%condition (q: (s32[], f32[4])) -> pred[] {{
  %q = (s32[], f32[4]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %bound = s32[] constant({bound})
  ROOT %less = pred[] compare(%j, %bound), direction={compare}
}}

ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  %start = s32[] constant({start})
  %init = (s32[], f32[4]{{0}}) tuple(%start, %a)
  %loop = (s32[], f32[4]{{0}}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[4]{{0}} get-tuple-element(%loop), index=1
}}
"""
    assert hlo.read(text).launches() == ({"all-reduce": trips} if trips else {})


def test_a_loop_whose_count_only_the_run_knows(mesh):
    def function(x, n):
        return lax.fori_loop(0, n, lambda _, y: shift(y), x)

    specs = (PartitionSpec("context"), PartitionSpec())
    program = hlo.read(compiled(function, jnp.ones((4, 16)), 3, mesh=mesh(context=4), specs=specs))
    (found,) = program.collectives
    assert found.count is None
    with pytest.raises(ValueError, match="unknown count"):
        program.launches()
    assert program.launches(loops=3) == {"collective-permute": 3} and program.received_bytes(loops=3) == 3 * ROW


def test_branches_count_as_taken(mesh):
    def function(x):
        far = lax.psum(jnp.sum(x), "context") > 0
        return lax.cond(far, shift, lambda y: lax.all_to_all(y, "context", 1, 0, tiled=True).reshape(1, 16), x)

    program = hlo.read(compiled(function, jnp.ones((4, 16)), mesh=mesh(context=4)))
    assert program.launches() == {"all-reduce": 1, "collective-permute": 1, "all-to-all": 1}


ASYNC = """HloModule async, num_partitions=8

%wrapped (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %exchanged = f32[8,4]{1,0} all-to-all(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

ENTRY %main (a: f32[8,4]) -> f32[64,4] {
  %a = f32[8,4]{1,0:T(8,128)} parameter(0), metadata={op_name="kv (keys)"}
  %gs = (f32[8,4]{1,0}, f32[64,4]{1,0}) all-gather-start(%a), replica_groups={}, dimensions={0}
  %gd = f32[64,4]{1,0} all-gather-done(%gs)
  %ps = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  %pd = f32[8,4]{1,0} collective-permute-done(%ps)
  %rs = f32[8,4]{1,0} all-reduce-start(%pd), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%sum
  %rd = f32[8,4]{1,0} all-reduce-done(%rs)
  %xs = ((f32[8,4]{1,0}), f32[8,4]{1,0}, u32[]) async-start(%rd), calls=%wrapped
  %xd = f32[8,4]{1,0} async-done(%xs), calls=%wrapped
  %cs = (f32[64,4]{1,0:S(5)}, f32[64,4]{1,0}, u32[]) copy-start(%gd)
  ROOT %cd = f32[64,4]{1,0:S(5)} copy-done(%cs)
}
"""


def test_asynchronous_pairs_count_once():
    program = hlo.read(ASYNC)
    kinds = {x.kind: (x.payload, x.group, x.count) for x in program.collectives}
    assert kinds == {
        "all-gather": (1024, 8, 1),
        "collective-permute": (128, 2, 1),
        "all-reduce": (128, 2, 1),
        "all-to-all": (128, 8, 1),
    }
    assert [(move.kind, move.bytes) for move in program.moves(at_least=1000)] == [("copy", 1024)]
    assert program.temporary_bytes is None and program.parameters[0].source == "kv (keys)"


@pytest.mark.parametrize(
    "printed, group",
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("{}", 8),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,2,2]T(2,1,0)", 2),
        ("mesh['data'=2,'context'=4] {'context'}", 4),
        ("mesh['data'=2,'context'=4] {'data','context'}", 8),
        ("mesh['data'=2,'context'=4] {'context':(1)2}", 2),
    ],
)
def test_every_printed_form_of_groups(printed, group):
    text = ASYNC.replace("replica_groups={{0,1},{2,3},{4,5},{6,7}}", f"replica_groups={printed}")
    (found,) = (x for x in hlo.read(text).collectives if x.kind == "all-reduce")
    assert found.group == group


@pytest.mark.parametrize(
    "text, size",
    [
        ("f32[2,3]{1,0}", 24),
        ("bf16[8]{0:T(256)(2,1)}", 16),
        ("pred[5]", 5),
        ("s4[3]", 2),
        ("f8e4m3fn[7]", 7),
        ("c64[2]", 16),
        ("f64[]", 8),
        ("(f32[2]{0}, (s32[], u8[3]{0}), token[])", 15),
    ],
)
def test_bytes_of_types(text, size):
    assert hlo.type_bytes(text) == size


def test_copies_transposes_and_gathers(x64):
    big = jnp.ones((64, 128))

    def kinds(function, *args, at_least=big.nbytes):
        return {move.kind for move in hlo.read(compiled(function, *args)).moves(at_least=at_least)}

    assert kinds(lambda x: x * 2, big) == set()
    assert kinds(lambda x: jnp.concatenate([x.T * 2, x.T], axis=0), big) & {"transpose", "concatenate", "copy"}
    rows = jnp.arange(64)[::-1]
    assert "gather" in kinds(lambda x, rows: x[rows] + 1, big, rows)
    assert kinds(lambda x, rows: x[rows[:2]] + 1, big, rows) == set()


def test_donation_and_the_copy_that_it_saves():
    cache, row = jnp.ones((1024, 64)), jnp.ones((1, 64))

    def write(row, cache, at):
        return jnp.sum(row), lax.dynamic_update_slice(cache, row, (at, 0))

    kept = hlo.read(compiled(write, row, cache, 3))
    given = hlo.read(compiled(write, row, cache, 3, donate=1))
    assert kept.aliases == {} and [move.bytes for move in kept.moves(at_least=cache.nbytes)] == [cache.nbytes]
    assert given.aliases == {(1,): 1} and given.moves(at_least=cache.nbytes) == []
    assert given.parameters[1].source == "cache" and given.parameters[1].bytes == cache.nbytes
    assert given.alias_bytes == cache.nbytes


def test_temporary_bytes_are_those_of_the_compiler():
    done = compiled(lambda x: jnp.sort(x @ x, axis=0).sum(), jnp.ones((256, 256)))
    memory = done.memory_analysis()
    assert memory is not None
    assert hlo.read(done).temporary_bytes == memory.temp_size_in_bytes >= 256 * 256 * 4


def test_a_loop_counts_its_copies():
    def function(x, rows):
        return lax.fori_loop(0, 4, lambda _, y: y[rows] * 2, x)

    args = jnp.ones((128, 128)), jnp.arange(128)[::-1]
    moves = hlo.read(compiled(function, *args)).moves(at_least=128 * 128 * 4, kinds=("gather",))
    assert [move.count for move in moves] == [4]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "function, times",
    [
        (lambda w, x: x @ w, 1),
        (lambda w, x: (x @ w) @ w, 2),
        (lambda w, x: lax.fori_loop(0, 5, lambda _, y: y @ w, x), 5),
        (lambda w, x: x[:1] + lax.dynamic_slice_in_dim(w, x[0, 0].astype(int), 1), 1 / 128),
        # Moved first: read to be moved, and read again where it is used.
        (lambda w, x: x @ lax.optimization_barrier(w[::-1]), 2),
        (lambda w, x: x @ lax.optimization_barrier(w[:, :32]), 1 / 2),
        (lambda w, x: lax.scan(lambda y, part: (y @ part, None), x, w.reshape(1, 128, 128))[0], 1),
    ],
    ids=["once", "twice", "loop", "row", "moved", "part moved", "scan"],
)
def test_reads_of_an_argument(function, times):
    w = jnp.ones((128, 128))
    program = hlo.read(compiled(function, w, jnp.ones((4, 128))))
    first = program.parameters[0].source
    assert program.read_bytes(lambda path: path == first, small=0) == pytest.approx(times * w.nbytes, rel=0.01)
    assert program.read_bytes(lambda path: False) == 0


def test_operations_of_products_count_every_iteration():
    def function(w, x):
        return lax.fori_loop(0, 3, lambda _, y: y @ w, x) @ w[:, :8]

    program = hlo.read(compiled(function, jnp.ones((64, 64)), jnp.ones((16, 64))))
    assert program.product_flops() == 3 * 2 * 16 * 64 * 64 + 2 * 16 * 64 * 8
