"""Norm, rotary positions, linear maps and embedding, each against transformers' or a formula written out."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_norm_equals_transformers_bit_for_bit_in_order_of_casts(dtype, eps):
    """Inputs near the root of eps, weights far from 1."""
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from treering.layers.nn.norm import RMSNorm

    rng = np.random.default_rng(0)
    x = (1e-3 * rng.normal(size=(2, 3, 64))).astype(np.float32)
    weight = rng.normal(size=64).astype(np.float32) * 7
    oracle = LlamaRMSNorm(64, eps=eps)
    oracle.weight.data = torch.tensor(weight)
    expected = oracle.to(getattr(torch, dtype))(torch.tensor(x).to(getattr(torch, dtype))).float().detach().numpy()
    ours = RMSNorm(jnp.asarray(weight, dtype), "embed", eps)(jnp.asarray(x, dtype))
    assert ours.dtype == dtype
    np.testing.assert_allclose(np.asarray(ours, np.float32), expected, rtol=1e-6 if dtype == "float32" else 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_keeps_float32_angles_in_any_dtype(dtype):
    """Positions that bfloat16 would round, up to the far end of a long context."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    from treering.configs.rope import DefaultRope
    from treering.layers.nn.rope import rotate

    positions = np.array([[0, 1, 255, 256, 257, 4095, 131071]])
    x = np.random.default_rng(0).normal(size=(1, 7, 2, 64)).astype(np.float32)
    ours = rotate(jnp.asarray(x, dtype), jnp.asarray(positions), DefaultRope(theta=500000.0))
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=64, rope_theta=500000.0)
    rounded = torch.tensor(np.asarray(jnp.asarray(x, dtype), np.float32)).permute(0, 2, 1, 3)
    cosine, sine = LlamaRotaryEmbedding(config)(rounded, torch.tensor(positions))
    expected = apply_rotary_pos_emb(rounded, rounded, cosine, sine)[0].permute(0, 2, 1, 3).numpy()
    assert ours.dtype == dtype
    bound = 1e-5 if dtype == "float32" else 2**-8
    assert np.abs(np.asarray(ours, np.float32) - expected).max() <= bound * np.abs(expected).max()
    apart = rotate(jnp.ones((1, 2, 1, 64), dtype), jnp.array([[256, 257]]), DefaultRope(theta=500000.0))
    assert not np.array_equal(apart[0, 0], apart[0, 1])


def test_frequencies_of_llama3_are_the_known_ones():
    from treering.configs.rope import Llama3Rope
    from treering.layers.nn.rope import inverse_frequencies

    rope = Llama3Rope(theta=5e5, factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=32)
    known = [1.0, 4.7007538e-3, 1.7677668e-4, 6.6478697e-6]
    np.testing.assert_allclose(inverse_frequencies(rope, 8), known, rtol=1e-6)


def test_linear_maps_between_named_dims_with_bias_and_a_low_rank_update():
    from treering.layers.nn.linear import Linear

    sizes = {"embed": 6, "heads": 2, "head_dim": 3}
    linear = Linear.init("embed -> heads head_dim", sizes, bias=True, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 5, 6))
    weight = np.asarray(linear.weight).reshape(6, 6)
    np.testing.assert_allclose(linear(x), (x @ weight.T).reshape(4, 5, 2, 3), rtol=1e-5, atol=1e-8)
    import dataclasses

    moved = dataclasses.replace(linear, bias=jnp.ones((2, 3)), lora=lambda x: jnp.zeros((4, 5, 2, 3)) + 2)
    np.testing.assert_allclose(moved(x), linear(x) + 3, rtol=1e-5)
    assert linear(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_linear_multiplies_by_a_weight_of_another_kind():
    import dataclasses

    from treering.layers.nn.linear import Linear

    class Doubled:
        def matmul(self, x):
            return jnp.concatenate([x, x], axis=-1)

    linear = Linear.init("embed -> mlp", {"embed": 4, "mlp": 8}, key=jax.random.key(0))
    x = jnp.arange(4.0)[None]
    doubled = dataclasses.replace(linear, weight=Doubled())
    np.testing.assert_array_equal(doubled(x), [[0, 1, 2, 3, 0, 1, 2, 3]])
    assert doubled.inputs_first() is doubled


def test_a_weight_stored_in_dims_first_gives_the_same_products():
    from treering.layers.nn.linear import Linear
    from treering.layers.parallel.sharding import dims_of

    sizes = {"embed": 6, "heads": 3, "head_dim": 4}
    for dims, width in (("embed -> heads head_dim", 6), ("heads head_dim -> embed", 12)):
        make = eqx.filter_vmap(lambda key, dims=dims: Linear.init(dims, sizes, bias=True, key=key))
        stacked = make(jax.random.split(jax.random.key(0), 2))
        turned = stacked.inputs_first()
        assert turned.weight.value.shape != stacked.weight.shape
        x = jax.random.normal(jax.random.key(1), (2, 5, width)).reshape(2, 5, *([3, 4] if width == 12 else [6]))
        for layer in range(2):
            one, other = (jax.tree.map(lambda leaf: leaf[layer], linear) for linear in (stacked, turned))  # noqa: B023
            np.testing.assert_allclose(other(x), one(x), rtol=1e-6, atol=1e-6)
            assert dims_of(other).weight.value == tuple(other.in_dims + other.out_dims)


@pytest.mark.parametrize(
    "table,sizes", [("decode", {"context": 4, "tensor": 2}), ("train", {"fsdp": 2, "context": 2, "tensor": 2})]
)
def test_a_split_table_finds_the_same_vectors_and_gradients(mesh, table, sizes):
    from treering.layers.nn.embed import Embedding
    from treering.layers.parallel.sharding import Plan

    plan, alone = Plan(mesh(**sizes), table), Plan(mesh(), table)
    embedding = Embedding.init(48, 16, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 48).at[0, 0].set(0).at[1, 7].set(47)
    placed = jax.device_put(embedding, plan.shardings(embedding, "parameters"))

    def total(embedding, plan):
        return jnp.sum(jnp.sin(embedding(tokens, plan, jnp.dtype(jnp.float32))))

    np.testing.assert_array_equal(
        jax.jit(lambda e: e(tokens, plan, jnp.dtype(jnp.float32)))(placed),
        embedding(tokens, alone, jnp.dtype(jnp.float32)),
    )
    split = jax.jit(jax.grad(lambda e: total(e, plan)))(placed).table
    np.testing.assert_allclose(split, jax.grad(lambda e: total(e, alone))(embedding).table, rtol=1e-5, atol=1e-6)
