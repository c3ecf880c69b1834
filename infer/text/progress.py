"""What commands say while they work, on standard error."""

import sys
import time
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from treering.infer.chunks import PREFILL_CHUNKS
from treering.infer.request import Event
from treering.infer.scheduler import Scheduler


def say(*words: object) -> None:
    """A line of diagnostics."""
    print(*words, file=sys.stderr, flush=True)


def count(number: int, noun: str) -> str:
    """Such as "1 row" and "2,000 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class _TokenRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} tokens/s")


def run_with_progress(scheduler: Scheduler, number: int) -> Iterator[Event]:
    """`Scheduler.run`, which shows how much of the prompt of request `number` is read, if that takes long.

    A bar in a terminal, a line before and one after elsewhere.
    """
    total = scheduler.unread(number)
    if total <= PREFILL_CHUNKS[-1]:
        yield from scheduler.run()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        say(f"reading {count(total, 'token')}")
    columns = TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), _TokenRate()
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    started, events = time.perf_counter(), list[Event]()
    with bar:
        task = bar.add_task("", total=total)
        while not events:
            events = scheduler.step()
            if console.is_terminal:
                # A step ends before the devices are done with it: without this the bar would run ahead of them.
                jax.block_until_ready(scheduler.state)
            bar.update(task, completed=total - scheduler.unread(number))
    took = time.perf_counter() - started
    say(f"{count(total, 'token')} read in {took:.2f} s, {total / took:,.0f} tokens/s")
    yield from events
    yield from scheduler.run()
