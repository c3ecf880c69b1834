"""Cases of attention and how they are checked: a core set, and an array that covers every pair of factors.

A case is one compiled program, run on each of its `data_sets`. Errors are max |difference| / max |float64 result of the
same rounded inputs|.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from treering.layers.attention.dense import dense_partial
from treering.layers.attention.distributed.arguments import TokenData
from treering.layers.attention.mask import Mask
from treering.layers.attention.order import Order, from_order, order_divisor, to_order
from treering.layers.attention.partial import Partial

MASKS = {
    "none": Mask(causal=False),
    "causal": Mask(),
    "data": Mask(),
    "window5": Mask(window=5),
    "window20": Mask(window=20),
    "softcap": Mask(softcap=2.0, scale=0.3),
}
"""By name. "data" is causal too, with positions and segments given when the program runs: see `data_sets`."""


@dataclass(frozen=True)
class Case:
    """One compiled program.

    `tile` limits the local kernel's tiles; `queries` says how many there are, the sequence's last (0 for all).
    """

    algorithm: str = "ring"
    p: int = 1
    side: str = "none"
    batch: int = 1
    length: int = 128
    queries: int = 0
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 8
    mask: str = "causal"
    order: Order = "contiguous"
    dtype: str = "float64"
    tile: int = 256

    def __str__(self) -> str:
        heads, kv_heads = self.heads
        queries = f"q{self.queries}" if self.queries else ""
        side = "" if self.side == "none" else f"-{self.side}"
        return (
            f"{self.algorithm}{self.p}{side}-{self.batch}x{self.length}{queries}-{heads}/{kv_heads}x{self.head_dim}"
            f"-{self.mask}-{self.order}-{self.dtype}-t{self.tile}"
        )

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes other than context."""
        return {"none": {}, "data": {"data": 2}, "tensor": {"tensor": 2}, "both": {"data": 2, "tensor": 2}}[self.side]

    def is_possible(self) -> bool:
        """Whether the factors go together."""
        sides = int(np.prod(list(self.axes.values()))) if self.axes else 1
        local = self.algorithm == "local"
        return (
            self.p * sides <= 8
            and not (local and (self.p, self.side, self.order) != (1, "none", "contiguous"))
            and not (self.queries and not local)
            and self.queries <= self.length
            and not ("data" in self.axes and self.batch % 2)
            and not ("tensor" in self.axes and any(n % 2 for n in self.heads))
        )


FACTORS: dict[str, tuple] = {
    "algorithm": ("ring", "gather", "local"),
    "p": (1, 2, 3, 4, 5, 8),
    "side": ("none", "data", "tensor", "both"),
    "batch": (1, 2, 3),
    "length": (1, 3, 31, 97, 128, 384, 1024),
    "queries": (0, 1, 3),
    "heads": ((8, 8), (8, 2), (8, 1), (16, 8), (5, 5)),
    "head_dim": (8, 40, 59, 64, 128),
    "mask": tuple(MASKS),
    "order": ("contiguous", "zigzag", "striped"),
    "dtype": ("float64", "float32", "bfloat16"),
    "tile": (16, 64, 256),
}

CORE = (
    Case("local", length=97, batch=2, mask="data", tile=16),
    Case("local", length=384, heads=(16, 8), head_dim=64, tile=64),
    Case("local", length=384, queries=3, heads=(8, 1), head_dim=40, mask="data", batch=3, dtype="float32"),
    Case("ring", 8, length=384, order="zigzag", tile=16),
    Case("ring", 4, "tensor", batch=2, length=1024, order="zigzag", head_dim=64, dtype="float32"),
    Case("ring", 3, length=97, mask="data", batch=2, heads=(5, 5), order="zigzag", tile=16),
    Case("ring", 5, length=31, mask="window5", order="striped"),
    Case("ring", 8, length=3, batch=2, heads=(8, 1), head_dim=59),
    Case("ring", 2, "both", batch=2, length=128, order="zigzag", head_dim=40, mask="softcap", tile=16),
    Case("gather", 8, length=128, mask="data", order="zigzag", batch=2, tile=16),
    Case("gather", 4, "data", batch=2, length=97, mask="none", head_dim=128, dtype="float32"),
)


