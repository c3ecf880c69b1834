"""How partial results travel over the context axis: the schemes of `tree_combine`, and which one to take."""

from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from treering.layers.attention.checks import divisors

Scheme = Literal["all_to_all", "all_gather", "two_level", "two_level_gather"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
HEAD_SHARDED: frozenset[Scheme] = frozenset({"all_to_all", "two_level"})
"""Schemes whose result is each device's part of the heads; the others replicate it over the axis."""
LAUNCH_BYTES_NEAR = 9_000_000
LAUNCH_BYTES_FAR = 1_000_000
"""Bytes that a link moves in the time one more collective takes to start: 20 us at 450 GB/s, and at 50 GB/s."""


def choose_scheme(
    *,
    p: int,
    batch: int,
    seq: int,
    heads: int,
    head_dim: int,
    itemsize: int,
    inner: int | None = None,
    head_sharded: bool = True,
    launch_bytes: int | None = None,
) -> Scheme:
    """The scheme for `p` devices: one message, unless a second saves more time on links than it takes to start.

    `heads` are those of one tensor shard, `itemsize` the bytes of an output number on the wire, `inner` how many
    neighbours on the axis share fast links (None for all), `head_sharded` whether the caller takes each device's part
    of the heads. `launch_bytes` is what the slowest link moves while a collective starts.
    """
    inner = p if inner is None else inner
    far = inner < p
    if inner != p:
        _check_inner(p, inner, 1)
    if launch_bytes is None:
        launch_bytes = LAUNCH_BYTES_FAR if far else LAUNCH_BYTES_NEAR
    message = batch * seq * heads * (head_dim * itemsize + 4)
    groups = p // inner
    grouped = far and inner > 1
    if head_sharded and heads % p == 0:
        # Over slow links: message / p from each device of other groups, or one joined part from each group.
        saved = (p - inner - (groups - 1)) * message // p
        return "two_level" if grouped and saved > launch_bytes else "all_to_all"
    whole = (p - inner if grouped else p - 1) * message
    joined = (groups - 1) * message if grouped else 2 * (p - 1) * message // p
    return "two_level_gather" if p > 1 and whole - joined > launch_bytes else "all_gather"


def check_scheme(scheme: str, *, p: int, heads: int, inner: int | None = None) -> None:
    """Raises ValueError, naming what would work, where `scheme` does not fit `p` devices and a shard's `heads`."""
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme!r}: the schemes are {', '.join(SCHEMES)}")
    if scheme in HEAD_SHARDED and heads % p:
        raise ValueError(
            f"scheme {scheme!r} splits heads over the context axis, and its size {p} does not divide the {heads} heads "
            f"of a tensor shard (sizes that work: {divisors(heads)}; scheme 'all_gather' takes any)"
        )
    if scheme == "two_level":
        _check_inner(p, p if inner is None else inner, 2, below=True)
    elif scheme == "two_level_gather":
        _check_inner(p, p if inner is None else inner, 1)
    elif inner is not None and not (1 <= inner <= p and p % inner == 0):
        _check_inner(p, inner, 1)


def _check_inner(p: int, inner: int, least: int, *, below: bool = False) -> None:
    works = [n for n in range(least, p + (not below)) if p % n == 0]
    if inner not in works:
        sizes = ", ".join(map(str, works)) or f"none for {p} devices; take 'all_to_all' or 'all_gather'"
        raise ValueError(
            f"inner {inner}: groups of inner neighbours must cut the context axis of {p} devices evenly "
            f"(sizes that work: {sizes})"
        )


def wire_dtype_or(default: jnp.dtype, asked: DTypeLike | None) -> jnp.dtype:
    """What outputs travel as. Raises ValueError where that holds no fractions."""
    wire = default if asked is None else jnp.dtype(asked)
    if not jnp.issubdtype(wire, jnp.floating):
        raise ValueError(f"wire_dtype {wire}: it must be floating, such as bfloat16 or float32")
    return wire
