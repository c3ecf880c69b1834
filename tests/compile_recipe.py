"""Compiles the step of a recipe for simulated devices and prints what it found as JSON: `compile_recipe.py NAME`."""

import json
import sys

import jax

from treering.configs.recipes import RECIPES

config = RECIPES[sys.argv[1]]()
sizes = {axis: getattr(config.mesh, axis) or 1 for axis in ("data", "fsdp", "context", "tensor")}
devices = sizes["data"] * sizes["fsdp"] * sizes["context"] * sizes["tensor"]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_numpy_rank_promotion", "raise")

import hlo  # noqa: E402
from treering.layers.parallel.devices import plan_for  # noqa: E402
from treering.train.step import abstract_state, step_program  # noqa: E402

plan = plan_for(config.mesh, "train", fill="fsdp")
state = abstract_state(config.model, config.optimizer, plan, params=config.step.precision.params)
program = step_program(
    state,
    config.step,
    config.optimizer,
    plan,
    steps=config.steps,
    batch=config.data.batch,
    seq=config.data.window,
)
memory = program.compiled.memory_analysis()
assert memory is not None
read = hlo.read(program.compiled)
sends = [x for x in read.collectives if x.kind == "collective-permute"]
found = {
    "devices": devices,
    "state_bytes": memory.argument_size_in_bytes,
    "temporary_bytes": memory.temp_size_in_bytes,
    "total_bytes": memory.argument_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes,
    "beside_vocab": hlo.largest_beside(read, config.model.vocab),
    "ring_launches": read.launches()["collective-permute"],
    "ring_bytes": round(sum((x.count or 0) * x.received for x in sends)),
    "received_bytes": read.received_bytes(),
}
print(json.dumps(found))
