"""Orders of tokens over a mesh axis.

An order says which tokens each rank holds, and in which places. `contiguous` gives each rank one run of tokens.
`zigzag` cuts the sequence into 2 p chunks and gives rank r chunks r and 2 p - 1 - r, so that causal attention costs
every rank the same. `striped` gives token t to rank t mod p (arXiv 2311.09431): balanced at every
length, and a sequence can grow without moving a token.
"""

from typing import Literal, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

Order = Literal["contiguous", "zigzag", "striped"]
ORDERS: tuple[Order, ...] = get_args(Order)

AnyArray = TypeVar("AnyArray", np.ndarray, jax.Array)


def order_divisor(order: str, p: int) -> int:
    """What the length must be a multiple of, so that `p` ranks hold equal shares in `order`.

    Raises ValueError for an unknown order, and for less than 1 rank.
    """
    if order not in ORDERS:
        raise ValueError(f"order {order!r}: the orders are {', '.join(ORDERS)}")
    if p < 1:
        raise ValueError(f"p {p}: there must be at least 1 rank")
    return 2 * p if order == "zigzag" else p


def check_order(order: Order, p: int, length: int) -> None:
    """Raises ValueError, naming lengths that work, where `p` ranks cannot split `length` tokens in `order`."""
    divisor = order_divisor(order, p)
    if length % divisor:
        below, above = length // divisor * divisor, -(-length // divisor) * divisor
        works = f"{below} and {above}" if below else f"{above}"
        raise ValueError(
            f"seq {length} in {order} order over {p} devices: it must be a multiple of {divisor} (nearest: {works}; "
            f"pad in token order with segment 0, then reorder)"
        )


def rank_positions(order: Order, p: int, rank: int | Int[Array, ""], local_seq: int) -> Int[Array, "local_seq"]:
    """The token positions that `rank` (traced or not) holds, in its order; `local_seq` tokens per rank."""
    places = jnp.arange(local_seq, dtype=jnp.int32)
    if order == "contiguous":
        return places + rank * local_seq
    if order == "striped":
        return places * p + rank
    chunk = local_seq // 2
    return jnp.where(places < chunk, places + rank * chunk, places + (2 * p - 2 - rank) * chunk)


def order_positions(order: Order, p: int, length: int) -> Int[Array, "seq"]:
    """The token position of each place of a sequence in `order`, ranks in turn: `to_order(arange(length), ...)`."""
    check_order(order, p, length)
    ranks = jnp.arange(p, dtype=jnp.int32)
    return jax.vmap(lambda rank: rank_positions(order, p, rank, length // p))(ranks).reshape(length)


def to_order(x: AnyArray, order: Order, p: int, *, dim: int = 1) -> AnyArray:
    """Moves the tokens along `dim` from token order into `order` for `p` ranks. NumPy in, NumPy out.

    Contiguous order is token order. Raises ValueError where the length does not divide: pad before reordering.
    """
    if order == "contiguous":
        return x
    dim = _from_the_front(x, dim)
    check_order(order, p, x.shape[dim])
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    local_seq = x.shape[dim] // p
    if order == "striped":
        return x.reshape(*before, local_seq, p, *after).swapaxes(dim, dim + 1).reshape(x.shape)
    chunks = x.reshape(*before, 2, p, local_seq // 2, *after)
    early, late = _halves(chunks, dim)
    return _stack(early, _reversed(late, dim), dim + 1).reshape(x.shape)


def from_order(x: AnyArray, order: Order, p: int, *, dim: int = 1) -> AnyArray:
    """Moves the tokens along `dim` back into token order: the inverse of `to_order`."""
    if order == "contiguous":
        return x
    dim = _from_the_front(x, dim)
    check_order(order, p, x.shape[dim])
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    local_seq = x.shape[dim] // p
    if order == "striped":
        return x.reshape(*before, p, local_seq, *after).swapaxes(dim, dim + 1).reshape(x.shape)
    early, late = _halves(x.reshape(*before, p, 2, local_seq // 2, *after), dim + 1)
    return _stack(early, _reversed(late, dim), dim).reshape(x.shape)


def striped_token_at(starts: Int[Array, "batch"], p: int, length: int) -> Int[Array, "batch seq"]:
    """The token at each place of runs of `length` tokens in striped order over `p` ranks, ranks in turn.

    Row b's run begins at position `starts[b]`, and position t is on rank t mod p, so a run that continues another is in
    the same striped order. `length` is a multiple of p.
    """
    ranks, places = jnp.arange(p, dtype=jnp.int32), jnp.arange(length // p, dtype=jnp.int32)
    first = (ranks[None, :] - starts[:, None]) % p
    return (places[None, None, :] * p + first[:, :, None]).reshape(starts.shape[0], length)


def striped_slot_of(
    starts: Int[Array, "batch"], p: int, length: int, tokens: Int[Array, "batch"]
) -> Int[Array, "batch"]:
    """The place of one token of each run: the inverse of `striped_token_at`."""
    return (starts + tokens) % p * (length // p) + tokens // p


def _from_the_front(x: AnyArray, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim {dim}: x of shape {x.shape} has dims {-x.ndim} to {x.ndim - 1}")
    return dim % x.ndim


def _halves(x: AnyArray, dim: int) -> tuple[AnyArray, AnyArray]:
    index = (slice(None),) * dim
    return x[(*index, 0)], x[(*index, 1)]


def _reversed(x: AnyArray, dim: int) -> AnyArray:
    return x[(*(slice(None),) * dim, slice(None, None, -1))]


def _stack(first: AnyArray, second: AnyArray, dim: int) -> AnyArray:
    xp = np if isinstance(first, np.ndarray) else jnp
    return cast(AnyArray, xp.stack([first, second], dim))
