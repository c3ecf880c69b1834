"""Training gives the same numbers on one device and on every mesh, in one process and in several."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import training

AXES = ("data", "fsdp", "context", "tensor")
TOLERANCE = 1e-5


def sizes(digits: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in zip(AXES, digits, strict=True)}


def assert_same(ours: training.Run, theirs: training.Run) -> None:
    assert ours.tokens == theirs.tokens
    assert np.allclose(ours.losses, theirs.losses, rtol=TOLERANCE, atol=0)
    assert np.allclose(ours.norms, theirs.norms, rtol=TOLERANCE, atol=0)
    assert training.difference(ours.gradients, theirs.gradients) <= TOLERANCE
    assert training.difference(ours.parameters, theirs.parameters) <= TOLERANCE


@pytest.fixture(scope="module")
def one_device(mesh):
    return training.run(training.train_plan(mesh()))


LONG = [pytest.param(digits, marks=pytest.mark.long) for digits in ("8111", "1811", "1181", "2141", "1142")]


@pytest.mark.parametrize("digits", ["1222", *LONG])
def test_three_steps_are_the_same_on_every_mesh(mesh, one_device, digits):
    """Loss, gradients by leaf, gradient norm, and parameters after three steps, clipped AdamW with decay."""
    assert_same(training.run(training.train_plan(mesh(**sizes(digits)))), one_device)


@pytest.mark.long
def test_three_steps_are_the_same_over_eight_key_heads(mesh):
    runs = [
        training.run(training.train_plan(mesh(**sizes(digits))), config=training.MORE_KEY_HEADS)
        for digits in ("1118", "1111")
    ]
    assert_same(*runs)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def in_two_processes(digits: str, folder: Path) -> training.Run:
    """The same run on two processes of four devices each, which talk through gloo."""
    worker, port = Path(__file__).with_name("training_worker.py"), str(free_port())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(worker.parents[1]), str(worker.parent)])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), port, str(number), digits, str(folder / f"{number}.pickle")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text
    runs = [pickle.loads((folder / f"{number}.pickle").read_bytes()) for number in range(2)]
    for name, array in runs[0].parameters.items():
        assert np.array_equal(array, runs[1].parameters[name]), name
    return runs[0]


@pytest.mark.long
@pytest.mark.parametrize("digits", ["8111", "1181", "2141"])
def test_three_steps_are_the_same_in_two_processes(mesh, one_device, digits, tmp_path):
    assert_same(in_two_processes(digits, tmp_path), one_device)
