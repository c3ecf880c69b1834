"""Watching a run: a progress bar, a watchdog for a step that does not end, SIGTERM, a profile."""

import faulthandler
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from treering.configs.run import RunConfig
from treering.train.run.metrics import Meter, MetricsLog


class Bar:
    """A bar on a terminal; elsewhere lines of text: of the first and last step, each tenth between, and each 30 s."""

    def __init__(self, total: int, done: int, last: int, *, bar: bool, seconds: float = 30.0):
        """`total` is the run's length; `done` is the step where this process starts, `last` where it stops."""
        self._total, self._first, self._last, self._seconds = total, done + 1, last, seconds
        self._every, self._printed = max(1, -(-(last - done) // 10)), 0.0
        self._progress: Any = None
        if bar and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                MofNCompleteColumn(),
                BarColumn(None),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("", total=total, completed=done)
            self._progress.start()

    def show(self, step: int, record: dict[str, Any]) -> None:
        """Shows the numbers of the step that ended."""
        mfu = f"  mfu {record['mfu']:.1%}" if record.get("mfu") else ""
        text = (
            f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"{record['step_seconds']:.2f} s/step{mfu}"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text)
        elif (
            step in (self._first, self._last)
            or (step - self._first + 1) % self._every == 0
            or time.monotonic() - self._printed > self._seconds
        ):
            self._printed = time.monotonic()
            left = (self._total - step) * record["step_seconds"]
            print(f"step {step}/{self._total}  {text}  {left:,.0f} s left", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        if self._progress is not None:
            self._progress.stop()


class Watchdog:
    """Ends the process when a step takes far longer than the median: some device waits for another that is gone.

    It runs in a thread, since the main one hangs in the step; so it cannot save anything.
    """

    def __init__(self, times: float, at_least: float):
        self._times, self._at_least = times, at_least
        self._durations: deque[float] = deque(maxlen=101)
        self._step, self._since = -1, None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
        self._thread.start()

    def started(self, step: int) -> None:
        """A step begins. Its time counts once five steps have shown how long one takes."""
        self._step, self._since = step, time.monotonic()

    def ended(self) -> None:
        """The step has ended; what follows (an evaluation, a save) is not timed."""
        if self._since is not None:
            self._durations.append(time.monotonic() - self._since)
        self._since = None

    def close(self) -> None:
        """Stops watching."""
        self._stop.set()

    @property
    def limit(self) -> float | None:
        """Seconds that a step may take; None while too few are known."""
        if len(self._durations) < 5:
            return None
        return max(self._at_least, self._times * statistics.median(self._durations))

    def _look(self) -> None:
        while not self._stop.wait(min(1.0, self._at_least / 4)):
            since, limit = self._since, self.limit
            if since is None or limit is None or time.monotonic() - since < limit:
                continue
            print(
                f"step {self._step} has taken {time.monotonic() - since:.0f} s, and the median step "
                f"{statistics.median(self._durations):.2f} s: the run is stopped. Stack of each thread:",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(file=sys.stderr)
            os._exit(1)


class TooManySkips(Exception):
    """Steps in a row had no finite loss and gradient; `step` was the last of them."""

    def __init__(self, step: int):
        super().__init__()
        self.step = step


class Recorder:
    """Writes each step's metrics to metrics.jsonl and the bar, on the first process; all processes count skips.

    A step's metrics are fetched when the next step has been dispatched, so that devices never wait for them.
    """

    def __init__(self, config: RunConfig, folder: Path, first_step: int, device_kind: str, devices: int):
        self._watch, self._last = config.watch, config.steps
        self._meter = Meter(config, device_kind, devices)
        first = jax.process_index() == 0
        self._log = MetricsLog(folder, config.watch, step=first_step) if first else None
        last = min(config.steps, config.stop_at or config.steps)
        self._bar = Bar(config.steps, first_step, last, bar=config.watch.bar) if first else None
        self._waiting: tuple[int, Any, int] | None = None
        self.newest: dict[str, Any] | None = None
        """The metrics recorded last."""

    def add(self, step: int, metrics: Any, epoch: int) -> None:
        """A step was dispatched; records the one before. Raises `TooManySkips`."""
        self.flush()
        self._waiting = (step, metrics, epoch)

    def flush(self) -> None:
        """Waits for the step that was dispatched last, and records it. Raises `TooManySkips`."""
        if self._waiting is None:
            return
        step, metrics, epoch = self._waiting
        self._waiting = None
        self.newest = self._meter.record(step, jax.device_get(metrics), epoch)
        if self._log is not None and self._bar is not None:
            if step % self._watch.every == 0 or step == self._last:
                self._log.write(self.newest)
            self._bar.show(step, self.newest)
        if self.newest["skipped_in_row"] >= self._watch.skips:
            raise TooManySkips(step)

    def note(self, record: dict[str, Any], text: str) -> None:
        """Writes another record, such as an evaluation's, and prints `text`."""
        if self._log is not None and self._bar is not None:
            self._log.write(record)
            self._bar.say(text)

    def restart_clock(self) -> None:
        """The time since the last step does not count as the next one's."""
        self._meter.restart()

    def close(self) -> None:
        """Closes the file and ends the bar."""
        if self._log is not None and self._bar is not None:
            self._log.close()
            self._bar.close()


class StopSignal:
    """Whether to stop: SIGTERM or Ctrl-C was received (a second Ctrl-C ends at once).

    Several processes agree on the step, on SIGTERM only, through JAX's preemption service.
    """

    which: signal.Signals = signal.SIGTERM
    """The one received."""

    def __enter__(self) -> "StopSignal":
        self._came = threading.Event()
        self._ours = threading.current_thread() is threading.main_thread() and jax.process_count() == 1
        if self._ours:
            self._before = {one: signal.signal(one, self._take) for one in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _take(self, number: int, _: Any) -> None:
        self.which = signal.Signals(number)
        self._came.set()
        if self.which is signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
            print("Ctrl-C: stopping and saving after this step; again ends at once", file=sys.stderr)

    def __exit__(self, *_: object) -> None:
        if self._ours:
            for one, before in self._before.items():
                signal.signal(one, before)

    def __call__(self, step: int) -> bool:
        """Whether to save and stop after `step`."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._came.is_set()


class Profile:
    """A profile of chosen steps, in the run's folder."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        self._folder, self._steps, self._running = folder, steps, False

    def before(self, step: int) -> None:
        """Starts before the first of the steps."""
        if self._steps is not None and step == self._steps[0]:
            jax.profiler.start_trace(str(self._folder / "profile"))
            self._running = True

    def after(self, step: int, metrics: Any) -> None:
        """Stops once the last of them has ended."""
        if self._running and self._steps is not None and step == self._steps[1]:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        """Writes the profile of the steps so far."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
