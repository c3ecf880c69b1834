"""The folder of a run: which files stand in it, and where its newest checkpoint and its weights are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treering.configs.run import RunConfig, flat
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.record import CHECKPOINTS, RECORD
from treering.models.tokenizer import TOKENIZER
from treering.train.data.file_fingerprints import FileFingerprints, fingerprint_files
from treering.train.run.checkpoint import finished_steps, restore
from treering.train.step import TrainState

CONFIG = "config.json"
DATA = "data.json"
"""What the files of its sources are known by."""


def newest_step(run: str) -> int:
    """The newest step that a run's folder has a checkpoint of; ValueError where there is none."""
    steps = finished_steps(Path(run) / CHECKPOINTS)
    if not steps:
        raise ValueError(f"{run} holds no checkpoint of a run: it lacks {CHECKPOINTS}/STEP")
    return steps[-1]


def weights_of(path: str) -> Path:
    """The weights that `path` names: itself (whatever `open_model` takes), the model of a step, or a run's newest."""
    folder = Path(path)
    if (folder / CHECKPOINTS).is_dir():
        return folder / CHECKPOINTS / str(newest_step(path)) / "model"
    return folder / "model" if (folder / "model" / RECORD).is_file() else folder


def make_folder(folder: Path, config: RunConfig, tokenizer: Path, files: FileFingerprints) -> None:
    """Writes what a run's folder, which exists, holds from the start: config, marks of the data, tokenizer."""
    (folder / CONFIG).write_text(json.dumps(flat(config), indent=2) + "\n")
    (folder / DATA).write_text(json.dumps(files, indent=2) + "\n")
    if not (folder / TOKENIZER).is_dir():
        partial = folder / (TOKENIZER + ".partial")
        shutil.copytree(tokenizer, partial, dirs_exist_ok=True)
        partial.rename(folder / TOKENIZER)


def newest(
    folder: Path, shapes: TrainState, plan: Plan, say: Callable[[str], None]
) -> tuple[TrainState, dict[str, Any]]:
    """The newest checkpoint in `folder` that can be read back whole, and its place in the data.

    Raises ValueError where none can: a run never starts over by itself.
    """
    faults = []
    for step in reversed(finished_steps(folder)):
        try:
            state, progress = restore(folder, step, shapes, plan)
        except (ValueError, OSError) as error:
            faults.append(" ".join(str(error).split()))
            say(f"checkpoint {step} is passed over: {faults[-1]}")
            continue
        say(f"resumed from {folder / str(step)}")
        return state, progress["position"]
    raise ValueError(f"no checkpoint in {folder} can be read: {'; '.join(faults)}")


def check_data_files(config: RunConfig) -> FileFingerprints:
    """What the files of the run's sources are known by, for its folder.

    Raises ValueError where they are not those that the run, or the one that it goes on from, has read so far.
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
            then, now = (f"{marks['bytes']:,} bytes in {marks['files']}" for marks in (there[path], here[path]))
            raise ValueError(
                f"{path} has changed since the run in {run} began: {then} file(s) then, {now} now"
                f"{', with other content' if then == now else ''}. Put it back, or begin another run with the weights "
                f"of this one: --init-from {run}, and another --folder"
            )
