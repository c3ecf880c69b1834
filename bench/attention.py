"""Local, ring and gather attention compared with each other and with torch: `python -m bench.attention`.

Causal attention, one row, float32: local attention compared with torch's scaled_dot_product_attention; ring and gather
on 8 simulated CPU devices compared with local attention on one. CPU time of the process, because the devices share its
cores. In addition the pairs of queries and keys that each device of a ring computes, which the CPU time of all devices
together cannot show.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.report import hlo, in_turn, publish, table, versions

DEVICES = 8
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64


def _arrays(tokens: int) -> list:
    """q, k, v and a cotangent."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((1, tokens, heads, HEAD_DIM), dtype=np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def _pair_of(attend: Callable, q: Any, k: Any, v: Any, d_out: Any) -> tuple[dict[str, Callable], Any]:
    """Forward, and forward with backward, ready to run; and the compiled program of the second."""
    import jax
    import jax.numpy as jnp

    forward = jax.jit(attend).lower(q, k, v).compile()
    gradient = jax.jit(jax.grad(lambda q, k, v, d_out: jnp.sum(attend(q, k, v) * d_out), (0, 1, 2)))
    both = gradient.lower(q, k, v, d_out).compile()
    runs = {
        "forward": lambda: jax.block_until_ready(forward(q, k, v)),
        "forward + backward": lambda: jax.block_until_ready(both(q, k, v, d_out)),
    }
    return runs, both


def _torch(tokens: int) -> dict[str, Callable]:
    """The same work in torch, both passes."""
    import torch

    q, k, v, d_out = (torch.tensor(x).transpose(1, 2).contiguous() for x in _arrays(tokens))
    leaves = q, k, v = tuple(x.requires_grad_() for x in (q, k, v))

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward():
        with torch.no_grad():
            attend()

    def both():
        for x in leaves:
            x.grad = None
        attend().backward(d_out)

    return {"forward": forward, "forward + backward": both}


def local_beside_torch(rounds_at: dict[int, int]) -> tuple[list[tuple], dict[str, float]]:
    """Rows of the table, and the ratios of CPU time, from a number of rounds at each length.

    To be run in a process of its own, with one device: eight share a pool of threads, which costs a tenth.
    """
    import jax
    import jax.numpy as jnp

    from treering.layers.attention.local import local_attention

    jax.config.update("jax_platforms", "cpu")
    rows, figures = [], {}
    for tokens, rounds in rounds_at.items():
        ours, _ = _pair_of(lambda q, k, v: local_attention(q, k, v).out, *map(jnp.asarray, _arrays(tokens)))
        theirs = _torch(tokens)
        runs = {f"{who} {what}": run for what in ours for who, run in (("ours", ours[what]), ("torch", theirs[what]))}
        cpu = in_turn(runs, rounds, time.process_time)
        for what in ours:
            mine, other = cpu[f"ours {what}"], cpu[f"torch {what}"]
            rows.append((tokens, what, f"{mine * 1e3:.0f}", f"{other * 1e3:.0f}", f"{mine / other:.2f}x"))
            figures[f"{tokens} {what}, local over torch"] = mine / other
    return rows, figures


def devices_beside_one(lengths: list[int], rounds: int, figures: dict[str, float]) -> list[tuple]:
    """Rows of the table, and the ratios of CPU time."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from treering.layers.attention.distributed.arguments import TokenData
    from treering.layers.attention.distributed.gather import gather_attention
    from treering.layers.attention.distributed.ring import ring_attention
    from treering.layers.attention.local import local_attention

    mesh = jax.make_mesh((DEVICES,), ("context",), axis_types=(AxisType.Auto,))
    rows = []
    for tokens in lengths:
        arrays = [jnp.asarray(x) for x in _arrays(tokens)]
        spread = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "context"))) for x in arrays]
        # The work does not depend on which tokens the arrays hold: they are taken as reordered ones.
        segments = jax.device_put(jnp.ones((1, tokens), jnp.int32), NamedSharding(mesh, PartitionSpec(None, "context")))
        ways: dict[str, tuple] = {
            "local, one device": _pair_of(lambda q, k, v: local_attention(q, k, v).out, *arrays),
            "ring, zigzag": _pair_of(lambda *x: ring_attention(*x, on=mesh, tokens=TokenData(order="zigzag")), *spread),
            "ring, zigzag with segments": _pair_of(
                lambda *x, s=segments: ring_attention(*x, on=mesh, tokens=TokenData(segments=s, order="zigzag")),
                *spread,
            ),
            "ring, striped": _pair_of(
                lambda *x: ring_attention(*x, on=mesh, tokens=TokenData(order="striped")), *spread
            ),
            "gather, zigzag": _pair_of(
                lambda *x: gather_attention(*x, on=mesh, tokens=TokenData(order="zigzag")), *spread
            ),
        }
        runs = {(way, what): run for way, (both, _) in ways.items() for what, run in both.items()}
        cpu = in_turn({f"{way}: {what}": run for (way, what), run in runs.items()}, rounds, time.process_time)
        for way, (both, program) in ways.items():
            read = hlo().read(program)
            sent = ", ".join(f"{n} {kind}" for kind, n in read.launches(loops=1).items()) or "none"
            ratios = [cpu[f"{way}: {what}"] / cpu[f"local, one device: {what}"] for what in both]
            seconds = [f"{cpu[f'{way}: {what}']:.2f}" for what in both]
            rows.append((tokens, way, *seconds, *(f"{x:.2f}x" for x in ratios), sent))
            figures[f"{tokens} forward + backward, {way} over local"] = ratios[1]
    return rows


def computed_pairs(
    mesh: Any, order: Any, mask: Any, local_seq: int, segments: Any = None, *, branch_free: bool = False
) -> Any:
    """Pairs of a query and a key that each device of a ring computes for one head: `[context]`.

    All pairs of each tile that it visits count, by either schedule. `segments` are `[1 context*local_seq]`, in `order`.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec

    from treering.layers.attention.distributed.arguments import TokenData
    from treering.layers.attention.distributed.ring_schedule import RingSchedule
    from treering.layers.attention.distributed.token_layout import TokenLayout
    from treering.layers.attention.kernels.xla import computed_pairs as in_kernel
    from treering.layers.attention.varying import vary_over

    def on_device(segments, kv_segments):
        own, everyone = (TokenData(segments=x, order=order) for x in (segments, kv_segments))
        tokens = TokenLayout.of_device("context", 1, local_seq, own, everyone)
        steps = RingSchedule(tokens, mask, "context", local_seq, branch_free=branch_free)
        total = jnp.zeros(1, jnp.int32)
        for step in range(mesh.shape["context"]):
            part = steps.first() if step == 0 else steps.later(step)
            q = jax.eval_shape(part.queries, jax.ShapeDtypeStruct((1, 1, 1, local_seq, 1), jnp.float32))
            kv = jax.eval_shape(part.keys, jax.ShapeDtypeStruct((2, 1, 1, local_seq, 1), jnp.float32))
            total += in_kernel(q.shape, kv.shape[3], part.block, mask)
        return vary_over(frozenset({"context"}), total)

    specs = (PartitionSpec(None, "context"), PartitionSpec())
    run = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("context"))
    return np.asarray(jax.jit(run)(segments, segments))


