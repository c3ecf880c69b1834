"""The metrics of a run: those of each step, and metrics.jsonl, where they are written."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from treering.configs.errors import UserError
from treering.configs.model import ModelConfig
from treering.configs.run import RunConfig, WatchConfig

FILE = "metrics.jsonl"

PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bfloat16 operations per second of one chip, as vendors state them, by a part of JAX's name for it."""


def peak_flops(device_kind: str) -> float | None:
    """The chip's peak; None where it is not known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


def flops_per_token(config: ModelConfig, window: int) -> float:
    """Operations per token of a full window, forward and backward, without recomputation.

    Six for each weight of a matrix product (arXiv 2001.08361, section 2.1), and for attention twelve for each dim of a
    head and each of the window / 2 tokens that a token attends to on average.
    """
    attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
    weights = config.layers * (attention + 3 * config.embed * config.mlp) + config.vocab * config.embed
    return 6.0 * weights + 12.0 * config.layers * config.heads * config.head_dim * window / 2


class MetricsLog:
    """metrics.jsonl: one object per line, flushed at once."""

    def __init__(self, folder: Path, watch: WatchConfig, *, step: int):
        """`step` is where the run starts or resumes: what a killed run wrote of later steps is dropped."""
        _drop_beyond(step, folder / FILE)
        self._file = open(folder / FILE, "a")
        self._others: list[Any] = []
        if watch.tensorboard:
            self._others.append(_tensorboard(folder))
        if watch.wandb is not None:
            self._others.append(_wandb(folder, watch.wandb))

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record, which has the key "step"; a number that is not finite becomes null."""
        record = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
        for send in self._others:
            send(numbers, record["step"])

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _drop_beyond(step: int, path: Path) -> None:
    """Removes the lines of later steps and an incomplete last one; the file is replaced at once, and only if needed."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []

    def stays(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError):
            return False

    kept = [line for line in lines if stays(line)]
    if kept != lines:
        new = path.with_suffix(".new")
        new.write_bytes(b"".join(kept))
        os.replace(new, path)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run by kind and step, each the last that was written; an incomplete last line is left out."""
    records: dict[tuple[bool, int], dict[str, Any]] = {}
    with open(folder / FILE) as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            records["held_out" in record, record["step"]] = record
    return [records[key] for key in sorted(records)]


def check_extras(watch: WatchConfig) -> None:
    """Raises ValueError where a package that the options ask for is not installed."""
    import importlib.util

    options = (("watch.tensorboard", watch.tensorboard, "tensorboardX"), ("watch.wandb", watch.wandb, "wandb"))
    for field, value, package in options:
        if value not in (None, False) and importlib.util.find_spec(package) is None:
            raise UserError(f"it needs the package {package}: pip install {package}", field=field, value=value)


def _tensorboard(folder: Path) -> Any:
    from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

    writer = SummaryWriter(str(folder / "tensorboard"))
    return lambda numbers, step: [writer.add_scalar(key, value, step) for key, value in numbers.items()]


def _wandb(folder: Path, project: str) -> Any:
    import wandb  # pyright: ignore[reportMissingImports]

    run = wandb.init(project=project, dir=str(folder), id=folder.name, resume="allow")
    return lambda numbers, step: run.log(numbers, step=step)


class Meter:
    """The metrics of a step, with its time."""

    def __init__(self, config: RunConfig, device_kind: str, devices: int):
        self._tokens = config.data.batch * config.data.window
        self._flops = flops_per_token(config.model, config.data.window)
        peak = peak_flops(device_kind)
        self._peak = None if peak is None else peak * devices
        self._since = time.perf_counter()

    def restart(self) -> None:
        """The next step's time counts from here."""
        self._since = time.perf_counter()

    def record(self, step: int, metrics: Any, epoch: int) -> dict[str, Any]:
        """One line of metrics.jsonl, from a step's `Metrics` on the host. Rates count all tokens, padding included."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        rate = self._tokens / seconds
        mfu = {} if self._peak is None else {"mfu": rate * self._flops / self._peak}
        return {
            "step": step,
            "epoch": epoch,
            "loss": float(metrics.loss),
            "grad_norm": float(metrics.grad_norm),
            "learning_rate": float(metrics.learning_rate),
            "trained_tokens": int(metrics.tokens),
            "skipped_in_row": int(metrics.skipped_in_row),
            "step_seconds": seconds,
            "tokens_per_second": rate,
            **mfu,
            "time": time.time(),
        }
