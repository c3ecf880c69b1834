"""Runs: the same whether straight or interrupted, stopped in time, and reported in full."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_run
from treering.configs.mesh import MeshConfig

# The mesh of the straight run, and another.
MESH, OTHER = MeshConfig(fsdp=4, context=2), MeshConfig(data=2, context=2, tensor=2)


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Everything that a checkpoint holds."""
    from treering.models.checkpoint.arrays import read_array, read_shapes

    place = folder / "checkpoints" / str(step)
    found = {}
    for part in (place / "model" / "weights", place / "train" / "state"):
        found |= {name: read_array(part, name, shape.dtype) for name, shape in read_shapes(part).items()}
    return found


def lines(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl that are a step's, without what a clock says."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("step_seconds", "tokens_per_second", "time")
    return [{k: v for k, v in record.items() if k not in clocks} for record in found if "loss" in record]


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Runs of this file that would compile the same program share it: compiling is most of their time."""
    from treering.train.run import held_out
    from treering.train.run import loop as run

    made: dict[Any, Any] = {}

    def shared(make: Callable[..., Any]) -> Callable[..., Any]:
        def program(state: Any, *settings: Any, **sizes: Any) -> Any:
            model = getattr(state, "model", state)
            key = (make.__name__, model.config, settings, tuple(sizes.items()))
            if key not in made:
                made[key] = make(state, *settings, **sizes)
            return made[key]

        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "step_program", shared(run.step_program))
        patch.setattr(held_out, "evaluation_program", shared(held_out.evaluation_program))
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps without a stop."""
    from treering.train.run.loop import train

    folder = tmp_path_factory.mktemp("straight")
    outcome = train(tiny_run.tiny_run(folder, mesh=MESH))
    assert outcome.step == 20
    return folder


def beside(straight: Path, tmp_path: Path, **changes) -> tiny_run.RunConfig:
    """The same run in a folder of its own, on the same data and cache."""
    config = tiny_run.tiny_run(straight, mesh=MESH, **changes)
    return dataclasses.replace(config, folder=str(tmp_path / "run"))


def test_a_run_tells_of_each_step_and_of_held_out_loss(straight: Path) -> None:
    records = lines(straight / "run")
    assert [record["step"] for record in records] == list(range(1, 21))
    assert records[0]["learning_rate"] == pytest.approx(3e-3 / 4) and records[-1]["epoch"] >= 2
    assert all(record["trained_tokens"] > 0 and record["skipped_in_row"] == 0 for record in records)
    assert records[-1]["loss"] < records[0]["loss"] - 1
    evaluated = [json.loads(line) for line in (straight / "run/metrics.jsonl").read_text().splitlines()][-1]
    text = [json.loads(line)["text"] for line in (straight / "test.jsonl").read_text().splitlines()]
    # One token a byte, one for the end of each text; the first of the tokens begins the text.
    assert evaluated["held_out_tokens"] == sum(len(row) + 1 for row in text)
    bits = evaluated["held_out"] * evaluated["held_out_tokens"] / sum(map(len, text)) / np.log(2)
    assert evaluated["bits_per_byte"] == pytest.approx(bits)
    counted = [count for _, _, count in evaluated["by_position"]]
    assert [edge for edge, _, _ in evaluated["by_position"]] == [0] and sum(counted) == evaluated["held_out_tokens"]


def test_stopped_at_seven_and_at_an_epochs_end_a_run_ends_bit_equal(straight: Path, tmp_path: Path) -> None:
    from treering.train.run.loop import train

    epochs = [record["epoch"] for record in lines(straight / "run")]
    ends = [step for step in range(1, 20) if epochs[step] > epochs[step - 1] and step > 7]
    assert ends, "the run must reach beyond an epoch's end"
    for stop in (7, ends[0], None):
        train(beside(straight, tmp_path, stop_at=stop))
    assert lines(tmp_path / "run") == lines(straight / "run")
    expected, found = arrays(straight / "run", 20), arrays(tmp_path / "run", 20)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not np.array_equal(expected[name], found[name])] == []


@pytest.mark.long
def test_resumed_on_another_mesh_a_run_ends_within_rounding(straight: Path, tmp_path: Path) -> None:
    from treering.train.run.loop import train

    train(beside(straight, tmp_path, stop_at=7))
    train(dataclasses.replace(beside(straight, tmp_path), mesh=OTHER))
    expected, found = arrays(straight / "run", 20), arrays(tmp_path / "run", 20)
    for name, there in expected.items():
        scale = np.linalg.norm(there.astype(np.float64))
        assert np.linalg.norm(there.astype(np.float64) - found[name]) <= 1e-5 * max(scale, 1e-30), name
    rates = [record["learning_rate"] for record in lines(straight / "run")]
    assert [record["learning_rate"] for record in lines(tmp_path / "run")] == rates


