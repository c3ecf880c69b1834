"""The devices of a run: simulated on a CPU, or those that the machine has."""

import jax

from treering.configs.errors import UserError
from treering.configs.mesh import Axis, MeshConfig
from treering.layers.parallel.sharding import Plan, Table, make_mesh


def simulate_cpu_devices(count: int) -> None:
    """Makes the process see `count` CPU devices; must come before anything uses a device.

    Raises ValueError for a count below 1, and where the user's code (a plugin, a recipe) has used a device already.
    """
    if count < 1:
        raise UserError("it must be at least 1", field="cpu_devices", value=count)
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        raise UserError(
            "it comes too late, since JAX has started: plugins and recipes must not make arrays when they are imported",
            field="cpu_devices",
            value=count,
        ) from None


def plan_for(mesh: MeshConfig, table: Table, *, fill: Axis) -> Plan:
    """A plan over all devices; `fill` is the axis that takes those that `mesh` leaves over."""
    return Plan(make_mesh(mesh.resolve(jax.device_count(), fill=fill)), table)


def describe(plan: Plan) -> str:
    """The mesh in words, such as `context 8 x tensor 2 (16 CPU devices)` or `1 CPU device`."""
    device = plan.mesh.devices.flat[0]
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    if plan.mesh.size == 1:
        return f"1 {kind} device"
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items() if size > 1)
    return f"{axes} ({plan.mesh.size} {kind} devices)"