def balance(local_seq: int, figures: dict[str, float]) -> list[tuple]:
    """Rows of the table: the busiest device's pairs over the mean, and all pairs over those of causal attention."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType

    from treering.layers.attention.mask import Mask
    from treering.layers.attention.order import to_order

    mesh = jax.make_mesh((DEVICES,), ("context",), axis_types=(AxisType.Auto,))
    tokens = local_seq * DEVICES
    rng = np.random.default_rng(0)
    cuts = {
        "causal": np.array([], int),
        "4 equal documents": np.arange(1, 4) * tokens // 4,
        "32 documents of random lengths": np.sort(rng.integers(0, tokens, 31)),
    }
    rows = []
    for order in ("contiguous", "zigzag", "striped"):
        for what, starts in cuts.items():
            segments = 1 + (np.arange(tokens)[:, None] >= starts).sum(1).astype(np.int32)
            given = jnp.asarray(to_order(segments[None], order, DEVICES)) if len(starts) else None
            pairs = computed_pairs(mesh, order, Mask(), local_seq, given)
            causal = tokens * (tokens + 1) / 2
            rows.append((order, what, f"{pairs.max() / pairs.mean():.3f}", f"{pairs.sum() / causal:.3f}"))
            figures[f"{order} {what}, busiest over mean"] = float(pairs.max() / pairs.mean())
    return rows


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--long-rounds", type=int, default=5, help="rounds at 8k tokens and more")
    parser.add_argument("--longest", type=int, default=16384, help="tokens of the longest runs")
    arguments = parser.parse_args()

    import jax

    few, many = arguments.long_rounds, arguments.rounds
    rounds_at = {tokens: n for tokens, n in ((2048, many), (8192, few)) if tokens <= arguments.longest}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        beside_torch, figures = pool.submit(local_beside_torch, rounds_at).result()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    over_devices = devices_beside_one([4096], many, figures)
    if arguments.longest >= 16384:
        over_devices += devices_beside_one([16384], few, figures)
    lines = [
        "# Local, ring and gather attention",
        "",
        f"`python -m bench.attention --rounds {many} --long-rounds {few}`: causal, batch 1, {HEADS} heads, {KV_HEADS} "
        f"kv_heads, head_dim {HEAD_DIM}, float32; CPU time of all threads, medians of {many} rounds in turn ({few} at "
        f"8k tokens and more). {versions()}.",
        "",
        "## Local attention and torch's scaled_dot_product_attention",
        "",
        *table(("tokens", "pass", "ours, CPU ms", "torch, CPU ms", "ours over torch"), beside_torch),
        "",
        f"## {DEVICES} simulated devices and local attention on one",
        "",
        "Devices share cores and memory: CPU time shows what each algorithm computes, the launches what it would send "
        "(those of one forward and backward pass, which share their first send).",
        "",
        *table(
            (
                "tokens",
                "algorithm",
                "forward, CPU s",
                "both, CPU s",
                "forward over local",
                "both over local",
                "launches",
            ),
            over_devices,
        ),
        "",
        f"## Pairs that {DEVICES} devices of a ring compute, 2048 tokens each",
        "",
        *table(("order", "row", "busiest over mean", "all over those of causal attention"), balance(2048, figures)),
    ]
    publish("attention", lines, figures)


if __name__ == "__main__":
    main()
