"""`treering plot RUN`: draws a run's loss, and its loss by position in the document."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treering.configs.cli import Positional, parse
from treering.train.run.metrics import FILE, read_metrics


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Draw the loss of runs over steps, and the held-out loss by position in the document, as PNG files."""

    runs: Positional[tuple[str, ...]]
    """Folders of runs; several are drawn into the same pictures."""
    output: str | None = None
    """Folder for loss.png and position.png; default: that of the first run."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(PlotOptions, arguments, program="treering plot")
    for path in plot(options):
        print(path)
    return 0


def plot(options: PlotOptions) -> list[Path]:
    """Writes the pictures and returns their paths.

    Raises ValueError for folders that are no runs, and where matplotlib is missing.
    """
    if not options.runs:
        raise ValueError("name at least one run's folder: treering plot RUN")
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in options.runs:
        if not (Path(run) / FILE).is_file():
            raise ValueError(f"{run} holds no run: it lacks {FILE}")
        runs[run] = read_metrics(Path(run))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("treering plot needs matplotlib: pip install matplotlib") from None
    output = Path(options.output or options.runs[0])
    output.mkdir(parents=True, exist_ok=True)

    loss = Figure(figsize=(8, 5), layout="constrained")
    axes = loss.subplots()
    for run, records in runs.items():
        steps = [record for record in records if record.get("loss") is not None]
        held_out = [record for record in records if record.get("held_out") is not None]
        (line,) = axes.plot(*_columns(steps, "loss"), linewidth=0.8, label=Path(run).name)
        axes.plot(*_columns(held_out, "held_out"), "o--", color=line.get_color(), label=f"{Path(run).name}, held out")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.legend()

    position = Figure(figsize=(8, 5), layout="constrained")
    axes = position.subplots()
    for run, records in runs.items():
        last = next((record for record in reversed(records) if record.get("by_position")), None)
        if last is not None:
            draw_by_position(axes, last["by_position"], f"{Path(run).name}, step {last['step']}")
    axes.set(xlabel="position in the document", ylabel="held-out loss (nats a token)")
    axes.set_xscale("symlog", base=2, linthresh=64)
    axes.legend()

    pictures = {output / "loss.png": loss, output / "position.png": position}
    for path, figure in pictures.items():
        figure.savefig(path, dpi=120)
    return list(pictures)


def draw_by_position(axes: Any, buckets: list[list[Any]], label: str) -> None:
    """One step of a staircase a bucket, from where it begins to where the next one does."""
    filled = [(edge, loss) for edge, loss, count in buckets if count]
    edges = [edge for edge, _ in filled]
    edges.append(2 * edges[-1] if edges[-1] else 64)
    axes.stairs([loss for _, loss in filled], edges, baseline=None, label=label, linewidth=1.5)


def _columns(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    return [record["step"] for record in records], [record[key] for record in records]
