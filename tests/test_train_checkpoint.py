"""Checkpoints: whole or not there, whatever happens while they are written."""

import dataclasses
import errno
import functools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from treering.train.data.new_tokenizer import write_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer") / "bytes"
    write_tokenizer(folder, "bytes", [], 300)
    return folder


def plan_of(mesh, **axes: int):
    from treering.layers.parallel.sharding import Plan

    return Plan(mesh(**axes), "train")


@functools.cache
def state_of(plan):
    from treering.configs.train import OptimizerConfig
    from treering.models.families import families
    from treering.train.step import init_state

    init = families()["llama"].init
    model = plan.init(lambda: init(tiny_run.MODEL, jax.random.key(0)), "parameters")
    state = init_state(model, OptimizerConfig(), plan)
    # Optimizer states that differ from leaf to leaf, as after some steps.
    leaves, structure = jax.tree.flatten(state.optimizer)
    filled = [(leaf + number).astype(leaf.dtype) for number, leaf in enumerate(leaves)]
    return dataclasses.replace(state, optimizer=jax.tree.unflatten(structure, filled))


def shapes_of(plan):
    from treering.configs.train import OptimizerConfig
    from treering.train.step import abstract_state

    return abstract_state(tiny_run.MODEL, OptimizerConfig(), plan)


def checkpoints(folder: Path, **settings):
    from treering.configs.run import CheckpointConfig
    from treering.train.run.checkpoint import Checkpoints

    return Checkpoints(folder, CheckpointConfig(**settings))


@pytest.mark.smoke
def test_a_state_is_restored_bit_equal_on_the_same_mesh_and_on_others(tmp_path, tokenizer, mesh) -> None:
    from treering.models.checkpoint.model import named_leaves
    from treering.train.run.checkpoint import restore

    plan = plan_of(mesh, fsdp=2, context=2, tensor=2)
    state = state_of(plan)
    position = {"counts": [3], "parts": [{"row": 1}]}
    saved = checkpoints(tmp_path / "c")
    saved.save(12, state, position=position, seed=5, tokenizer=tokenizer)
    saved.wait()
    saved.close()
    expected = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    for axes in ({"fsdp": 2, "context": 2, "tensor": 2}, {"data": 8}, {"context": 4}, {}):
        there = plan_of(mesh, **axes)
        found, progress = restore(tmp_path / "c", 12, shapes_of(there), there)
        leaves = named_leaves(found)
        assert all(np.array_equal(leaves[name], value) for name, value in expected.items())
        assert all(leaf.sharding.mesh == there.mesh for leaf in leaves.values())
        assert (progress["position"], progress["seed"], progress["step"]) == (position, 5, 12)


def test_a_steps_model_is_a_checkpoint_of_format_1(tmp_path, tokenizer, mesh) -> None:
    from treering.models.checkpoint.model import load_model
    from treering.models.checkpoint.record import read_record
    from treering.models.tokenizer import Tokenizer

    plan = plan_of(mesh)
    state = state_of(plan)
    saved = checkpoints(tmp_path / "c")
    saved.save(3, state, position={}, seed=0, tokenizer=tokenizer)
    saved.wait()
    saved.close()
    place = tmp_path / "c" / "3" / "model"
    assert read_record(place).config == tiny_run.MODEL and read_record(place).source["step"] == 3
    model = load_model(place, plan)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), model, state.model))
    assert Tokenizer.load(place).decode(Tokenizer.load(place).encode("bark")) == "bark"


def test_what_is_kept_is_the_newest_those_of_an_interval_and_the_newest_read_back(tmp_path, tokenizer, mesh) -> None:
    from treering.train.run.checkpoint import READ_BACK, finished_steps

    plan = plan_of(mesh)
    state = state_of(plan)
    saved = checkpoints(tmp_path / "c", keep=1, keep_every=4)
    for step in range(1, 8):
        saved.save(step, state, position={}, seed=0, tokenizer=tokenizer)
    saved.wait()
    assert finished_steps(tmp_path / "c") == [4, 6, 7]  # 6 was read back before 7 was there
    assert all((tmp_path / "c" / str(step) / READ_BACK).exists() for step in (4, 6, 7))
    # Without reading back, the last that was stays however many come after it.
    saved.close()
    saved = checkpoints(tmp_path / "c", keep=1, read_back=False)
    for step in range(8, 12):
        saved.save(step, state, position={}, seed=0, tokenizer=tokenizer)
    saved.wait()
    saved.close()
    assert finished_steps(tmp_path / "c") == [7, 11]


def test_a_state_that_is_not_finite_is_not_saved(tmp_path, tokenizer, mesh) -> None:
    from treering.train.run.checkpoint import finished_steps

    state = state_of(plan_of(mesh))
    saved = checkpoints(tmp_path / "c")
    saved.save(1, state, position={}, seed=0, tokenizer=tokenizer)
    saved.wait()
    leaves, structure = jax.tree.flatten(state.optimizer)
    leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].set(jnp.nan)
    broken = dataclasses.replace(state, optimizer=jax.tree.unflatten(structure, leaves))
    with pytest.raises(ValueError, match="2 is not finite, so it is not saved: the newest complete one is of step 1"):
        saved.save(2, broken, position={}, seed=0, tokenizer=tokenizer)
    saved.close()
    assert finished_steps(tmp_path / "c") == [1]


