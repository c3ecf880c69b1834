"""The folder of a run: which files are in it, and where its newest checkpoint and its weights are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treering.configs.run import RunConfig, flat
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.record import CHECKPOINTS, RECORD
from treering.models.files import copy_folder
from treering.models.tokenizer import TOKENIZER
from treering.train.data.file_fingerprints import FileFingerprints, fingerprint_files
from treering.train.data.packing import count
from treering.train.run.checkpoint import finished_steps, restore
from treering.train.step import TrainState

CONFIG = "config.json"
DATA = "data.json"
"""Fingerprints of the files of its sources."""


def newest_step(run: str) -> int:
    """The newest step that a run's folder has a checkpoint of; ValueError where there is none."""
    steps = finished_steps(Path(run) / CHECKPOINTS)
    if not steps:
        raise ValueError(f"{run} holds no checkpoint of a run: it has no {CHECKPOINTS}/STEP")
    return steps[-1]


def weights_of(path: str) -> Path:
    """The weights that `path` names: itself (whatever `open_model` takes), the model of a step, or a run's newest."""
    folder = Path(path)
    if (folder / CHECKPOINTS).is_dir():
        return folder / CHECKPOINTS / str(newest_step(path)) / "model"
    return folder / "model" if (folder / "model" / RECORD).is_file() else folder


def unfinished(path: str) -> str | None:
    """A warning where `path` is the folder of a run that has not reached its last step."""
    run = Path(path)
    if not (run / CHECKPOINTS).is_dir() or not (run / CONFIG).is_file():
        return None
    step, steps = newest_step(path), json.loads((run / CONFIG).read_text()).get("steps")
    if not isinstance(steps, int) or step >= steps:
        return None
    return f"the run in {run} is not finished: its newest checkpoint is of step {step:,} of {steps:,}"


def make_folder(folder: Path, config: RunConfig, tokenizer: Path, files: FileFingerprints) -> None:
    """Writes into an existing folder what a run has from its start: config, fingerprints of the data, tokenizer."""
    (folder / CONFIG).write_text(json.dumps(flat(config), indent=2) + "\n")
    (folder / DATA).write_text(json.dumps(files, indent=2) + "\n")
    if not (folder / TOKENIZER).is_dir():
        partial = folder / (TOKENIZER + ".partial")
        copy_folder(tokenizer, partial)
        partial.rename(folder / TOKENIZER)


def newest(
    folder: Path, shapes: TrainState, plan: Plan, say: Callable[[str], None]
) -> tuple[TrainState, dict[str, Any]]:
    """The newest checkpoint in `folder` that can be read completely, and its position in the data.

    Raises ValueError where none can: a run never starts over by itself.
    """
    faults = []
    for step in reversed(finished_steps(folder)):
        try:
            state, progress = restore(folder, step, shapes, plan)
        except (ValueError, OSError) as error:
            faults.append(" ".join(str(error).split()))
            say(f"checkpoint {step} is skipped: {faults[-1]}")
            continue
        say(f"resumed from {folder / str(step)}")
        return state, progress["position"]
    raise ValueError(f"no checkpoint in {folder} can be read: {'; '.join(faults)}")


def check_data_files(config: RunConfig) -> FileFingerprints:
    """Fingerprints of the files of the run's sources, for its folder.

    Raises ValueError where they are not the files that the run, or the one that it resumes from, has read so far.
    """
    here = fingerprint_files(config.data.sources)
    for run in filter(None, (config.folder, config.resume_from)):
        if finished_steps(Path(run) / CHECKPOINTS):
            check_same_files(Path(run), here)
    return here


def check_same_files(run: Path, here: FileFingerprints) -> None:
    """Raises ValueError where a file is not what the run in the folder `run` read under its name."""
    there = json.loads((run / DATA).read_text()) if (run / DATA).is_file() else {}
    for path in here.keys() & there.keys():
        if here[path] != there[path]:
            then, now = (
                f"{count(found['bytes'], 'byte')} in {count(found['files'], 'file')}"
                for found in (there[path], here[path])
            )
            raise ValueError(
                f"{path} has changed since the run in {run} began: it had {then}, and has {now}"
                f"{' with other content' if then == now else ''}. Restore it, or start another run from the weights of "
                f"this one: --init-from {run}, and another --folder"
            )