def test_a_run_that_is_at_its_end_does_nothing_and_says_so(straight: Path, capsys) -> None:
    from treering.train.run.loop import train

    before = {path: path.stat().st_mtime_ns for path in (straight / "run" / "checkpoints").rglob("*")}
    outcome = train(tiny_run.tiny_run(straight, mesh=MESH))
    assert outcome.step == 20 and outcome.metrics is None
    assert "nothing to do: the run is at step 20 of 20" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in (straight / "run" / "checkpoints").rglob("*")} | {
        path: before[path] for path in before if path.name == "read_back"
    }


def test_a_run_from_the_command_line_trains_and_resumes(straight: Path, tmp_path: Path, capsys) -> None:
    import treering

    command = ["train", f"{tiny_run.recipe_file(tmp_path)}:small", "--mesh.fsdp", "4", "--mesh.context", "2"]
    assert treering.main([*command, "--stop-at", "2"]) == 0
    assert treering.main([*command, "--steps", "20", "--stop-at", "3", "--watch.no-bar"]) == 0
    err = capsys.readouterr().err
    assert "packed" in err and "0 dropped" in err and "resumed from" in err and "step compiled in" in err
    assert lines(tmp_path / "run") == lines(straight / "run")[:3]


def test_a_run_does_not_go_on_with_other_data_but_with_a_copy(tmp_path: Path) -> None:
    from treering.train.run.loop import train

    config = tiny_run.tiny_run(tmp_path, mesh=MESH, stop_at=2)
    file = tmp_path / "train.jsonl"
    right = file.read_text()
    train(config)
    words = ": it had {} bytes in 1 file, and has {} bytes in 1 file"
    for wrong, change in (
        (right.replace("tree", "reet", 1), words.format(f"{len(right):,}", f"{len(right):,}") + " with other content"),
        (right + right, words.format(f"{len(right):,}", f"{2 * len(right):,}")),
    ):
        file.write_text(wrong)
        for again in (config, dataclasses.replace(config, folder=str(tmp_path / "new"), resume_from=config.folder)):
            with pytest.raises(
                ValueError, match=f"train.jsonl has changed since the run in .*/run began{change}. Restore"
            ):
                train(dataclasses.replace(again, stop_at=3))
    assert not (tmp_path / "new").exists()
    file.unlink()
    file.write_text(right)
    assert train(dataclasses.replace(config, stop_at=3)).step == 3


def test_samples_of_large_files_tell_them_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treering.configs.data import Source
    from treering.train.data import file_fingerprints as data_files

    monkeypatch.setattr(data_files, "SAMPLED", 2 << 10)
    text = bytes(np.random.default_rng(0).integers(0, 256, 100_000, np.uint8))
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(text)
    sources = (Source(path=str(tmp_path / "*.jsonl")), Source(path="python-docs"))
    before = data_files.fingerprint_files(sources)
    assert before.keys() == {sources[0].path} and before[sources[0].path]["bytes"] == 200_000
    for place in (0, -1):
        changed = bytearray(text)
        changed[place] ^= 1
        (tmp_path / "b.jsonl").write_bytes(changed)
        assert data_files.fingerprint_files(sources) != before
    (tmp_path / "b.jsonl").write_bytes(text)
    assert data_files.fingerprint_files(sources) == before


def test_what_a_killed_run_wrote_after_its_checkpoint_is_dropped(straight: Path, tmp_path: Path) -> None:
    from treering.train.run.loop import train

    train(beside(straight, tmp_path, stop_at=2))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as log:
        log.write('{"step": 3, "loss": 1.0}\n{"step": 3, "held_out": 1.0}\n{"step": 4, "lo')
    train(beside(straight, tmp_path, stop_at=4))
    assert lines(tmp_path / "run") == lines(straight / "run")[:4]
    assert "held_out" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_run_that_cannot_begin_leaves_no_folder(straight: Path, tmp_path: Path) -> None:
    from treering.train.run.loop import train

    shutil.copytree(straight / "run", tmp_path / "damaged")
    for chunk in (tmp_path / "damaged").glob("checkpoints/*/train/state/*/*"):
        chunk.write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint in .* can be read"):
        train(beside(straight, tmp_path, resume_from=str(tmp_path / "damaged")))
    train(beside(straight, tmp_path, resume_from=str(straight / "run")))  # is at its end
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


