"""Checks of a run, before anything is written into its folder."""

import json
from pathlib import Path
from typing import Any

from treering.configs.errors import UserError, as_option
from treering.configs.model import ModelConfig
from treering.configs.run import RENAMED, RunConfig, flat, resume_invariant
from treering.layers.parallel.program import Program
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.atomic_folder import check_creatable
from treering.models.checkpoint.record import CHECKPOINTS, read_config
from treering.models.conversion.load import open_model
from treering.train.data.batch import check_batch
from treering.train.data.packing import count
from treering.train.data.store import cache_folder
from treering.train.optim import check_schedule
from treering.train.run.folder import CONFIG, newest_step, weights_of
from treering.train.run.metrics import check_extras


def check_run(config: RunConfig, plan: Plan) -> None:
    """Raises ValueError for a run that cannot be, including its folders."""
    columns = 2 * plan.size("context")
    if config.data.window % columns:
        below = config.data.window // columns * columns
        raise UserError(
            f"it must be a multiple of {columns}, twice mesh.context",
            field="data.window",
            value=config.data.window,
            works=[below, below + columns] if below else [columns],
        )
    check_batch(plan, batch=config.data.batch, seq=config.data.window, accumulation=config.step.accumulation)
    check_schedule(config.optimizer.schedule, config.steps)
    check_extras(config.watch)
    for name in ("rows", "stride"):
        if getattr(config.evaluate, name) is not None and not config.data.held_out:
            value = getattr(config.evaluate, name)
            raise UserError("it needs held-out data: --data.held-out.0.path", field=f"evaluate.{name}", value=value)
    check_folder(config)
    check_creatable(cache_folder(config))
    if config.init_from is not None:
        check_same_weights(config.model, open_model(weights_of(config.init_from)).config, "init_from", config.init_from)
    if config.resume_from is not None:
        step = newest_step(config.resume_from)
        there = read_config(Path(config.resume_from) / CHECKPOINTS / str(step) / "model")
        check_same_weights(config.model, there, "resume_from", config.resume_from)


def check_folder(config: RunConfig) -> None:
    """Raises ValueError where the run's folder holds something else, or a run with other settings."""
    folder = Path(config.folder)
    if not folder.exists():
        return check_creatable(folder)
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG).is_file()):
        raise UserError("it exists and is not the folder of a run: choose another", field="folder", value=folder)
    if not (folder / CONFIG).is_file():
        return
    written: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    there = resume_invariant({RENAMED.get(name, name): value for name, value in written.items()})
    here = json.loads(json.dumps(config.resume_invariant()))
    differ = [
        f"{_shown(name)} was {there.get(name, 'not set')} and is {here.get(name, 'not set')}"
        for name in here | there
        if here.get(name) != there.get(name)
    ]
    if differ:
        raise UserError(
            f"it holds a run with other settings: {'; '.join(differ[:5])}{' ...' if len(differ) > 5 else ''}. Choose "
            "another folder, or the same settings to resume",
            field="folder",
            value=folder,
        )


def _shown(name: str) -> str:
    """A flat field as an option; the class of a config, which is not one, by its name."""
    return name if name.rpartition(".")[2] == "type" else as_option(name)


def check_same_weights(here: ModelConfig, there: ModelConfig, field: str, path: str) -> None:
    """Raises ValueError where the weights that `field` names do not fit the model `here`; its context may be longer."""
    ours, theirs = flat(here), flat(there)
    differ = [
        f"{name} {theirs.get(name)} instead of {ours.get(name)}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name) and name != "context_length" and not name.startswith("rope.")
    ]
    if differ:
        rule = f"its architecture is not that of this run's model: {', '.join(differ)}"
        raise UserError(rule, field=field, value=path)


def warm_up_in_words(config: RunConfig) -> str | None:
    """A warning where the warm-up of the learning rate takes more than half of the run."""
    schedule, steps = config.optimizer.schedule, config.steps
    if 2 * schedule.warmup_steps <= steps:
        return None
    return (
        f"warm-up takes {schedule.warmup_steps:,} of {count(steps, 'step')}: the learning rate reaches its peak at "
        f"step {schedule.warmup_steps:,}; for a shorter warm-up lower --optimizer.schedule.warmup-steps"
    )


def memory_in_words(program: Program, plan: Plan) -> str:
    """What the step needs per device; ValueError where the device has less."""
    analysis = program.compiled.memory_analysis()
    if analysis is None:
        return "its memory is not known"
    kept = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    needed = kept + analysis.temp_size_in_bytes
    message = f"{needed / 2**20:,.0f} MiB per device, {analysis.temp_size_in_bytes / 2**20:,.0f} of them temporary"
    limit = (plan.mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None and needed > limit:
        raise ValueError(
            f"the step needs {message}, and a device has {limit / 2**20:,.0f} MiB: use more devices (--mesh.context "
            "for long windows, --mesh.fsdp for parameters), a higher --step.accumulation, --step.remat full, or a "
            "shorter --data.window"
        )
    return message
