"""Orders of tokens over ranks: exact round trips, and the positions that go with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treering.layers.attention.order import (
    ORDERS,
    from_order,
    order_divisor,
    order_positions,
    rank_positions,
    striped_slot_of,
    striped_token_at,
    to_order,
)


def test_orders_by_hand():
    tokens = np.arange(12)
    assert to_order(tokens, "contiguous", 3, dim=0).tolist() == tokens.tolist()
    assert to_order(tokens, "zigzag", 3, dim=0).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert to_order(tokens, "striped", 3, dim=0).tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("p", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_round_trip_is_exact(order, p, dim):
    shape = [2, 3, 4]
    shape[dim] = order_divisor(order, p) * 3
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    there = to_order(x, order, p, dim=dim)
    assert isinstance(there, np.ndarray)
    assert (from_order(there, order, p, dim=dim) == x).all()
    assert (np.asarray(to_order(jnp.asarray(x), order, p, dim=dim)) == there).all()
    assert (np.asarray(from_order(jnp.asarray(there), order, p, dim=dim)) == x).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("p", [1, 2, 5])
def test_positions_are_the_tokens_moved(order, p):
    length = order_divisor(order, p) * 4
    moved = to_order(np.arange(length), order, p, dim=0)
    assert np.asarray(order_positions(order, p, length)).tolist() == moved.tolist()
    for rank in range(p):
        mine = jax.jit(lambda rank: rank_positions(order, p, rank, length // p))(rank)  # noqa: B023
        assert np.asarray(mine).tolist() == moved.reshape(p, -1)[rank].tolist()


@pytest.mark.parametrize("p", [1, 2, 5])
def test_runs_that_continue_are_on_the_ranks_of_their_positions(p):
    starts, length = jnp.arange(7), 4 * p
    tokens = np.asarray(striped_token_at(starts, p, length))
    assert tokens[0].tolist() == np.asarray(order_positions("striped", p, length)).tolist()
    for start, row in zip(range(7), tokens, strict=True):
        assert sorted(row.tolist()) == list(range(length))
        assert ((start + row) % p == np.repeat(np.arange(p), 4)).all()
        for token in (0, p - 1, length - 1):
            place = striped_slot_of(jnp.array([start]), p, length, jnp.array([token]))
            assert row[int(place[0])] == token


@pytest.mark.parametrize("order", ["zigzag", "striped"])
def test_dims_counted_from_the_end(order):
    x = np.arange(2 * 16 * 16).reshape(2, 16, 16)
    for dim in (1, 2):
        moved = to_order(x, order, 4, dim=dim)
        np.testing.assert_array_equal(to_order(x, order, 4, dim=dim - 3), moved)
        np.testing.assert_array_equal(from_order(moved, order, 4, dim=dim - 3), x)
    with pytest.raises(ValueError, match=r"dim 3: x of shape \(2, 16, 16\) has dims -3 to 2"):
        to_order(x, order, 4, dim=3)
    with pytest.raises(ValueError, match="p 0: there must be at least 1 rank"):
        to_order(x, order, 0)


def test_lengths_that_do_not_divide():
    with pytest.raises(ValueError, match=r"seq 20 in zigzag order over 3 devices.*multiple of 6.*18 and 24"):
        to_order(np.zeros((1, 20)), "zigzag", 3)
    with pytest.raises(ValueError, match=r"seq 3 in striped order over 8 devices.*nearest: 8;"):
        from_order(np.zeros((1, 3)), "striped", 8)
    with pytest.raises(ValueError, match="order 'snake': the orders are contiguous, zigzag, striped"):
        order_divisor("snake", 2)
