"""Before a run: what can be wrong is looked at here, before anything is compiled or written into its folder."""

import json
from pathlib import Path
from typing import Any

from treering.configs.model import ModelConfig
from treering.configs.run import RENAMED, RunConfig, flat, resume_invariant
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.atomic_folder import check_creatable
from treering.models.checkpoint.record import CHECKPOINTS, read_config
from treering.models.conversion.load import open_model
from treering.train.data.batch import check_batch
from treering.train.data.store import cache_folder
from treering.train.optim import check_schedule
from treering.train.run.folder import CONFIG, newest_step, weights_of
from treering.train.run.metrics import check_extras


def check_run(config: RunConfig, plan: Plan) -> None:
    """Raises ValueError for what is wrong with a run, its folders included."""
    columns = 2 * plan.size("context")
    if config.data.window % columns:
        below = config.data.window // columns * columns
        works = f"are {below} and {below + columns}" if below else f"is {columns}"
        raise ValueError(
            f"data.window {config.data.window} is no multiple of {columns}, which is twice mesh.context "
            f"{columns // 2}: the nearest {works}"
        )
    check_batch(plan, batch=config.data.batch, seq=config.data.window, accumulation=config.step.accumulation)
    check_schedule(config.optimizer.schedule, config.steps)
    check_extras(config.watch)
    for name in ("rows", "stride"):
        if getattr(config.evaluate, name) is not None and not config.data.held_out:
            raise ValueError(f"evaluate.{name} goes with data.held_out: without, there is nothing to evaluate on")
    check_folder(config)
    check_creatable(cache_folder(config))
    if config.init_from is not None:
        check_same_weights(config.model, open_model(weights_of(config.init_from)).config, config.init_from)
    if config.resume_from is not None:
        step = newest_step(config.resume_from)
        there = read_config(Path(config.resume_from) / CHECKPOINTS / str(step) / "model")
        check_same_weights(config.model, there, config.resume_from)


def check_folder(config: RunConfig) -> None:
    """Raises ValueError where the run's folder holds something else, or a run that computes something else."""
    folder = Path(config.folder)
    if not folder.exists():
        return check_creatable(folder)
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG).is_file()):
        raise ValueError(f"{folder} exists and holds no run: choose another --folder")
    if not (folder / CONFIG).is_file():
        return
    written: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    there = resume_invariant({RENAMED.get(name, name): value for name, value in written.items()})
    here = json.loads(json.dumps(config.resume_invariant()))
    differ = [
        f"{name} is {there.get(name, 'not set')} there and {here.get(name, 'not set')} here"
        for name in here | there
        if here.get(name) != there.get(name)
    ]
    if differ:
        raise ValueError(
            f"{folder} holds a run of another config: {'; '.join(differ[:5])}{' ...' if len(differ) > 5 else ''}. "
            "Choose another --folder, or the same config to resume"
        )


def check_same_weights(here: ModelConfig, there: ModelConfig, path: str) -> None:
    """Raises ValueError where the weights at `path` are not for the model `here`; its context may be another."""
    ours, theirs = flat(here), flat(there)
    differ = [
        f"{name} {theirs.get(name)} instead of {ours.get(name)}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name) and name != "context_length" and not name.startswith("rope.")
    ]
    if differ:
        raise ValueError(f"{path} holds another architecture than this run's model: {', '.join(differ)}")