def test_generate_reads_a_runs_model(straight: Path, capsys) -> None:
    from treering.configs.infer import GenerateOptions
    from treering.infer.commands.generate import generate

    model = str(straight / "run" / "checkpoints" / "20" / "model")
    result = generate(GenerateOptions(checkpoint=model, prompt="ring ", max_new_tokens=8))
    assert result["finish_reason"] == "stop" or result["tokens"] and isinstance(result["text"], str)


@pytest.mark.long
def test_a_run_starts_from_the_weights_of_another_with_a_longer_context(straight: Path, tmp_path: Path, capsys) -> None:
    from treering.train.run.loop import train

    config = beside(straight, tmp_path, init_from=str(straight / "run"), steps=4)
    data = dataclasses.replace(config.data, tokenizer=None, window=128)
    model = dataclasses.replace(config.model, context_length=128, rope=tiny_run.DefaultRope(theta=40_000.0))
    outcome = train(dataclasses.replace(config, data=data, model=model))
    assert f"started from the weights of {straight / 'run'}" in capsys.readouterr().err
    assert outcome.metrics is not None and outcome.metrics["loss"] < lines(straight / "run")[10]["loss"]
    from treering.models.checkpoint.record import read_config

    assert read_config(tmp_path / "run/checkpoints/4/model") == model


def test_a_run_goes_on_from_another_runs_step_and_place_in_the_data(straight: Path, tmp_path: Path, capsys) -> None:
    from treering.train.run.loop import train

    train(beside(straight, tmp_path, stop_at=7))
    config = beside(straight, tmp_path, resume_from=str(tmp_path / "run"))
    train(dataclasses.replace(config, folder=str(tmp_path / "second")))
    assert lines(tmp_path / "second") == lines(straight / "run")[7:]
    # Weights of a run that is not finished are taken, and the run says so.
    for run, warned in ((tmp_path / "run", True), (straight / "run", False)):
        capsys.readouterr()
        config = beside(straight, tmp_path, init_from=str(run), stop_at=1)
        train(dataclasses.replace(config, folder=str(tmp_path / f"from_{run.parent.name}")))
        warning = f"the run in {run} is not finished: its newest checkpoint is of step 7 of 20\n"
        assert (warning in capsys.readouterr().err) == warned


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_same_command_goes_on(
    straight: Path, tmp_path: Path, monkeypatch, which: signal.Signals
) -> None:
    from treering.train.run import loop as module

    class Recorder(module.Recorder):
        def add(self, step, *rest):
            super().add(step, *rest)
            if step == 5 and not asked.is_set():
                asked.set()
                with pytest.raises(ValueError, match="another process trains in .*/run: wait for it"):
                    module.train(beside(straight, tmp_path))
                os.kill(os.getpid(), which)

    asked = threading.Event()
    monkeypatch.setattr(module, "Recorder", Recorder)
    before = signal.getsignal(which)
    with pytest.raises(module.Stopped, match=f"stopped by {which.name} after step 5, and saved") as stopped:
        module.train(beside(straight, tmp_path))
    assert stopped.value.status == 128 + which and signal.getsignal(which) is before
    assert module.finished_steps(tmp_path / "run" / "checkpoints") == [5]
    module.train(beside(straight, tmp_path))
    assert lines(tmp_path / "run") == lines(straight / "run")


@pytest.mark.parametrize(("rate", "saved"), [(1e30, [5]), pytest.param(1e39, [], marks=pytest.mark.long)])
def test_steps_without_a_finite_loss_stop_the_run(
    straight: Path, tmp_path: Path, rate: float, saved: list[int]
) -> None:
    """The first step throws the weights so far that no loss is finite; three skips end the run. Weights that are still
    numbers are saved, infinite ones are not. Step 5 was on its way when step 4 was looked at."""
    from treering.train.run.loop import Stopped, finished_steps, train

    config = beside(straight, tmp_path)
    optimizer = dataclasses.replace(config.optimizer, learning_rate=rate)
    watch = dataclasses.replace(config.watch, skips=3)
    with pytest.raises(Stopped, match="step 4 was the last of 3 in a row without a finite loss") as stopped:
        train(dataclasses.replace(config, optimizer=optimizer, watch=watch))
    assert stopped.value.status == 1 and ("not finite, so it is not saved" in str(stopped.value)) == (not saved)
    records = lines(tmp_path / "run")
    assert [record["skipped_in_row"] for record in records] == [0, 1, 2, 3]
    assert None in (records[1]["loss"], records[1]["grad_norm"]), "metrics.jsonl is JSON, which has no infinity"
    assert finished_steps(tmp_path / "run" / "checkpoints") == saved
    if saved:
        assert all(np.isfinite(x).all() for x in arrays(tmp_path / "run", 5).values())


