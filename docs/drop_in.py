"""Ring attention in a model that is not Treering's: one argument changes, and the sequence may span all devices.

python docs/drop_in.py
"""

from functools import partial

import jax
import jax.numpy as jnp

from treering.layers import dense_attention, ring_attention


def block(weights, x, attend):
    """Someone's transformer block on x `[batch seq embed]`; weights are plain arrays, heads 8 over kv_heads 2."""
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, weights[name]) for name in "qkv")
    x = x + jnp.einsum("bshd,hde->bse", attend(q, k, v), weights["out"])
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def loss(weights, x, attend):
    """Any loss: it and its gradients are the same with either attention."""
    return jnp.mean(block(weights, x, attend) ** 2)


def main():
    """The gradients of one device, and of a ring of all: their greatest difference."""
    mesh = jax.make_mesh((jax.device_count(),), ("context",))
    shapes = dict(q=(64, 8, 8), k=(64, 2, 8), v=(64, 2, 8), out=(8, 8, 64), up=(64, 128), down=(128, 64))
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    weights = {name: jax.random.normal(keys[name], shape) / 8 for name, shape in shapes.items()}
    x = jax.random.normal(jax.random.key(1), (2, 1000, 64))
    ours = jax.jit(jax.grad(partial(loss, attend=partial(ring_attention, on=mesh))))(weights, x)
    dense = jax.jit(jax.grad(partial(loss, attend=dense_attention)))(weights, x)
    difference = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), ours, dense)))
    print(f"{jax.device_count()} devices, 1000 tokens: gradients differ by {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
