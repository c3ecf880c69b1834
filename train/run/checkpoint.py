"""A run's checkpoints: `STEP/model/`, a checkpoint of format 1, and `STEP/train/`, all else that resuming needs.

orbax writes a step under another name while training continues and renames it when it is complete, so a step that
exists is complete. Each is then read back and compared with what was in memory; the newest that passed is never
deleted.
"""

import json
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import orbax.checkpoint as ocp
from etils import epath

from treering.configs.run import CheckpointConfig
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.arrays import array_handler, read_array, read_arrays, read_shapes, save_arguments
from treering.models.checkpoint.hashing import all_finite, fingerprint, hash_array, hash_arrays
from treering.models.checkpoint.model import load_model, main_dtype, named_leaves
from treering.models.checkpoint.record import RECORD, WEIGHTS, Record, read_record
from treering.models.files import copy_folder
from treering.models.tokenizer import TOKENIZER
from treering.train.step import TrainState

TRAIN_RECORD = "train.json"
STATE = "state"
READ_BACK = "read_back"
"""A file that marks a step's folder as read back without a difference."""


class FolderHandler(ocp.AsyncCheckpointHandler):
    """Writes a `FolderSave`: small files at once, arrays in the background."""

    def __init__(self):
        self._arrays = array_handler()

    async def async_save(self, directory: epath.Path, args: "FolderSave") -> Any:
        """See orbax. Every process creates the folder that it writes into, since none waits for the first."""
        folder = epath.Path(directory) / args.place
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            for name, text in args.files.items():
                (epath.Path(directory) / name).write_text(text)
            for name, source in args.folders.items():
                copy_folder(Path(source), Path(directory) / name)
        return await self._arrays.async_save(folder, args=save_arguments(args.arrays))

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Not used: checkpoints are written asynchronously."""
        raise NotImplementedError

    def restore(self, *args: Any, **kwargs: Any) -> None:
        """Not used: `Checkpoints.restore` reads."""
        raise NotImplementedError

    def close(self) -> None:
        """See orbax."""
        self._arrays.close()


@ocp.args.register_with_handler(FolderHandler, for_save=True, for_restore=True)
@dataclass
class FolderSave(ocp.args.CheckpointArgs):
    """Arrays for the folder `place`, and texts and folders next to it."""

    arrays: Mapping[str, Any]
    place: str
    files: Mapping[str, str]
    folders: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class _Keep:
    """Which checkpoints stay, as orbax asks it: the newest, those of an interval, the newest that was read back."""

    config: CheckpointConfig
    folder: Path

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [info.step for info in checkpoints]
        kept = set(steps[-self.config.keep :])
        kept |= {step for step in steps if self.config.keep_every and step % self.config.keep_every == 0}
        kept |= set([step for step in steps if (self.folder / str(step) / READ_BACK).exists()][-1:])
        return [step in kept for step in steps]


class Checkpoints:
    """The checkpoints of the run in `folder`."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder, self.config = folder, config
        self._reader: threading.Thread | None = None
        self._fault: str | None = None
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            item_handlers={"model": FolderHandler(), "train": FolderHandler()},
            options=ocp.CheckpointManagerOptions(
                create=True,
                cleanup_tmp_directories=True,
                preservation_policy=_Keep(config, folder),
                # The handler creates folders in the step's, which must exist by then.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )

    def save(self, step: int, state: TrainState, *, position: Mapping[str, Any], seed: int, tokenizer: Path) -> None:
        """Starts to write `state` as the checkpoint of `step`; waits for the one before.

        Raises ValueError for a state that is not finite, OSError where this checkpoint or the one before cannot be
        written.
        """
        if step in finished_steps(self.folder):
            return
        if not all_finite((state.model, state.optimizer)):
            raise ValueError(f"the state of step {step} is not finite, so it is not saved: {self._newest()}")
        self.wait()
        model, rest = named_leaves(state.model), named_leaves(eqx.tree_at(lambda s: s.model, state, None))
        hashes = hash_arrays(model)
        record = Record(
            config=state.model.config,
            dtype=main_dtype(model),
            fingerprint=fingerprint(hashes.items()),
            source={"kind": "training", "step": step},
        )
        progress = {"step": step, "seed": seed, "position": position, "hashes": hash_arrays(rest)}
        self._attempt(
            step,
            lambda: self._manager.save(
                step,
                args=ocp.args.Composite(
                    model=FolderSave(model, WEIGHTS, {RECORD: record.to_json()}, {TOKENIZER: tokenizer}),
                    train=FolderSave(rest, STATE, {TRAIN_RECORD: json.dumps(progress)}),
                ),
                force=True,
            ),
        )
        if self.config.read_back and jax.process_index() == 0:
            self._reader = threading.Thread(target=self._read_back, args=(step, hashes), name="read back", daemon=True)
            self._reader.start()

    def check(self) -> None:
        """Raises OSError where a save has failed, or a checkpoint that was read back is not what was saved."""
        self._attempt(None, self._manager.check_for_errors)
        if self._fault is not None:
            raise OSError(5, f"{self._fault}; {self._newest()}", str(self.folder))

    def wait(self) -> None:
        """Returns when all that was saved is on disk and read back; raises what `check` does."""
        self._attempt(None, self._manager.wait_until_finished)
        if self._reader is not None:
            self._reader.join()
        self.check()

    def close(self) -> None:
        """Stops orbax's threads, and waits for the one that reads back: at the end of the process it could not."""
        self._manager.close()
        if self._reader is not None:
            self._reader.join()

    def _attempt(self, step: int | None, action: Any) -> None:
        try:
            action()
        except Exception as error:  # Whatever orbax and tensorstore raise for a disk that does not take the data.
            for unfinished in self.folder.glob("*tmp*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            message = " ".join(str(error).split())[:300]
            what = "a checkpoint" if step is None else f"the checkpoint of step {step}"
            number = error.errno if isinstance(error, OSError) and error.errno else 5
            raise OSError(
                number, f"{what} could not be written ({message}); {self._newest()}", str(self.folder)
            ) from error

    def _newest(self) -> str:
        steps = finished_steps(self.folder)
        return f"the newest complete one is of step {steps[-1]}" if steps else "there is none before it"

    def _read_back(self, step: int, hashes: Mapping[str, str]) -> None:
        """Reads a checkpoint once it is complete, array by array, and marks it."""
        while self._manager.is_saving_in_progress():
            time.sleep(0.05)
        if step not in finished_steps(self.folder):
            return  # The save failed; the main thread reports it.
        folder = self.folder / str(step)
        rest = json.loads((folder / "train" / TRAIN_RECORD).read_text())["hashes"]
        try:
            for place, expected in ((folder / "model" / WEIGHTS, hashes), (folder / "train" / STATE, rest)):
                shapes = read_shapes(place)
                for name, expected_hash in expected.items():
                    if hash_array(read_array(place, name, shapes[name].dtype)) != expected_hash:
                        raise ValueError(f"{name} differs from what was saved")
            (folder / READ_BACK).touch()
        except Exception as error:  # Reported by the main thread.
            self._fault = f"the checkpoint of step {step} could not be read back ({' '.join(str(error).split())[:300]})"


def finished_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints are complete, in order."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.name.isdigit() and ocp.utils.is_checkpoint_finalized(path)]
    return sorted(
        int(path.name)
        for path in found
        if (path / "model" / RECORD).is_file() and (path / "train" / TRAIN_RECORD).is_file()
    )


def restore(folder: Path, step: int, shapes: TrainState, plan: Plan) -> tuple[TrainState, dict[str, Any]]:
    """The state of a step on the devices of `plan`, whatever mesh saved it, and what train.json says.

    `shapes` is the abstract state. Raises ValueError where the files are not what was saved, or are of another model or
    optimizer.
    """
    place = folder / str(step)
    progress = json.loads((place / "train" / TRAIN_RECORD).read_text())
    model = load_model(place / "model", plan)
    if fingerprint(hash_arrays(named_leaves(model)).items()) != read_record(place / "model").fingerprint:
        raise ValueError(f"{place / 'model'} is damaged: its weights are not those that were saved")
    bare = eqx.tree_at(lambda s: s.model, shapes, None)
    wanted = named_leaves(bare)
    arrays = read_arrays(place / "train" / STATE, wanted, None)
    if hash_arrays(arrays) != progress["hashes"]:
        raise ValueError(f"{place / 'train'} is damaged: its state is not the one that was saved")
    rest = jax.tree.unflatten(jax.tree.structure(bare), [arrays[name] for name in wanted])
    (place / READ_BACK).touch()
    return eqx.tree_at(lambda s: s.model, rest, model, is_leaf=lambda leaf: leaf is None), progress