def damage(folder: Path) -> None:
    """Changes one byte of the largest file."""
    file = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("part", ["model/weights", "train/state"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, tokenizer, mesh, part) -> None:
    from treering.train.run.folder import newest

    plan = plan_of(mesh)
    state = state_of(plan)
    saved = checkpoints(tmp_path / "c", read_back=False)
    for step in (1, 2):
        saved.save(step, state, position={"at": step}, seed=0, tokenizer=tokenizer)
    saved.wait()
    saved.close()
    damage(tmp_path / "c" / "2" / part)
    said: list[str] = []
    _, position = newest(tmp_path / "c", shapes_of(plan), plan, said.append)
    assert position == {"at": 1} and "checkpoint 2 is skipped" in said[0] and "damaged" in said[0]
    damage(tmp_path / "c" / "1" / part)
    with pytest.raises(ValueError, match="no checkpoint in .* can be read"):
        newest(tmp_path / "c", shapes_of(plan), plan, said.append)


def test_a_checkpoint_that_reads_back_otherwise_is_reported(tmp_path, tokenizer, mesh, monkeypatch) -> None:
    from treering.train.run import checkpoint

    real = checkpoint.read_array
    monkeypatch.setattr(checkpoint, "read_array", lambda *a: real(*a) + 1)
    saved = checkpoints(tmp_path / "c")
    saved.save(1, state_of(plan_of(mesh)), position={}, seed=0, tokenizer=tokenizer)
    with pytest.raises(OSError, match="checkpoint of step 1 could not be read back"):
        saved.wait()
    saved.close()
    assert not (tmp_path / "c" / "1" / checkpoint.READ_BACK).exists()


def test_a_disk_that_is_full_is_reported_and_earlier_checkpoints_stay(tmp_path, tokenizer, mesh, monkeypatch) -> None:
    from treering.train.run import checkpoint

    state = state_of(plan_of(mesh))
    saved = checkpoints(tmp_path / "c", read_back=False)
    saved.save(1, state, position={}, seed=0, tokenizer=tokenizer)
    saved.wait()

    async def full(self, directory, args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.FolderHandler, "async_save", full)
    with pytest.raises(OSError, match="checkpoint of step 2 could not be written .*No space left.*of step 1"):
        saved.save(2, state, position={}, seed=0, tokenizer=tokenizer)
        saved.wait()
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["1"]


def test_a_folder_that_cannot_be_made_is_reported_before_anything_is_compiled(tmp_path, monkeypatch) -> None:
    from treering.train.run import loop as run

    monkeypatch.setattr(run, "step_program", None)
    (tmp_path / "file").write_text("")
    config = dataclasses.replace(tiny_run.tiny_run(tmp_path), folder=str(tmp_path / "file" / "run"))
    with pytest.raises(ValueError, match="cannot be created: .*file is not a folder that can be written to"):
        run.train(config)
    if os.geteuid() != 0:  # Root writes everywhere.
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ValueError, match="not a folder that can be written to"):
            run.train(dataclasses.replace(config, folder=str(tmp_path / "locked" / "run")))


def command(recipe: Path, *options: str, **settings) -> subprocess.Popen:
    program = [sys.executable, "-m", "treering", "train", f"{recipe}:small", "--cpu-devices", "1", *options]
    return subprocess.Popen(program, cwd=ROOT, stderr=subprocess.PIPE, text=True, **settings)


def comes_up(process: subprocess.Popen) -> int:
    """The step that a run starts from, once it says so."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("resumed from"):
            return int(line.rsplit("/", 1)[1])
        if line.startswith("started from"):
            return 0
    pytest.fail(f"the run did not come up: {''.join(said)}")


@pytest.mark.long
def test_killed_twenty_times_while_saving_a_run_always_goes_on_from_a_whole_checkpoint(tmp_path) -> None:
    """Each time the process is killed at a random moment of a save; the next comes up from the newest whole step."""
    recipe = tiny_run.recipe_file(tmp_path, steps="100000", checkpoint="CheckpointConfig(every=1, keep=3)")
    folder = tmp_path / "run" / "checkpoints"
    rng = random.Random(0)
    read_back = within = 0
    for kill in range(21):
        process = command(recipe)
        try:
            start = comes_up(process)
            assert start >= read_back, f"kill {kill} lost the checkpoint of step {read_back}"
            if kill == 20:
                break
            while not any(path.name.isdigit() and int(path.name) > start + 1 for path in folder.glob("*")):
                assert process.poll() is None
                time.sleep(0.01)
            # Two saves are through. Wait for the next one to begin, and strike somewhere within it.
            while not list(folder.glob("*tmp*")):
                assert process.poll() is None
            time.sleep(rng.uniform(0, 0.15))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        within += bool(list(folder.glob("*tmp*")))
        read_back = max(int(path.parent.name) for path in folder.glob("*/read_back"))
    assert within >= 5, f"only {within} of 20 kills came within a save"


@pytest.mark.long
def test_a_file_system_that_takes_no_more_ends_the_run_with_a_clear_line_and_loses_nothing(tmp_path) -> None:
    """Files may not grow beyond 12 kB, as a full disk: the embedding table's chunk does not fit any more."""
    recipe = tiny_run.recipe_file(tmp_path)
    done = command(recipe, "--stop-at", "5")
    _, said = done.communicate(timeout=300)
    assert done.returncode == 0, said

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    failed = command(recipe, "--stop-at", "10", preexec_fn=limit)
    _, said = failed.communicate(timeout=300)
    assert failed.returncode == 2
    assert "Traceback" not in said, said
    last = said.strip().splitlines()[-1]
    assert "could not be written" in last and "the newest complete one is of step 5" in last, said
    again = command(recipe, "--stop-at", "10")
    _, said = again.communicate(timeout=300)
    assert again.returncode == 0 and "resumed from" in said, said