def covering_array(limit: int | None = None, *, seed: int = 29, start: tuple[Case, ...] = CORE) -> tuple[Case, ...]:
    """`start` and more cases, so that each pair of levels that can be in one case is; the same each time."""
    rng = np.random.default_rng(seed)
    names = list(FACTORS)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if _completed({a: x, b: y}, np.random.default_rng(0)) is not None
    }
    cases = list(start)
    for case in cases:
        missing -= set(_pairs(case))
    while missing and (limit is None or len(cases) < limit):
        wanted = sorted(missing, key=str)
        seeds = [wanted[rng.integers(len(wanted))] for _ in range(8)]
        candidates = [_completed(dict(pair), rng, missing) for pair in seeds]
        best = max((case for case in candidates if case), key=lambda case: len(missing & set(_pairs(case))))
        cases.append(best)
        missing -= set(_pairs(best))
    return tuple(cases)


def _pairs(case: Case) -> Iterator[tuple]:
    levels = [(field.name, getattr(case, field.name)) for field in fields(case)]
    return itertools.combinations(levels, 2)


def _completed(chosen: dict[str, Any], rng: np.random.Generator, missing: set | None = None) -> Case | None:
    """A possible case with the chosen levels, the others such that many missing pairs are met; None without one."""
    for _ in range(30):
        levels = dict(chosen)
        for name in rng.permutation([name for name in FACTORS if name not in levels]).tolist():
            options = [FACTORS[name][i] for i in rng.permutation(len(FACTORS[name]))]
            if missing is not None and rng.random() < 0.9:
                options.sort(key=lambda x: -sum(_key(name, x, other, y) in missing for other, y in levels.items()))
            levels[name] = next((x for x in options if _may_extend({**levels, name: x})), options[0])
        case = Case(**levels)
        if case.is_possible():
            return case
    return None


def _key(a: str, x: Any, b: str, y: Any) -> tuple:
    names = list(FACTORS)
    return ((a, x), (b, y)) if names.index(a) < names.index(b) else ((b, y), (a, x))


_NEUTRAL = Case(p=1, side="none", batch=2, length=1024, queries=0, heads=(8, 8), order="contiguous")


def _may_extend(levels: dict[str, Any]) -> bool:
    """Whether the levels so far can still become a case: tried with the most permissive others."""
    tries = [replace(_NEUTRAL, **levels)]
    if "algorithm" not in levels:
        tries.append(replace(_NEUTRAL, **levels, algorithm="local"))
    return any(case.is_possible() for case in tries)