def test_the_watchdog_names_the_step_and_ends_the_process(capfd, monkeypatch) -> None:
    from treering.train.run import watch

    ended = threading.Event()
    statuses = []
    monkeypatch.setattr(watch.os, "_exit", lambda status: (statuses.append(status), ended.set()))
    dog = watch.Watchdog(10.0, 0.2)
    for step in range(6):
        dog.started(step)
        dog.ended()
    assert not ended.wait(0.5), "between steps it does not look"
    dog.started(7)
    assert ended.wait(5)
    dog.close()
    assert statuses[0] == 1 and "step 7 has taken" in capfd.readouterr().err


def test_a_killed_run_leaves_a_broken_line_and_the_next_one_mends_it(tmp_path: Path) -> None:
    from treering.configs.run import WatchConfig
    from treering.train.run.metrics import MetricsLog, read_metrics

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    log = MetricsLog(tmp_path, WatchConfig(), step=1)
    for step in (2, 3):
        log.write({"step": step, "loss": float("nan")})
    log.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(1, 2.0), (2, None), (3, None)]


def test_the_flops_of_a_token_are_those_of_its_products() -> None:
    """Counted by XLA for a dense forward of one layer: two operations a weight, and attention to the whole window."""
    from treering.configs.llama import SMOLLM2_135M
    from treering.train.run.metrics import flops_per_token, peak_flops

    short = flops_per_token(SMOLLM2_135M, 1)
    assert short / 6 == pytest.approx(134_515_008, rel=0.01), "SmolLM2-135M's weights, embeddings tied"
    assert flops_per_token(SMOLLM2_135M, 8193) - short == pytest.approx(12 * 30 * 576 * 4096)
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("cpu") is None


def test_a_run_without_a_terminal_prints_its_first_and_last_step_and_some_between(capsys) -> None:
    from treering.train.run.watch import Bar

    def printed(total: int, done: int, last: int, seconds: float = 1e9) -> list[int]:
        bar = Bar(total, done, last, bar=True, seconds=seconds)
        for step in range(done + 1, last + 1):
            bar.show(step, {"loss": 2.0, "tokens_per_second": 1e3, "step_seconds": 0.1})
        found = [line.split()[1].split("/") for line in capsys.readouterr().err.splitlines()]
        assert all(int(of) == total for _, of in found)
        return [int(step) for step, _ in found]

    assert printed(20, 0, 20) == [1, *range(2, 21, 2)]
    assert printed(1000, 0, 1000) == [1, *range(100, 1001, 100)]
    assert printed(1000, 0, 13) == [1, 2, 4, 6, 8, 10, 12, 13], "a run that stops earlier shows its own steps"
    assert printed(20, 15, 20) == [16, 17, 18, 19, 20]
    assert printed(50, 0, 50, seconds=0.0) == list(range(1, 51)), "and each after a time"


def test_a_run_says_when_warm_up_takes_most_of_it(tmp_path: Path) -> None:
    from treering.configs.train import OptimizerConfig, ScheduleConfig
    from treering.train.run.check import warm_up_in_words

    def said(warmup: int, steps: int) -> str | None:
        optimizer = OptimizerConfig(schedule=ScheduleConfig(warmup_steps=warmup))
        return warm_up_in_words(tiny_run.tiny_run(tmp_path, steps=steps, optimizer=optimizer))

    assert said(10, 20) is None and said(0, 1) is None
    assert (said(11, 20) or "").startswith(
        "warm-up takes 11 of 20 steps: the learning rate reaches its peak at step 11"
    )
    assert (said(1, 1) or "").startswith("warm-up takes 1 of 1 step: ")


