"""Other implementations of decode attention, for comparison only.

- `three_all_reduces`: the paper's own combine (arXiv 2408.04093, algorithm 3);
- `plain_attention`: softmax attention under jit, partitioned by the compiler;
- `ring_decode`: keys and values are sent around the devices, with the fewest bytes that a ring can send: heads
  grouped, keys and values in one message, p - 1 sends. The paper's own ring repeats key heads first, which sends
  heads / kv_heads times as many bytes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from treering.layers.attention.local import local_attention
from treering.layers.attention.mask import Mask
from treering.layers.attention.partial import Partial, merge
from treering.layers.attention.varying import vary_over

ALL_KEYS = Mask(causal=False)
"""What the newest token sees."""


def three_all_reduces(partial: Partial, axis: str, *, fused: bool = False) -> Partial:
    """The paper's combine, inside `shard_map`: the maximum, the numerators, the denominators.

    With `fused` XLA joins the last two into one message; without it the third depends on the second (XLA removes a
    barrier before it joins messages).
    """
    peak = lax.pmax(lax.stop_gradient(partial.lse), axis)
    weights = jnp.exp(partial.lse - peak)
    numerators = lax.psum(partial.out * weights[..., None], axis)
    if not fused:
        weights = jnp.where(jnp.isnan(numerators[..., 0]), jnp.nan, weights)
    denominators = lax.psum(weights, axis)
    return Partial(numerators / denominators[..., None], peak + jnp.log(denominators))


def plain_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch kv_seq kv_heads head_dim"],
    v: Float[Array, "batch kv_seq kv_heads head_dim"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Every query over every key, as written for one device; for jit with keys sharded by tokens."""
    batch, seq, heads, head_dim = q.shape
    grouped = q.reshape(batch, seq, k.shape[2], -1, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k) * head_dim**-0.5
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores, axis=-1), v).reshape(q.shape)


def ring_decode(
    q: Float[Array, "batch seq heads head_dim"],
    kv: Float[Array, "2 batch local_seq kv_heads head_dim"],
    axis: str,
) -> Partial:
    """Queries that are replicated attend to the keys and values of all devices in turn, inside `shard_map`.

    Every device computes the whole result.
    """
    p = lax.axis_size(axis)
    q = vary_over(frozenset({axis}), q)

    def attend(kv):
        return local_attention(q, kv[0], kv[1], mask=ALL_KEYS, out_dtype=jnp.float32)

    def send(kv):
        return lax.ppermute(kv, axis, [(rank, (rank + 1) % p) for rank in range(p)])

    def step(carry, _):
        kv, partial = carry
        coming = send(kv)
        return (coming, merge(partial, attend(kv))), None

    partial = Partial.empty(q.shape[:3], q.shape[3])
    carry = (kv, vary_over(frozenset({axis}), partial))
    (kv, partial), _ = lax.scan(step, carry, length=p - 1)
    return merge(partial, attend(kv))
