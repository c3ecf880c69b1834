"""The model: an embedding, a repeating pattern of blocks, a norm, and logits.

One forward serves training, prefill and decode; its `ForwardInfo` argument says which positions tokens have and how
they attend.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from treering.configs.errors import UserError
from treering.configs.mesh import divisors
from treering.configs.model import ModelConfig
from treering.layers.nn.attention import Attention, ForwardInfo
from treering.layers.nn.embed import Embedding
from treering.layers.nn.linear import Linear
from treering.layers.nn.mlp import SwiGLU
from treering.layers.nn.norm import RMSNorm
from treering.layers.operations.pool import PagePool
from treering.layers.parallel.sharding import Plan, stacked_field


class Block(eqx.Module):
    """Attention and an MLP, each behind a norm and added to the residual."""

    attention_norm: RMSNorm
    attention: Callable[..., Any]
    """`layers.nn.attention.Attention`, or a family's own layer with the same signature."""
    mlp_norm: RMSNorm
    mlp: SwiGLU

    def __call__(
        self, x: Float[Array, "batch seq embed"], info: ForwardInfo, state: Any, layer: Int[Array, ""] | int
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        """The residual after this block, and the block's state after these tokens."""
        mixed, state = self.attention(self.attention_norm(x), info, state, layer)
        x = x + mixed
        x = x + self.mlp(self.mlp_norm(x))
        return info.plan.constrain(x, "batch seq embed"), state


class Stacked(eqx.Module):
    """The blocks of each place in the pattern stacked over periods, run by one scan: compiles once, trains."""

    pattern: tuple[Any, ...] = stacked_field()
    tail: tuple[Any, ...] = ()
    """The blocks of an incomplete last period, each by itself. If they were stacked with the others, the scan would
    have to slice them off, and XLA copies slices."""

    @property
    def periods(self) -> int:
        """How often the whole pattern repeats."""
        return jax.tree.leaves(self.pattern)[0].shape[0]

    def __call__(self, x: Array, info: ForwardInfo, states: tuple[Any, ...]) -> tuple[Array, tuple[Any, ...]]:
        """Runs all layers in order. States are the scan's carry, so they are updated in place."""

        arrays, static = eqx.partition(self.pattern, eqx.is_array)

        def period(carry, inputs):
            x, states = carry
            arrays, index = inputs
            return _run_blocks(eqx.combine(arrays, static), x, info, states, index), None

        def last(x, states):
            return _run_blocks(self.tail, x, info, states, 0)

        if info.remat is not None:
            period, last = info.remat(period), info.remat(last)
        whole, tail = states[: len(self.pattern)], states[len(self.pattern) :]
        (x, whole), _ = jax.lax.scan(period, (x, whole), (arrays, jnp.arange(self.periods)))
        if self.tail:
            x, tail = last(x, tail)
        return x, whole + tail


class Unrolled(eqx.Module):
    """The same blocks as separate arrays, run one after the other.

    XLA on CPU copies each layer's slice out of stacked weights; separate arrays decode 1.5 to 2.5 times faster there.
    """

    pattern: tuple[tuple[Any, ...], ...]
    """For each place in the pattern, the blocks of all periods."""
    tail: tuple[Any, ...] = ()
    """The blocks of an incomplete last period."""

    @property
    def periods(self) -> int:
        """How often the whole pattern repeats."""
        return len(self.pattern[0])

    def __call__(self, x: Array, info: ForwardInfo, states: tuple[Any, ...]) -> tuple[Array, tuple[Any, ...]]:
        """Runs all layers in order."""
        whole, tail = states[: len(self.pattern)], states[len(self.pattern) :]
        for index, blocks in enumerate(zip(*self.pattern, strict=True)):
            x, whole = _run_blocks(blocks, x, info, whole, index)
        x, tail = _run_blocks(self.tail, x, info, tail, 0)
        return x, whole + tail


def _run_blocks(blocks: Sequence[Any], x: Array, info: ForwardInfo, states: tuple[Any, ...], index: Any):
    after = []
    for block, state in zip(blocks, states, strict=True):
        x, state = block(x, info, state, index)
        after.append(state)
    return x, tuple(after)


def unroll(blocks: Stacked) -> Unrolled:
    """The separate-array form; slices the stacked arrays one leaf at a time, on their devices."""
    arrays, static = eqx.partition(blocks.pattern, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    split = jax.jit(lambda leaf: tuple(leaf[i] for i in range(leaf.shape[0])))
    parts = [split(leaf) for leaf in leaves]
    periods = [jax.tree.unflatten(structure, [part[i] for part in parts]) for i in range(blocks.periods)]
    return Unrolled(tuple(zip(*(eqx.combine(period, static) for period in periods), strict=True)), blocks.tail)


class Transformer(eqx.Module):
    """A decoder-only model, whose blocks a family builds from `config`."""

    embed: Any
    """`layers.nn.embed.Embedding`, or a family's own module with the same methods and a `table`."""
    blocks: Stacked | Unrolled
    norm: Callable[[Array], Array]
    """`layers.nn.norm.RMSNorm`, or a family's own."""
    output: Linear | None
    """The output projection, or None where it is the embedding table."""
    config: ModelConfig = eqx.field(static=True)

    def layers_at(self, place: int) -> range:
        """The numbers of the layers that are stacked at a place of the repeating pattern."""
        period = len(self.blocks.pattern)
        return range(place, period * self.blocks.periods, period)

    def unrolled(self, *, rows: int = 1) -> "Transformer":
        """The same model with its blocks as separate arrays.

        Where one CPU device decodes several `rows` at a time, their weights are stored with input dims first.
        """
        if isinstance(self.blocks, Unrolled):
            return self
        blocks = self.blocks
        if rows > 1:
            blocks = jax.tree.map(
                lambda node: node.inputs_first() if isinstance(node, Linear) else node,
                blocks,
                is_leaf=lambda node: isinstance(node, Linear),
            )
        return dataclasses.replace(self, blocks=unroll(blocks))

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        info: ForwardInfo,
        states: tuple[Any, ...] | None = None,
        *,
        dtype: jnp.dtype = jnp.float32,
    ) -> tuple[Float[Array, "batch seq embed"], tuple[Any, ...]]:
        """Final hidden states of `tokens`, computed in `dtype`, and the decode states after them.

        `states` has one entry per place of the pattern, and one per block of an incomplete period; None trains.
        """
        states = (None,) * len(self.blocks.pattern + self.blocks.tail) if states is None else states
        x = self.embed(tokens, info.plan, dtype)
        x = info.plan.constrain(x, "batch seq embed")
        x, states = self.blocks(x, info, states)
        return self.norm(x), states

    def unembed(self, x: Float[Array, "batch seq embed"], info: ForwardInfo) -> Float[Array, "batch seq vocab"]:
        """Logits of hidden states, in their dtype, split over the vocabulary."""
        logits = self.embed.unembed(x) if self.output is None else self.output(x)
        return info.plan.constrain(logits, "batch seq vocab")


def dim_sizes(config: ModelConfig) -> dict[str, int]:
    """The size of every dim that the architecture fixes."""
    return {dim: getattr(config, dim) for dim in ("vocab", "embed", "heads", "kv_heads", "head_dim", "mlp")}


def check_mesh(config: ModelConfig, plan: Plan) -> None:
    """Raises UserError where the tensor axis does not divide what it splits, listing the sizes that do."""
    tensor = plan.size("tensor")
    required = {dim: getattr(config, dim) for dim in ("kv_heads", "heads", "mlp")}
    failing = [f"{dim} {size}" for dim, size in required.items() if size % tensor]
    if failing:
        raise UserError(
            f"it must divide {', '.join(failing)}; the context axis splits attention for any number of heads",
            field="mesh.tensor",
            value=tensor,
            works=divisors(math.gcd(*required.values())),
        )


def _shared_attention(config: ModelConfig, key: PRNGKeyArray) -> Attention:
    return Attention.init(dim_sizes(config), rope=config.rope, key=key)


def init_block(
    config: ModelConfig,
    *,
    attention: Callable[[PRNGKeyArray], Callable[..., Any]] | None = None,
    key: PRNGKeyArray,
) -> Block:
    """One block of the shared architecture with random weights; `attention` makes a family's own layer from a key."""
    sizes = dim_sizes(config)
    if attention is None:
        attention = functools.partial(_shared_attention, config)
    attention_key, mlp_key = jax.random.split(key)
    return Block(
        attention_norm=RMSNorm.init("embed", config.embed, eps=config.norm_eps),
        attention=attention(attention_key),
        mlp_norm=RMSNorm.init("embed", config.embed, eps=config.norm_eps),
        mlp=SwiGLU.init(sizes, key=mlp_key),
    )


def init_transformer(config: ModelConfig, pattern: Sequence[Any], *, key: PRNGKeyArray) -> Transformer:
    """A model whose blocks repeat `pattern`, functions from a key to a block, one per place.

    The last repetition may be incomplete. With fewer layers than places, the model is the beginning of the pattern.
    """
    pattern = pattern[: config.layers]
    periods, more = divmod(config.layers, len(pattern))
    embed_key, output_key, blocks_key = jax.random.split(key, 3)
    keys = jax.random.split(blocks_key, (len(pattern), periods))
    rest_keys = jax.random.split(jax.random.fold_in(blocks_key, periods), max(more, 1))
    output = None
    if not config.tie_embeddings:
        output = Linear.init("embed -> vocab", dim_sizes(config), key=output_key)
    return Transformer(
        embed=Embedding.init(config.vocab, config.embed, key=embed_key),
        blocks=Stacked(
            tuple(eqx.filter_vmap(make)(place) for make, place in zip(pattern, keys, strict=True)),
            tuple(make(key) for make, key in zip(pattern[:more], rest_keys, strict=False)),
        ),
        norm=RMSNorm.init("embed", config.embed, eps=config.norm_eps),
        output=output,
        config=config,
    )


def empty_pools(model: Transformer, *, pages: int, page_tokens: int, dtype: jnp.dtype) -> tuple[PagePool, ...]:
    """The states of the model's layers: one pool per place of the pattern, then one per block of `tail`."""
    config, blocks = model.config, model.blocks
    return tuple(
        PagePool.empty(
            layers=layers,
            pages=pages,
            kv_heads=config.kv_heads,
            page_tokens=page_tokens,
            head_dim=config.head_dim,
            dtype=dtype,
        )
        for layers in [blocks.periods] * len(blocks.pattern) + [1] * len(blocks.tail)
    )