def test_a_run_without_held_out_loss_has_no_plot_of_it(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    import treering

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    assert treering.main(["plot", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'loss.png'}\n" and not (tmp_path / "position.png").exists()
    assert err == "position.png is not drawn: there is no held-out loss (see --data.held-out.0.path)\n"


def test_the_legend_of_a_plot_names_what_is_drawn(straight: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    from treering.train.commands.plot import draw_loss
    from treering.train.run.metrics import read_metrics

    axes = figure.subplots()
    draw_loss(axes, {"a/first": [{"step": 1, "loss": 2.0}], str(straight / "run"): read_metrics(straight / "run")})
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["first", "run", "run, held out"]


def test_runs_are_plotted(straight: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from treering.train.commands.plot import PlotOptions, plot

    pictures = plot(PlotOptions(runs=(str(straight / "run"),), output=str(tmp_path)))
    assert [path.name for path in pictures] == ["loss.png", "position.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures)
    with pytest.raises(ValueError, match="is not the folder of a run: it has no metrics.jsonl"):
        plot(PlotOptions(runs=(str(tmp_path),)))


@pytest.mark.long
def test_two_processes_train_resume_and_stop_as_one(tmp_path: Path) -> None:
    """Two processes of four devices: the losses of one process, another mesh half way, and one SIGTERM for both."""
    recipe = tiny_run.recipe_file(tmp_path, steps="100000")

    def start(folder: str, *options: str) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        program = [sys.executable, "-m", "treering", "train", f"{recipe}:small", "--folder", str(tmp_path / folder)]
        each = ["--distributed.enabled", "--distributed.coordinator", coordinator, "--distributed.processes", "2"]
        return [
            subprocess.Popen(
                [*program, *options, *each, "--cpu-devices", "4", "--distributed.process", str(number)],
                cwd=Path(__file__).parents[1],
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]

    def end(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
        try:
            said = [process.communicate(timeout=400)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]

    for stop, mesh in (("4", ["--mesh.context", "8"]), ("8", ["--mesh.data", "2", "--mesh.context", "4"])):
        for status, said in end(start("two", *mesh, "--stop-at", stop)):
            assert status == 0, said
    from treering.train.run.loop import finished_steps, train

    one = dataclasses.replace(tiny_run.tiny_run(tmp_path, steps=100_000, stop_at=8), folder=str(tmp_path / "one"))
    train(one)
    expected, found = ([record["loss"] for record in lines(tmp_path / name)] for name in ("one", "two"))
    assert found == pytest.approx(expected, rel=1e-5)

    processes = start("two", "--mesh.context", "8")
    while len(lines(tmp_path / "two")) < 12:
        assert [process.poll() for process in processes] == [None, None]
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    ended = end(processes)
    assert [status for status, _ in ended] == [143, 143], ended
    assert finished_steps(tmp_path / "two" / "checkpoints")[-1] == lines(tmp_path / "two")[-1]["step"]


def test_a_run_starts_from_a_folder_of_hugging_faces_and_from_gguf_as_from_a_checkpoint(tmp_path: Path, capsys) -> None:
    import tiny
    import treering
    from treering.models.conversion.convert import convert
    from treering.models.tokenizer import Tokenizer

    config = tiny.LLAMA | {"vocab_size": 300}
    tiny.save_byte_level(tiny.write_folder(tmp_path / "hf", config))
    tiny.write_gguf(tmp_path / "model.gguf", config, metadata=tiny.gguf_tokenizer_metadata("gpt2"))
    convert(tmp_path / "hf", tmp_path / "checkpoint")
    tiny_run.write_texts(tmp_path / "documents.jsonl")
    options = [
        *("--data.sources.0.path", str(tmp_path / "documents.jsonl"), "--data.cache", str(tmp_path / "cache")),
        *("--data.window", "64", "--steps", "2", "--optimizer.schedule.warmup-steps", "2"),
        *("--step.precision.compute", "float32"),
    ]
    found = {}
    for name in ("checkpoint", "hf", "model.gguf"):
        folder = tmp_path / "runs" / name
        start = ("--init-from", str(tmp_path / name))
        assert treering.main(["train", "fine_tune", *start, "--folder", str(folder), *options]) == 0
        assert "\nwarm-up takes 2 of 2 steps: " in capsys.readouterr().err
        found[name] = arrays(folder, 2)
        assert json.loads((folder / "config.json").read_text())["model.embed"] == config["hidden_size"]
        tokenizer = Tokenizer.load(folder / "checkpoints" / "2" / "model")
        assert tokenizer.encode("Paris") == tiny.byte_level_tokenizer().encode("Paris").ids
    for name in ("hf", "model.gguf"):
        assert found[name].keys() == found["checkpoint"].keys()
        different = [
            path for path, array in found["checkpoint"].items() if not np.array_equal(array, found[name][path])
        ]
        assert different == [], name
