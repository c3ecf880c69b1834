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
    with pytest.raises(ValueError, match="mesh.tensor 2 does not divide kv_heads 3: sizes that work are 1, 3"):
        plan.spec("kv_heads", (3,))
    with pytest.raises(ValueError, match="'rows' is no dim"):
        plan.spec("rows", (3,))
    with pytest.raises(ValueError, match="both be split over tensor"):
        plan.spec("heads mlp", (2, 4))


def test_mesh_sizes_fill_one_axis_and_refuse_what_does_not_multiply():
    from treering.configs.mesh import MeshConfig

    assert MeshConfig().resolve(8, fill="context") == {"data": 1, "fsdp": 1, "context": 8, "tensor": 1}
    assert MeshConfig(tensor=2).resolve(8, fill="fsdp") == {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}
    assert MeshConfig(context=2, tensor=4).resolve(8, fill="context")["tensor"] == 4
    for config, words in (
        (MeshConfig(context=16), "context 16 takes 16 devices and 8 are here"),
        (MeshConfig(context=4), "context 4 takes 4 devices"),
        (MeshConfig(tensor=3), "tensor 3"),
        (MeshConfig(data=0), "mesh.data is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            config.resolve(8, fill="context")


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
