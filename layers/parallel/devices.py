"""The devices of a run: simulated ones on a CPU, or those that are there."""

import jax

from treering.configs.mesh import Axis, MeshConfig
from treering.layers.parallel.sharding import Plan, Table, make_mesh


def simulate_cpu_devices(count: int) -> None:
    """Makes the process see `count` CPU devices; must come before anything touches a device.

    Raises ValueError for a count below one, and where code of the user's (a plugin, a recipe) has touched one already.
    """
    if count < 1:
        raise ValueError(f"cpu-devices {count}: simulate at least 1")
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        raise ValueError(
            f"cpu-devices {count} comes too late: JAX works with the devices that are there already. Let plugins and "
            "recipes make no arrays when they are imported"
        ) from None


def plan_for(mesh: MeshConfig, table: Table, *, fill: Axis) -> Plan:
    """A plan over all devices; `fill` is the axis that takes those that `mesh` leaves unsaid."""
    return Plan(make_mesh(mesh.resolve(jax.device_count(), fill=fill)), table)


def describe(plan: Plan) -> str:
    """The mesh in words, such as `context 8 x tensor 2 (16 CPU devices)`."""
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items() if size > 1) or "1 device"
    device = plan.mesh.devices.flat[0]
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    return f"{axes} ({plan.mesh.size} {kind} device{'s' if plan.mesh.size > 1 else ''})"
