"""The attention layer: projections and rotation around whichever attention operation the caller passes in."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from treering.configs.rope import RopeConfig
from treering.layers.attention.mask import Mask
from treering.layers.nn.linear import Linear
from treering.layers.nn.rope import rotate
from treering.layers.parallel.sharding import Plan


@runtime_checkable  # for the checks of annotations in tests
class AttentionOperation(Protocol):
    """How queries meet keys: dense, by a ring, or against a cache. What differs between training and decoding."""

    def __call__(
        self,
        q: Float[Array, "batch seq heads head_dim"],
        k: Float[Array, "batch seq kv_heads head_dim"],
        v: Float[Array, "batch seq kv_heads head_dim"],
        *,
        mask: Mask,
        info: "ForwardInfo",
        state: Any,
        layer: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Any]:
        """Outputs in q's dtype, and the state after these tokens.

        `state` is that of one block of the pattern, stacked over its layers, or None; `layer` is the index of one.
        """
        ...


class ForwardInfo(eqx.Module):
    """What a forward pass knows in addition to its tokens: their positions, and how they attend."""

    positions: Int[Array, "batch seq"]
    """Position of each token in its document; -1 for padding."""
    segments: Int[Array, "batch seq"] | None
    """Document of each token, from 1; 0 for padding. None where a row is one document."""
    attend: AttentionOperation
    plan: Plan = eqx.field(static=True)
    remat: Callable[[Callable], Callable] | None = eqx.field(static=True, default=None)
    """What the function of one period of blocks is wrapped in, such as `jax.checkpoint`; None keeps its activations."""


class Attention(eqx.Module):
    """Grouped-query attention with rotary positions, and norms on queries and keys where a family has them."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    rope: RopeConfig = eqx.field(static=True)
    mask: Mask = eqx.field(static=True)
    q_norm: Callable[[Array], Array] | None = None
    """What normalises each head's query before it is rotated, a module over `head_dim`; None for nothing."""
    k_norm: Callable[[Array], Array] | None = None
    """The same for keys."""

    @staticmethod
    def init(
        sizes: dict[str, int],
        *,
        rope: RopeConfig,
        mask: Mask = Mask(),
        norm: Callable[[], Callable[[Array], Array]] | None = None,
        key: PRNGKeyArray,
    ) -> "Attention":
        """From the sizes of `embed`, `heads`, `kv_heads` and `head_dim`; `norm` makes a norm of queries or keys."""
        q_key, k_key, v_key, out_key = jax.random.split(key, 4)
        sizes = {**sizes, "out_heads": sizes["heads"]}
        return Attention(
            q=Linear.init("embed -> heads head_dim", sizes, key=q_key),
            k=Linear.init("embed -> kv_heads head_dim", sizes, key=k_key),
            v=Linear.init("embed -> kv_heads head_dim", sizes, key=v_key),
            out=Linear.init("out_heads head_dim -> embed", sizes, key=out_key),
            rope=rope,
            mask=mask,
            q_norm=None if norm is None else norm(),
            k_norm=None if norm is None else norm(),
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], info: ForwardInfo, state: Any, layer: Int[Array, ""] | int
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        """The layer's output, and its state after these tokens."""
        q, k = self.q(x), self.k(x)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        q, k = rotate(q, info.positions, self.rope), rotate(k, info.positions, self.rope)
        mixed, state = info.attend(q, k, self.v(x), mask=self.mask, info=info, state=state, layer=layer)
        return self.out(mixed), state
