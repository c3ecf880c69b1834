"""A training run, from its config to its last checkpoint."""

import contextlib
import math
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from treering.configs.run import RunConfig
from treering.layers.parallel.devices import describe, plan_for, simulate_cpu_devices
from treering.layers.parallel.program import Program
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.atomic_folder import exclusive_lock
from treering.models.checkpoint.record import CHECKPOINTS
from treering.models.conversion.load import open_model
from treering.models.families import families
from treering.models.tokenizer import TOKENIZER
from treering.train.data.batch import Batch, shard_batch
from treering.train.data.file_fingerprints import FileFingerprints
from treering.train.data.open import Data, open_data
from treering.train.data.packing import count
from treering.train.data.stream import Position, ahead, batches, process_rows
from treering.train.data.tokenizer import find_tokenizer
from treering.train.run.check import check_run, memory_in_words, warm_up_in_words
from treering.train.run.checkpoint import Checkpoints, finished_steps
from treering.train.run.folder import check_data_files, make_folder, newest, unfinished, weights_of
from treering.train.run.held_out import HeldOut, in_words
from treering.train.run.watch import Profile, Recorder, StopSignal, TooManySkips, Watchdog
from treering.train.step import TrainState, abstract_state, init_state, step_program


class Stopped(Exception):
    """A run that ended early; its state is saved. `status` is the exit status of the command."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    metrics: dict[str, Any] | None
    """Of the last step; None where no step was left to take."""
    held_out: dict[str, Any] | None
    """Of the last evaluation."""


@dataclass(frozen=True)
class Setup:
    """What a run needs for its steps, besides a state; made without writing into its folder."""

    config: RunConfig
    plan: Plan
    tokenizer: Path
    files: FileFingerprints
    data: Data
    shapes: TrainState
    """The abstract state."""
    program: Program
    held_out: HeldOut | None

    @property
    def last(self) -> int:
        """The step after which this process stops."""
        return min(self.config.steps, self.config.stop_at or self.config.steps)


@dataclass
class Progress:
    """Where a run is; what a step changes."""

    step: int
    state: TrainState
    position: Position
    """Of the next row in the data."""
    held_out: dict[str, Any] | None = None
    """The last evaluation."""


def train(config: RunConfig) -> Outcome:
    """Runs `config`, or resumes what its folder holds.

    Raises ValueError for a config that cannot be run, before anything is compiled or written; OSError where a
    checkpoint cannot be written; `Stopped` on SIGTERM and Ctrl-C, and after too many steps without a finite loss.
    """
    plan = start_devices(config)
    check_run(config, plan)
    setup = prepare(config, plan)
    now = first_progress(setup)
    setup.data.mixture.seek(now.position)
    if now.step >= setup.last:
        say(f"nothing to do: the run is at step {now.step} of {setup.last}")
        return Outcome(now.step, None, None)
    with locked_folder(setup):  # From here on, files are written.
        return loop(setup, now)


def say(text: str) -> None:
    """Prints a line on standard error, on the first process."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def start_devices(config: RunConfig) -> Plan:
    """The devices of this process and of those that it runs with, as the config's mesh."""
    if config.cpu_devices is not None:
        simulate_cpu_devices(config.cpu_devices)
    if config.distributed.enabled:
        jax.distributed.initialize(
            config.distributed.coordinator, config.distributed.processes, config.distributed.process
        )
    return plan_for(config.mesh, "train", fill="fsdp")


def prepare(config: RunConfig, plan: Plan) -> Setup:
    """Opens the data and compiles the programs, from shapes alone."""
    origin = config.init_from or config.resume_from
    tokenizer = find_tokenizer(config, None if origin is None else weights_of(origin))
    files = check_data_files(config)
    data = open_data(config, tokenizer)
    batch, window = config.data.batch, config.data.window
    say(f"mesh {describe(plan)}; {count(batch, 'row')} of {count(window, 'token')} per step")
    for line in data.report:
        say(line)

    shapes = abstract_state(config.model, config.optimizer, plan, params=config.step.precision.params)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.model))
    say(f"model {config.model.family}, {parameters:,} parameters, computed in {config.step.precision.compute}")
    started = time.perf_counter()
    program = step_program(shapes, config.step, config.optimizer, plan, steps=config.steps, batch=batch, seq=window)
    say(f"step compiled in {time.perf_counter() - started:.1f} s; {memory_in_words(program, plan)}")
    if (warning := warm_up_in_words(config)) is not None:
        say(warning)
    held_out = HeldOut(config, shapes.model, plan, data.held_out) if data.held_out else None
    return Setup(config, plan, tokenizer, files, data, shapes, program, held_out)


def first_progress(setup: Setup) -> Progress:
    """Where the run starts: the first of these that exists.

    1. This run's own newest checkpoint,
    2. the newest checkpoint of the run `resume_from`,
    3. the weights of `init_from`, at step 0,
    4. random weights from `seed`.
    """
    config, plan, shapes = setup.config, setup.plan, setup.shapes
    resumed = Path(config.folder) / CHECKPOINTS
    if not finished_steps(resumed):
        resumed = None if config.resume_from is None else Path(config.resume_from) / CHECKPOINTS
    if resumed is not None:
        state, position = newest(resumed, shapes, plan, say)
        return Progress(int(jax.device_get(state.step)), state, position)
    if config.init_from is not None:
        weights = open_model(weights_of(config.init_from)).load(plan, config.step.precision.params)
        # The arrays of those weights in the model of this run, whose context may be longer.
        model = jax.tree.unflatten(jax.tree.structure(shapes.model), jax.tree.leaves(weights))
        say(f"started from the weights of {weights_of(config.init_from)}")
        if (warning := unfinished(config.init_from)) is not None:
            say(warning)
    else:
        init = families()[config.model.family].init
        model = plan.init(lambda: init(config.model, jax.random.key(config.seed)), "parameters")
        say(f"started from random weights, seed {config.seed}")
    state = init_state(model, config.optimizer, plan, params=config.step.precision.params)
    return Progress(0, state, setup.data.mixture.position)


