"""Dims, rules and plans."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P


def plan_of(mesh, table="decode", **sizes):
    from treering.layers.parallel.sharding import Plan

    return Plan(mesh(**sizes), table)


def tiny_model():
    from treering.configs.llama import TINY
    from treering.models.families import families

    return eqx.filter_eval_shape(lambda: families()["llama"].init(TINY, jax.random.key(0)))


def test_every_array_of_a_model_declares_its_dims():
    from treering.layers.parallel.sharding import DIMS, dims_of

    declared = jax.tree.leaves(dims_of(eqx.filter(tiny_model(), lambda x: hasattr(x, "shape"))))
    assert len(declared) == 12
    assert {dim for dims in declared for dim in dims} <= set(DIMS)


def test_an_array_without_dims_is_named():
    from treering.layers.parallel.sharding import array_field, dims_of

    class Bare(eqx.Module):
        weight: jax.Array

    class Wrong(eqx.Module):
        weight: jax.Array = array_field("embed mlp")

    with pytest.raises(ValueError, match="weight declares no dims"):
        dims_of(Bare(jnp.zeros(3)))
    with pytest.raises(ValueError, match=r"shape \(3,\) and declares the dims embed mlp"):
        dims_of(Wrong(jnp.zeros(3)))


@pytest.mark.parametrize(
    "table,role,dims,shape,spec",
    [
        ("decode", "parameters", "embed out_heads head_dim", (64, 8, 8), P(None, ("tensor", "context"), None)),
        ("decode", "parameters", "embed out_heads head_dim", (64, 6, 8), P(None, ("tensor",), None)),
        ("decode", "parameters", "mlp embed", (96, 64), P(("tensor", "context"), None)),
        ("decode", "parameters", "vocab embed", (97, 64), P(None, None)),
        (
            "decode",
            "activations",
            "batch seq heads head_dim",
            (4, 1, 8, 8),
            P(("data", "fsdp"), None, ("tensor",), None),
        ),
        ("train", "activations", "batch seq embed", (4, 16, 64), P(("data", "fsdp"), ("context",), None)),
        ("train", "parameters", "mlp embed", (96, 64), P(("tensor",), ("fsdp", "context"))),
        ("train", "parameters", "layers embed", (2, 64), P(None, ("fsdp", "context"))),
    ],
)
def test_rules_turn_dims_into_axes(mesh, table, role, dims, shape, spec):
    assert plan_of(mesh, table, context=4, tensor=2).spec(dims, shape, role) == spec


def test_an_axis_that_does_not_divide_lists_what_works(mesh):
    plan = plan_of(mesh, tensor=2)
    with pytest.raises(ValueError, match=r"mesh.tensor 2: it must divide kv_heads 3 \(works: 1, 3\)"):
        plan.spec("kv_heads", (3,))
    with pytest.raises(ValueError, match="'rows' is not a dim: the dims are batch, seq"):
        plan.spec("rows", (3,))
    with pytest.raises(ValueError, match="both be split over tensor"):
        plan.spec("heads mlp", (2, 4))


def test_mesh_sizes_fill_one_axis_and_refuse_what_does_not_multiply():
    from treering.configs.mesh import MeshConfig

    assert MeshConfig().resolve(8, fill="context") == {"data": 1, "fsdp": 1, "context": 8, "tensor": 1}
    assert MeshConfig(tensor=2).resolve(8, fill="fsdp") == {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}
    assert MeshConfig(context=2, tensor=4).resolve(8, fill="context")["tensor"] == 4
    for config, words in (
        (MeshConfig(context=16), r"^mesh.context 16: it must be the number of devices, 8; .*\(works: 8\)"),
        (MeshConfig(context=4), "^mesh.context 4: .*--cpu-devices 4 simulates 4 on a CPU"),
        (MeshConfig(tensor=3), r"^mesh.tensor 3: it must divide the number of devices, 8; .*\(works: 1, 2, 4, 8\)"),
        (MeshConfig(tensor=2, context=2), "^mesh.context 2 x mesh.tensor 2: their product, 4, must be the number"),
        (MeshConfig(data=0), "^mesh.data 0: it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            config.resolve(8, fill="context")


def test_a_mesh_in_words(mesh):
    from treering.layers.parallel.devices import describe

    assert describe(plan_of(mesh)) == "1 CPU device"
    assert describe(plan_of(mesh, context=4, tensor=2)) == "context 4 x tensor 2 (8 CPU devices)"


def test_init_gives_the_same_weights_on_every_mesh(mesh):
    import numpy as np

    from treering.configs.llama import TINY
    from treering.models.families import families

    def build(**sizes):
        plan = plan_of(mesh, **sizes)
        return plan.init(lambda: families()["llama"].init(TINY, jax.random.key(0)), "parameters")

    one, eight = build(), build(context=4, tensor=2)
    down = eight.blocks.pattern[0].mlp.down.weight
    assert down.addressable_shards[0].data.size * 8 == down.size
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
        np.testing.assert_array_equal(a, b)
