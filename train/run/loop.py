"""A training run, from its config to its last checkpoint."""

import contextlib
import math
import sys
import time
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
from treering.train.data.batch import shard_batch
from treering.train.data.open import open_data
from treering.train.data.stream import ahead, batches, process_rows
from treering.train.data.tokenizer import find_tokenizer
from treering.train.run.check import check_run
from treering.train.run.checkpoint import Checkpoints, finished_steps
from treering.train.run.folder import check_data_files, make_folder, newest, weights_of
from treering.train.run.held_out import HeldOut, in_words
from treering.train.run.watch import Profile, Recorder, StopSignal, TooManySkips, Watchdog
from treering.train.step import abstract_state, init_state, step_program


class Stopped(Exception):
    """A run that ended before its time; what it had is saved. `status` is the exit status of the command."""

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


def train(config: RunConfig) -> Outcome:
    """Runs `config`, or goes on with what its folder holds.

    Raises ValueError for a run that cannot be, before anything is compiled or written; OSError where a checkpoint
    cannot be written; `Stopped` on SIGTERM and Ctrl-C, and after too many steps without a finite loss.
    """
    # Devices, and all that can be wrong.
    if config.cpu_devices is not None:
        simulate_cpu_devices(config.cpu_devices)
    if config.distributed.enabled:
        jax.distributed.initialize(
            config.distributed.coordinator, config.distributed.processes, config.distributed.process
        )
    first_process = jax.process_index() == 0
    plan = plan_for(config.mesh, "train", fill="fsdp")
    check_run(config, plan)

    # Data: tokenised, packed, and the rows that this process makes of each batch.
    origin = config.init_from or config.resume_from
    tokenizer = find_tokenizer(config, None if origin is None else weights_of(origin))
    files = check_data_files(config)
    data = open_data(config, tokenizer)
    mine = process_rows(plan, config.data.batch, config.data.window)

    def say(text: str) -> None:
        if first_process:
            print(text, file=sys.stderr, flush=True)

    say(f"mesh {describe(plan)}; {config.data.batch} rows of {config.data.window:,} tokens a step")
    for line in data.report:
        say(line)

    # Programs, compiled from shapes alone.
    shapes = abstract_state(config.model, config.optimizer, plan, params=config.step.precision.params)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.model))
    say(f"model {config.model.family}, {parameters:,} parameters, computed in {config.step.precision.compute}")
    started = time.perf_counter()
    program = step_program(
        shapes,
        config.step,
        config.optimizer,
        plan,
        steps=config.steps,
        batch=config.data.batch,
        seq=config.data.window,
    )
    say(f"step compiled in {time.perf_counter() - started:.1f} s; {memory_in_words(program, plan)}")
    held_out = HeldOut(config, shapes.model, plan, data.held_out) if data.held_out else None

    # Where the state comes from: the first of these that there is.
    # 1. this run's own newest checkpoint,
    # 2. the newest checkpoint of the run `resume_from`,
    # 3. the weights of `init_from`, at step 0,
    # 4. random weights from `seed`.
    folder = Path(config.folder)
    if finished_steps(folder / CHECKPOINTS):
        state, position = newest(folder / CHECKPOINTS, shapes, plan, say)
    elif config.resume_from is not None:
        state, position = newest(Path(config.resume_from) / CHECKPOINTS, shapes, plan, say)
    else:
        if config.init_from is not None:
            weights = open_model(weights_of(config.init_from)).load(plan, config.step.precision.params)
            # The arrays of those weights in the model of this run, whose context may be longer.
            model = jax.tree.unflatten(jax.tree.structure(shapes.model), jax.tree.leaves(weights))
            say(f"started from the weights of {weights_of(config.init_from)}")
        else:
            init = families()[config.model.family].init
            model = plan.init(lambda: init(config.model, jax.random.key(config.seed)), "parameters")
            say(f"started from random weights, seed {config.seed}")
        state = init_state(model, config.optimizer, plan, params=config.step.precision.params)
        position = data.mixture.position
    data.mixture.seek(position)
    step = first_step = int(jax.device_get(state.step))
    last = min(config.steps, config.stop_at or config.steps)
    if step >= last:
        say(f"nothing to do: the run is at step {step} of {last}")
        return Outcome(step, None, None)

    # The folder: from here on, files are written.
    at_the_end = contextlib.ExitStack()
    if first_process:
        folder.mkdir(parents=True, exist_ok=True)
        message = f"another process trains in {folder}: wait for it, or choose another --folder"
        at_the_end.enter_context(exclusive_lock(folder, message))
        make_folder(folder, config, tokenizer, files)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the run's folder")
    checkpoints = Checkpoints(folder / CHECKPOINTS, config.checkpoint)

    def save() -> None:
        checkpoints.save(step, state, position=position, seed=config.seed, tokenizer=folder / TOKENIZER)
        recorder.restart_clock()

    # The loop. Nothing crosses between host and devices in it but what is said to: batches, numbers, checkpoints.
    recorder = Recorder(config, folder, step, plan.mesh.devices.flat[0].device_kind, plan.mesh.size)
    watchdog = Watchdog(config.watch.stalled, config.watch.stalled_seconds)
    profile = Profile(folder, config.watch.profile)
    stream = ahead(
        (shard_batch(batch, plan, rows=config.data.batch, first_row=mine.start), after)
        for batch, after in batches(data.mixture, config.data.batch, mine)
    )
    evaluated, asked_to_stop = None, False
    with at_the_end:
        for part in (checkpoints, recorder, watchdog, profile, stream):
            at_the_end.callback(part.close)
        asked = at_the_end.enter_context(StopSignal())
        at_the_end.enter_context(jax.transfer_guard("disallow"))
        try:
            for batch, after in stream:
                profile.before(step + 1)
                watchdog.started(step + 1)
                state, metrics = program(None, state, batch)
                step, position = step + 1, after
                recorder.add(step, metrics, min(part["block"]["epoch"] for part in after["parts"]))
                profile.after(step, metrics)

                asked_to_stop = asked(step)
                ends = asked_to_stop or step == last
                evaluates = step % config.evaluate.every == 0 or step == config.steps
                saves = ends or step % config.checkpoint.every == 0
                if evaluates or saves:
                    recorder.flush()
                watchdog.ended()
                with jax.transfer_guard("allow"):
                    if held_out is not None and evaluates:
                        evaluated = {"step": step, **held_out.evaluate(state.model)}
                        recorder.note(evaluated, f"step {step} {in_words(evaluated)}")
                        recorder.restart_clock()
                    if saves:
                        save()
                    checkpoints.check()
                    if ends:
                        break
            with jax.transfer_guard("allow"):
                checkpoints.wait()
        except TooManySkips as skips:
            message = (
                f"step {skips.step} was the last of {config.watch.skips} in a row without a finite loss and gradient"
            )
            with jax.transfer_guard("allow"):
                try:
                    save()
                    checkpoints.wait()
                except ValueError as error:  # The state itself is not finite.
                    raise Stopped(f"{message}; {error}", status=1) from None
            advice = "lower the learning rate, or look at the data"
            raise Stopped(f"{message}; the run is saved at step {step}: {advice}", status=1) from None
    if asked_to_stop and step < last:
        message = f"stopped by {asked.which.name} after step {step}, and saved: the same command goes on"
        raise Stopped(message, status=128 + asked.which)
    say(f"done: steps {first_step + 1} to {step}; the model is {folder / CHECKPOINTS / str(step) / 'model'}")
    return Outcome(step, recorder.newest, evaluated)


def memory_in_words(program: Program, plan: Plan) -> str:
    """What the step needs on a device; ValueError where the device has less."""
    analysis = program.compiled.memory_analysis()
    if analysis is None:
        return "its memory is not known"
    kept = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    needed = kept + analysis.temp_size_in_bytes
    message = f"{needed / 2**20:,.0f} MiB a device, {analysis.temp_size_in_bytes / 2**20:,.0f} of them temporary"
    limit = (plan.mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None and needed > limit:
        raise ValueError(
            f"the step needs {message}, and a device has {limit / 2**20:,.0f} MiB: use more devices (mesh.context for "
            "long windows, mesh.fsdp for parameters), more step.accumulation, step.remat full, or a shorter window"
        )
    return message