@contextlib.contextmanager
def locked_folder(setup: Setup) -> Iterator[None]:
    """The run's folder, created by the first process, and locked against other runs."""
    folder = Path(setup.config.folder)
    with contextlib.ExitStack() as held:
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            message = f"another process trains in {folder}: wait for it, or choose another --folder"
            held.enter_context(exclusive_lock(folder, message))
            make_folder(folder, setup.config, setup.tokenizer, setup.files)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("the run's folder")
        yield


def loop(setup: Setup, now: Progress) -> Outcome:
    """Takes steps up to the last, or until a signal comes; raises what `train` does."""
    config, devices, first = setup.config, setup.plan.mesh.devices, now.step + 1
    folder = Path(config.folder)
    with (
        contextlib.closing(Checkpoints(folder / CHECKPOINTS, config.checkpoint)) as checkpoints,
        contextlib.closing(Recorder(config, folder, now.step, devices.flat[0].device_kind, devices.size)) as recorder,
        StopSignal() as asked,
    ):
        try:
            stopped = take_steps(setup, now, checkpoints, recorder, asked)
            checkpoints.wait()
        except TooManySkips as skips:
            raise saved_after_skips(setup, now, checkpoints, skips.step) from None
    if stopped and now.step < setup.last:
        message = f"stopped by {asked.which.name} after step {now.step}, and saved: the same command resumes it"
        raise Stopped(message, status=128 + asked.which)
    say(f"done: steps {first} to {now.step}; the model is {folder / CHECKPOINTS / str(now.step) / 'model'}")
    return Outcome(now.step, recorder.newest, now.held_out)


def take_steps(setup: Setup, now: Progress, checkpoints: Checkpoints, recorder: Recorder, asked: StopSignal) -> bool:
    """Steps up to the last, or until a signal comes, and whether one came. Raises `TooManySkips`.

    Between host and devices nothing is copied except where it is asked for: batches, metrics, checkpoints.
    """
    config = setup.config
    with (
        contextlib.closing(Watchdog(config.watch.stalled, config.watch.stalled_seconds)) as watchdog,
        contextlib.closing(Profile(Path(config.folder), config.watch.profile)) as profile,
        contextlib.closing(batches_on_devices(setup)) as stream,
        jax.transfer_guard("disallow"),
    ):
        for batch, after in stream:
            profile.before(now.step + 1)
            watchdog.started(now.step + 1)
            now.state, metrics = setup.program(None, now.state, batch)
            now.step, now.position = now.step + 1, after
            recorder.add(now.step, metrics, min(part["block"]["epoch"] for part in after["parts"]))
            profile.after(now.step, metrics)

            stopped = asked(now.step)
            ends = stopped or now.step == setup.last
            evaluates = now.step % config.evaluate.every == 0 or now.step == config.steps
            saves = ends or now.step % config.checkpoint.every == 0
            if evaluates or saves:
                recorder.flush()
            watchdog.ended()
            with jax.transfer_guard("allow"):
                if evaluates:
                    evaluate(setup, now, recorder)
                if saves:
                    save(setup, now, checkpoints)
                    recorder.restart_clock()
                checkpoints.check()
            if ends:
                return stopped
    raise AssertionError("the data has no end")


def batches_on_devices(setup: Setup) -> Generator[tuple[Batch, Position], None, None]:
    """The batches from the current position on, each made and sent ahead, and the position after it."""
    config, plan = setup.config, setup.plan
    mine = process_rows(plan, config.data.batch, config.data.window)
    return ahead(
        (shard_batch(batch, plan, rows=config.data.batch, first_row=mine.start), after)
        for batch, after in batches(setup.data.mixture, config.data.batch, mine)
    )


def evaluate(setup: Setup, now: Progress, recorder: Recorder) -> None:
    """Takes and records the held-out loss, where there is held-out data."""
    if setup.held_out is not None:
        now.held_out = {"step": now.step, **setup.held_out.evaluate(now.state.model)}
        recorder.note(now.held_out, f"step {now.step} {in_words(now.held_out)}")
        recorder.restart_clock()


def save(setup: Setup, now: Progress, checkpoints: Checkpoints) -> None:
    """Starts to write a checkpoint of the step; raises what `Checkpoints.save` does."""
    tokenizer = Path(setup.config.folder) / TOKENIZER
    checkpoints.save(now.step, now.state, position=now.position, seed=setup.config.seed, tokenizer=tokenizer)


def saved_after_skips(setup: Setup, now: Progress, checkpoints: Checkpoints, step: int) -> Stopped:
    """The end of a run whose steps up to `step` were skipped; its state is saved if it is finite."""
    message = f"step {step} was the last of {setup.config.watch.skips} in a row without a finite loss and gradient"
    try:
        save(setup, now, checkpoints)
        checkpoints.wait()
    except ValueError as error:  # The state itself is not finite.
        return Stopped(f"{message}; {error}", status=1)
    advice = "lower the learning rate, or look at the data"
    return Stopped(f"{message}; the run is saved at step {now.step}: {advice}", status=1)
