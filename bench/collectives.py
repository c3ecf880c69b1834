"""The collectives of tree attention between processes: `python -m bench.collectives [--processes 2 4] [--rounds 15]`.

Each process has one CPU device, and they communicate over gloo, as machines of a cluster can. One program runs the
combines of all layers of a token one after the other, without attention between them, so that only messages are timed:
ours, the paper's three all-reduces, and the latter joined by XLA into two, in turn.
"""

import argparse
import os
import socket
import subprocess
import sys
import time

from bench.report import hlo, in_turn, publish, table, versions

SHAPE = dict(batch=1, seq=1, heads=32, head_dim=128)
LAYERS = 32
COMBINES = ("all_to_all", "all_gather", "two_level", "three all-reduces", "two all-reduces")
PAPER = "three all-reduces"


def programs(processes: int) -> dict:
    """Each combine as a compiled program of `LAYERS` of them, and its arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from bench.baselines import three_all_reduces
    from treering.layers.attention.distributed.tree import tree_combine
    from treering.layers.attention.partial import Partial
    from treering.layers.attention.varying import vary_over

    mesh = jax.make_mesh((processes,), ("context",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec("context"))
    batch, seq, heads, head_dim = SHAPE.values()

    def place(shape, seed):
        values = np.random.default_rng(seed).normal(size=(processes * batch, *shape)).astype(np.float32)
        return jax.make_array_from_callback(values.shape, sharded, lambda index: values[index])

    part = Partial(place((seq, heads, head_dim), 0), place((seq, heads), 1))

    def combine(name, part):
        if name.endswith("all-reduces"):
            return three_all_reduces(part, "context", fused=name.startswith("two"))
        return tree_combine(part, "context", scheme=name, inner=2 if name == "two_level" else None)

    def token(name):
        def layers(part):
            def layer(_, part):
                joined = combine(name, part)
                # The next layer's parts, of full size again, and different on every device.
                copies = heads // joined.lse.shape[2]
                joined = jax.tree.map(lambda x: jnp.concatenate([x] * copies, axis=2), joined)
                joined = vary_over(frozenset({"context"}), joined)
                return jax.tree.map(lambda x, y: 0.5 * (x + y), part, joined)

            return jax.lax.fori_loop(0, LAYERS, layer, part)

        spec = PartitionSpec("context")
        function = jax.jit(jax.shard_map(layers, mesh=mesh, in_specs=spec, out_specs=spec))
        return function.lower(part).compile()

    names = [name for name in COMBINES if name != "two_level" or processes == 4]
    return {name: (token(name), part) for name in names}


def child(rank: int, processes: int, port: int, rounds: int) -> None:
    """One process; the first one prints one line per combine: seconds, launches and bytes."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    made = programs(processes)

    def run(program, part):
        return lambda: jax.block_until_ready(program(part))

    runs = {name: run(*args) for name, args in made.items()}
    seconds = in_turn(runs, rounds, time.perf_counter)
    if rank == 0:
        for name, (program, _) in made.items():
            read = hlo().read(program)
            launches = sum(read.launches().values()) / LAYERS
            print(f"{name}\t{seconds[name] / LAYERS}\t{launches:g}\t{read.received_bytes() / LAYERS:g}")


def measure(processes: int, rounds: int) -> list[tuple[str, float, float, float]]:
    """Starts the processes and returns (combine, seconds, launches, bytes) of each combine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bench.collectives", "--port", str(port), "--rounds", str(rounds)]
    command += ["--processes", str(processes), "--rank"]
    started = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env={**os.environ, "XLA_FLAGS": ""})
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise RuntimeError(f"a process of {processes} failed")
    rows = [line.split("\t") for line in outputs[0].splitlines() if line.count("\t") == 3]
    return [(name, float(seconds), float(launches), float(received)) for name, seconds, launches, received in rows]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        child(arguments.rank, arguments.processes[0], arguments.port, arguments.rounds)
        return
    rows, figures = [], {}
    for processes in arguments.processes:
        measured = measure(processes, arguments.rounds)
        paper = {name: seconds for name, seconds, *_ in measured}[PAPER]
        for name, seconds, launches, received in measured:
            ratio = paper / seconds
            rows.append((processes, name, f"{seconds * 1e6:.0f}", f"{launches:g}", f"{received:.0f}", f"{ratio:.2f}x"))
            figures[f"{processes} {name} speedup"] = ratio
    shape = ", ".join(f"{dim} {size}" for dim, size in SHAPE.items())
    lines = [
        "# Merging partial attention between processes",
        "",
        f"`python -m bench.collectives --rounds {arguments.rounds}`: one CPU device per process, gloo on one machine; "
        f"{shape}, float32; {LAYERS} combines per program; wall time, medians of {arguments.rounds} rounds in turn. "
        f"{versions()}.",
        "The last column is the time of the paper's three all-reduces divided by the row's. Nothing here says how an "
        "interconnect between machines or GPUs behaves; launches and bytes are those of the compiled program.",
        "",
        *table(
            (
                "processes",
                "combine",
                "us per layer",
                "launches",
                "bytes received per device",
                "speedup over three all-reduces",
            ),
            rows,
        ),
    ]
    publish("collectives", lines, figures)


if __name__ == "__main__":
    main()
