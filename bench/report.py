"""What every benchmark needs: rounds in turn, versions, a table on the screen and in `results/`."""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
TESTS = Path(__file__).parents[1] / "tests"


def hlo():
    """The reader of compiled programs, which is with the tests."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    import hlo

    return hlo


def in_turn(
    runs: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each run over `rounds`, all in turn in each round, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(rounds + 1):
        for name, run in runs.items():
            started = clock()
            run()
            if n:
                times[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def versions() -> str:
    """Machine and versions, in one line."""
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{platform.machine()} CPU, {cores} cores"
    return f"{machine}; Python {platform.python_version()}, jax {jax.__version__}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]


def publish(name: str, lines: Sequence[str], figures: dict[str, float]) -> None:
    """Prints the lines and, last, the figures as JSON; writes the lines to `results/NAME.md`."""
    text = "\n".join(lines) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
    print(json.dumps({key: float(f"{value:.4g}") for key, value in figures.items()}))
