"""A bar on standard error for work that is counted in bytes."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def byte_progress() -> Progress:
    """Shows bytes, rate and time left of its tasks, for use in a `with` statement."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
