"""Tree decode compared with other attention over sharded keys: `python -m bench.attention_decode [--tokens 65536]`.

One decoded token, one layer's attention, 8 simulated CPU devices: tree attention in each scheme, the paper's three
all-reduces, plain jit, ring decode; and one pass of local attention over the same keys on one device. CPU time of the
process, because the devices share its cores. Launches and bytes are read from the compiled programs.
"""

import argparse
import time
from typing import Any

from bench.report import hlo, in_turn, publish, table, versions

DEVICES = 8
BATCH, HEADS, KV_HEADS, HEAD_DIM = 1, 32, 8, 128
LOCAL = "local, one device"


def programs(tokens: int) -> dict:
    """Compiled programs and their arguments, each for one token over `tokens` keys."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from bench.baselines import ALL_KEYS, plain_attention, ring_decode, three_all_reduces
    from treering.layers.attention.distributed.tree import tree_attention
    from treering.layers.attention.local import local_attention

    mesh = jax.make_mesh((DEVICES,), ("context",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (BATCH, 1, HEADS, HEAD_DIM))
    k, v = (jax.random.normal(key, (BATCH, tokens, KV_HEADS, HEAD_DIM)) for key in keys[1:])
    spec = PartitionSpec(None, "context")
    everywhere, spread = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, spec)
    packed = NamedSharding(mesh, PartitionSpec(None, None, "context"))

    def compiled(function, *args):
        program = jax.jit(function).lower(*args).compile()
        return program, args

    def paper(q, k, v):
        def per_device(q, k, v):
            part = local_attention(q, k, v, mask=ALL_KEYS, out_dtype=jnp.float32)
            return three_all_reduces(part, "context").out

        return jax.shard_map(per_device, mesh=mesh, in_specs=(PartitionSpec(), spec, spec), out_specs=PartitionSpec())(
            q, k, v
        )

    def ring(q, kv):
        def per_device(q, kv):
            return ring_decode(q, kv, "context").out[None]

        return jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(None, None, "context")),
            out_specs=PartitionSpec("context"),
        )(q, kv)

    sharded = jax.device_put(q, everywhere), jax.device_put(k, spread), jax.device_put(v, spread)
    made = {
        LOCAL: compiled(lambda q, k, v: local_attention(q, k, v, mask=ALL_KEYS).out, q, k, v),
        "plain, one device": compiled(plain_attention, q, k, v),
    }
    for scheme, inner in (("all_to_all", None), ("all_gather", None), ("two_level", 4), ("two_level_gather", 4)):

        def tree(q, k, v, scheme: Any = scheme, inner=inner):
            return tree_attention(q, k, v, on=mesh, scheme=scheme, inner=inner)

        made[f"tree {scheme}"] = compiled(tree, *sharded)
    made["three all-reduces"] = compiled(paper, *sharded)
    made["plain, jit with sharded keys"] = compiled(plain_attention, *sharded)
    made["ring decode"] = compiled(ring, sharded[0], jax.device_put(jnp.stack([k, v]), packed))
    return made


def run(program: Any, args: tuple) -> None:
    """One execution, waited for."""
    program(*args).block_until_ready()


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()

    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rows, figures = [], {}
    for tokens in arguments.tokens:
        made = programs(tokens)
        runs = {
            name: lambda made=made, name=name: jax.block_until_ready(made[name][0](*made[name][1])) for name in made
        }
        cpu = in_turn(runs, arguments.rounds, time.process_time)
        local = cpu[LOCAL]
        for name, (program, _) in made.items():
            read = hlo().read(program)
            launches = ", ".join(f"{count} {kind}" for kind, count in read.launches().items()) or "none"
            ratio = cpu[name] / local
            rows.append(
                (tokens, name, f"{cpu[name] * 1e3:.1f}", f"{ratio:.2f}x", launches, f"{read.received_bytes():,}")
            )
            figures[f"{tokens} {name} over local"] = ratio
    lines = [
        "# One decoded token over sharded keys",
        "",
        f"`python -m bench.attention_decode --rounds {arguments.rounds}`: {DEVICES} simulated CPU devices, "
        f"batch {BATCH}, {HEADS} heads, {KV_HEADS} kv_heads, head_dim {HEAD_DIM}, float32; CPU time of all threads, "
        f"medians of {arguments.rounds} rounds in turn. {versions()}.",
        "Simulated devices share cores: CPU time shows what each algorithm computes, launches and bytes what "
        "it would send. Ring decode computes the whole result on every device.",
        "",
        *table(("keys", "attention", "CPU ms", "over local", "launches", "bytes received per device"), rows),
    ]
    publish("attention_decode", lines, figures)


if __name__ == "__main__":
    main()
