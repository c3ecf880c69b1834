"""`treering plot RUN`: draws the loss of runs over steps, and by position in the document."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from treering.configs.cli import Positional, metavar, parse
from treering.train.run.metrics import FILE, read_metrics

LOSS, POSITION = "loss.png", "position.png"


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Draw the loss of runs over steps, and their held-out loss by position in the document, as PNG files."""

    runs: Positional[Annotated[tuple[str, ...], metavar("RUN")]]
    """Folders of runs; several are drawn into the same figures."""
    output: str | None = None
    """Folder for loss.png and position.png; default: the first run's."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(PlotOptions, arguments, program="treering plot")
    paths = plot(options)
    for path in paths:
        print(path)
    if POSITION not in {path.name for path in paths}:
        print(f"{POSITION} is not drawn: there is no held-out loss (see --data.held-out.0.path)", file=sys.stderr)
    return 0


def plot(options: PlotOptions) -> list[Path]:
    """Writes the figures and returns their paths: loss.png, and position.png where a run has held-out loss.

    Raises ValueError for folders that are not runs, and where matplotlib is missing.
    """
    if not options.runs:
        raise ValueError("name at least one run's folder: treering plot RUN")
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in options.runs:
        if not (Path(run) / FILE).is_file():
            raise ValueError(f"{run} is not the folder of a run: it has no {FILE}")
        runs[run] = read_metrics(Path(run))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("treering plot needs matplotlib: pip install matplotlib") from None
    output = Path(options.output or options.runs[0])
    output.mkdir(parents=True, exist_ok=True)

    figure = Figure(figsize=(8, 5), layout="constrained")
    draw_loss(figure.subplots(), runs)
    figure.savefig(output / LOSS, dpi=120)
    # The last evaluation of each run in which a token was scored.
    last = {
        run: next((record for record in reversed(records) if record.get("held_out_tokens")), None)
        for run, records in runs.items()
    }
    evaluated = {run: record for run, record in last.items() if record is not None}
    if not evaluated:
        return [output / LOSS]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for run, record in evaluated.items():
        draw_by_position(axes, record["by_position"], f"{_name(run)}, step {record['step']:,}")
    axes.set(xlabel="position in the document", ylabel="held-out loss (nats per token)")
    axes.set_xscale("symlog", base=2, linthresh=64)
    axes.xaxis.set_major_formatter(lambda position, _: f"{position:,.0f}")
    axes.legend()
    figure.savefig(output / POSITION, dpi=120)
    return [output / LOSS, output / POSITION]


def draw_loss(axes: Any, runs: dict[str, list[dict[str, Any]]]) -> None:
    """A line for the loss of each run, and a dashed one for its held-out loss, where it has any."""
    for run, records in runs.items():
        steps = [record for record in records if record.get("loss") is not None]
        held_out = [record for record in records if record.get("held_out") is not None]
        (line,) = axes.plot(*_columns(steps, "loss"), linewidth=0.8, label=_name(run))
        if held_out:
            label = f"{_name(run)}, held out"
            axes.plot(*_columns(held_out, "held_out"), "o--", color=line.get_color(), label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()


def draw_by_position(axes: Any, buckets: list[list[Any]], label: str) -> None:
    """A staircase with one step per bucket, from where it begins to where the next one does."""
    filled = [(edge, loss) for edge, loss, count in buckets if count]
    edges = [edge for edge, _ in filled]
    edges.append(2 * edges[-1] if edges[-1] else 64)
    axes.stairs([loss for _, loss in filled], edges, baseline=None, label=label, linewidth=1.5)


def _name(run: str) -> str:
    return Path(run).resolve().name


def _columns(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    return [record["step"] for record in records], [record[key] for record in records]
