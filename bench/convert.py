"""Memory and speed of conversion: `python -m bench.convert [--gigabytes 6] [--folder FOLDER]`.

Writes a Hugging Face folder of 40 layers in bfloat16, copies its files, converts it, and restores the checkpoint onto
eight simulated devices, each in a process of its own. The memory reported is the peak of a process minus what it holds
after its imports. Prints a table and writes it to bench/results/convert.md. Needs three times the bytes on disk.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import publish, table, versions

ROOT = Path(__file__).parents[1]
LAYERS = 40
DEVICES = 8


def write_source(folder: Path, gigabytes: float) -> int:
    """Writes a Llama of this size in files of four layers; returns the bytes of its largest stacked parameter."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    vocab = 32000
    # A layer has about 4 + 3 * 4 matrices of embed x embed. Sizes are multiples of 512: eight devices divide them.
    elements = gigabytes * 1e9 / 2 / LAYERS
    embed = round((elements / 16) ** 0.5 / 512) * 512
    heads, mlp = embed // 64, round((elements / embed - 4 * embed) / 3 / 512) * 512
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    rng = np.random.default_rng(0)
    where: dict[str, str] = {}

    def save(number: int, shapes: dict[str, tuple[int, ...]]) -> None:
        name = f"model-{number:05}-of-{LAYERS // 4 + 1:05}.safetensors"
        # Any bits will do, except for NaN and infinity.
        tensors = {
            key: (rng.integers(0, 2**14, shape, np.uint16)).view(ml_dtypes.bfloat16) for key, shape in shapes.items()
        }
        save_file(tensors, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(shapes, name))

    save(1, {"model.embed_tokens.weight": (vocab, embed), "model.norm.weight": (embed,)})
    inside = {
        "input_layernorm": (embed,),
        "post_attention_layernorm": (embed,),
        **{f"self_attn.{name}_proj": (embed, embed) for name in "qkvo"},
        "mlp.gate_proj": (mlp, embed),
        "mlp.up_proj": (mlp, embed),
        "mlp.down_proj": (embed, mlp),
    }
    for first in range(0, LAYERS, 4):
        layers = range(first, first + 4)
        save(2 + first // 4, {f"model.layers.{n}.{key}.weight": shape for n in layers for key, shape in inside.items()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return 2 * LAYERS * mlp * embed


def in_process(step: str, *arguments: object) -> dict[str, float]:
    """What `step` measures of itself in a new process."""
    command = [sys.executable, "-m", "bench.convert", "--step", step, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(run: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Seconds of `run`, the bytes by which it raises the peak of this process, and what it returns."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    said = run()
    seconds = time.perf_counter() - started
    unit = 1 if sys.platform == "darwin" else 1024
    return {"seconds": seconds, "peak": unit * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), **said}


def step(name: str, arguments: list[str]) -> dict[str, float]:
    """`convert SRC DST`, or `restore CHECKPOINT`."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    from treering.configs.mesh import MeshConfig
    from treering.layers.parallel.devices import plan_for
    from treering.models.checkpoint.model import load_model
    from treering.models.conversion.convert import convert

    if name == "convert":
        import treering.models.families
        import treering.models.formats.safetensors_folder  # noqa: F401  # what is imported late counts as imports

        def run() -> dict[str, float]:
            convert(*arguments)
            return {}

        return measured(run)
    plan = plan_for(MeshConfig(), "train", fill="fsdp")

    def restore() -> dict[str, float]:
        model = load_model(arguments[0], plan)
        held = dict.fromkeys(plan.mesh.devices.flat, 0)
        for array in jax.tree.leaves(model):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
        return {"total": sum(held.values()), "most": max(held.values())}

    return measured(restore)


def measure(folder: Path, gigabytes: float) -> dict[str, float]:
    """Bytes and seconds of all steps; what they wrote under `folder` is removed."""
    source, copy, checkpoint = (folder / name for name in ("source", "copy", "checkpoint"))
    try:
        largest = write_source(source, gigabytes)
        size = sum(file.stat().st_size for file in source.iterdir())
        started = time.perf_counter()
        shutil.copytree(source, copy)
        copied = time.perf_counter() - started
        shutil.rmtree(copy)
        converted = in_process("convert", source, checkpoint)
        restored = in_process("restore", checkpoint)
    finally:
        for path in (source, copy, checkpoint):
            shutil.rmtree(path, ignore_errors=True)
    return {
        "bytes": size,
        "largest": largest,
        "copy_seconds": copied,
        "convert_seconds": converted["seconds"],
        "convert_peak": converted["peak"],
        "restore_seconds": restored["seconds"],
        "restore_peak": restored["peak"],
        "held": restored["total"],
        "most_on_a_device": restored["most"],
    }


def main() -> None:
    """Runs the benchmark, or one step of it in this process."""
    parser = argparse.ArgumentParser(prog="python -m bench.convert")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="of the source's weights")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps(step(arguments.step[0], arguments.step[1:])))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        found = measure(Path(scratch), arguments.gigabytes)
    gb = {name: value / 1e9 for name, value in found.items()}
    bound = 1.3 * gb["largest"] + 0.5

    def row(what: str, seconds: float, peak: str) -> tuple:
        return what, f"{seconds:.1f}", f"{found['bytes'] / seconds / 1e6:,.0f}", peak

    publish(
        "convert",
        [
            "# Conversion of a large checkpoint",
            "",
            f"A Hugging Face folder of {LAYERS} layers, bfloat16, {gb['bytes']:.2f} GB in {LAYERS // 4 + 1} files; "
            f"its largest stacked parameter is {gb['largest']:.2f} GB. One run each, in a process of its own. "
            f"{versions()}.",
            "",
            *table(
                ["step", "seconds", "MB/s", "peak above imports"],
                [
                    row("plain copy of the files", found["copy_seconds"], ""),
                    row(
                        "treering convert",
                        found["convert_seconds"],
                        f"{gb['convert_peak']:.2f} GB (bound: 1.3 x the largest parameter + 0.5 = {bound:.2f})",
                    ),
                    row(
                        f"restore onto {DEVICES} simulated devices",
                        found["restore_seconds"],
                        f"{gb['restore_peak']:.2f} GB, of which the devices hold {gb['held']:.2f} together",
                    ),
                ],
            ),
            "",
            f"Restored for training, parameters over fsdp; the fullest device holds {gb['most_on_a_device']:.2f} GB.",
        ],
        found,
    )


if __name__ == "__main__":
    main()