def data_sets(case: Case, padded: int) -> dict[str, dict[str, np.ndarray]]:
    """Positions and segments `[batch padded]`, in token order, by name; {} where the order gives them.

    `padded` tokens are the case's length and what its order needs in addition, which is padding in each set.
    """
    shape = (case.batch, padded)
    index = np.broadcast_to(np.arange(padded), shape)
    real = index < case.length
    if case.mask != "data":
        return {"plain": {} if padded == case.length else {"segments": real.astype(np.int32)}}
    rng = np.random.default_rng(7)
    cuts = np.sort(rng.integers(0, case.length + 1, (case.batch, 4)), axis=1)
    documents = 1 + (index[:, :, None] >= cuts[:, None, :]).sum(-1)
    starts = np.array([[np.argmax(row == n) for n in row] for row in documents])
    share = -(-padded // case.p)
    holes = rng.random(shape) < 0.2
    holes[:, share * (case.p // 2) : share * (case.p // 2 + 1)] = True
    sets = {
        "one document": (index, np.ones(shape)),
        "padded": (index, index < case.length - case.length // 3),
        "five documents": (index - starts, documents),
        "a row of padding": (index, np.where(np.arange(case.batch)[:, None] == 0, 0, documents)),
        "a shard of padding": (np.where(holes, -1, index), np.where(holes, 0, documents)),
        "any positions": (rng.integers(-1, case.length, shape), rng.integers(0, 3, shape)),
    }
    return {
        name: {"positions": positions.astype(np.int32), "segments": np.where(real, segments, 0).astype(np.int32)}
        for name, (positions, segments) in sets.items()
    }


TOLERANCE = {"float64": (1e-13, 1e-13), "float32": (2e-6, 5e-6), "bfloat16": (3e-3, 3e-3)}
"""Of values and of gradients, where no score is above 20; bfloat16's is of the root mean square."""


def error(got: Any, want: Any, *, mean_square: bool = False) -> float:
    """Of finite numbers; infinities must agree and NaN is refused."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert not np.isnan(got).any(), "NaN"
    assert (np.isinf(got) == np.isinf(want)).all(), "infinities differ"
    finite = np.isfinite(want)
    if not finite.any():
        return 0.0
    difference, size = np.abs(got[finite] - want[finite]), np.abs(want[finite])
    if mean_square:
        difference, size = np.sqrt(np.mean(difference**2)), np.sqrt(np.mean(size**2))
    return float(np.max(difference) / np.maximum(np.max(size), 1e-30))


Results = tuple[Partial, tuple[jax.Array, jax.Array, jax.Array]]


def with_gradients(attend: Callable[..., Partial], cotangent: Partial, q, k, v, data) -> Results:
    """out and lse, and the gradients of q, k, v for cotangents of both."""
    partial, pull = jax.vjp(lambda q, k, v: attend(q, k, v, data), q, k, v)
    return partial, pull(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangent, partial))


def errors(got: Results, want: Results, *, mean_square: bool = False) -> dict[str, float]:
    """By name: out, lse, dq, dk, dv."""
    pairs = zip((got[0].out, got[0].lse, *got[1]), (want[0].out, want[0].lse, *want[1]), strict=True)
    return {
        name: error(x, y, mean_square=mean_square)
        for name, (x, y) in zip(("out", "lse", "dq", "dk", "dv"), pairs, strict=True)
    }


def check(case: Case, make_mesh: Callable[..., Mesh], *, scales: tuple[float, ...] = (1.0,)) -> None:
    """Values and gradients of a case, on each of its data sets, against dense attention in float64.

    `scales` multiply the queries, and so the scores.
    """
    from treering.layers.attention.distributed.gather import gather_partial
    from treering.layers.attention.distributed.ring import ring_partial
    from treering.layers.attention.local import local_attention

    mask = MASKS[case.mask]
    divisor = 1 if case.order == "contiguous" else order_divisor(case.order, case.p)
    padded = -(-case.length // divisor) * divisor
    queries = case.queries or padded
    heads, kv_heads = case.heads
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(case.batch, length, n, case.head_dim)), case.dtype)
        for length, n in ((queries, heads), (padded, kv_heads), (padded, kv_heads), (queries, heads))
    )
    d_lse = jnp.asarray(rng.normal(size=(case.batch, queries, heads)), jnp.promote_types(case.dtype, "float32"))
    cotangent = Partial(d_out, d_lse)

    def by_side(data):
        sides: dict[str, Any] = {f"q_{name}": x[:, padded - queries :] for name, x in data.items()}
        return sides | {f"kv_{name}": x for name, x in data.items()}

    def subject(q, k, v, data):
        if case.algorithm == "local":
            return local_attention(q, k, v, mask=mask, **by_side(data))
        attend = {"ring": ring_partial, "gather": gather_partial}[case.algorithm]
        mesh = make_mesh(context=case.p, **case.axes)
        q, k, v, data = jax.tree.map(lambda x: to_order(x, case.order, case.p), (q, k, v, data))
        partial = attend(q, k, v, on=mesh, mask=mask, tokens=TokenData(**data, order=case.order))
        return jax.tree.map(lambda x: from_order(x, case.order, case.p), partial)

    def oracle(q, k, v, data):
        return dense_partial(q, k, v, mask=mask, **by_side(data))

    run = jax.jit(lambda *args: with_gradients(subject, cotangent, *args))
    # The oracle runs once or a few times: what it compiles to may be slow.
    reference = jax.jit(
        lambda *args: with_gradients(oracle, jax.tree.map(_wide, cotangent), *args),
        compiler_options={"xla_backend_optimization_level": 1},
    )
    bf16 = case.dtype == "bfloat16"
    for (name, data), scale in itertools.product(data_sets(case, padded).items(), scales):
        if queries != padded and not data:
            data = {"positions": np.broadcast_to(np.arange(padded, dtype=np.int32), (case.batch, padded))}
        data = jax.tree.map(jnp.asarray, data)
        scaled = q * scale
        got, want = run(scaled, k, v, data), reference(_wide(scaled), _wide(k), _wide(v), data)
        assert got[0].out.dtype == q.dtype
        value, gradient = TOLERANCE[case.dtype]
        for part, size in errors(got, want, mean_square=bf16).items():
            # Scores of normal queries and keys reach about 5 in these cases; the bars hold up to 20.
            bar = max(1.0, scale * 5 / 20) * (value if part in ("out", "lse") else gradient)
            assert size <= bar, f"{part} on {name}, scale {scale}: {size:.2e} > {bar:.2e}"


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64)
