"""A whole training run: what a recipe returns."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from treering.configs.data import DataConfig
from treering.configs.errors import UserError
from treering.configs.mesh import MeshConfig
from treering.configs.model import ModelConfig
from treering.configs.train import OptimizerConfig, StepConfig


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run saves itself, and what it keeps. It always saves at its end and on SIGTERM."""

    every: int = 500
    """Steps between two checkpoints."""
    keep: int = 2
    """How many of the newest are kept, in addition to the newest that was read back without a difference."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are never deleted."""
    read_back: bool = True
    """Read each checkpoint back in the background after it is written, and compare it with what was saved."""

    def __post_init__(self):
        for name in ("every", "keep", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError("it must be at least 1", field=f"checkpoint.{name}", value=value)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Loss on the held-out sources."""

    every: int = 500
    """Steps between two evaluations; there is one at the end as well."""
    rows: int | None = None
    """Evaluate on at most this many rows."""
    stride: int | None = None
    """Read long documents as overlapping windows this many tokens apart, so that every position is scored on the same
    text. Default: windows do not overlap, and each token counts once."""
    buckets: tuple[int, ...] = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
    """Loss is also reported by position in the document, in ranges that begin here."""

    def __post_init__(self):
        for name in ("every", "rows", "stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError("it must be at least 1", field=f"evaluate.{name}", value=value)
        if self.buckets[:1] != (0,) or list(self.buckets) != sorted(set(self.buckets)):
            buckets = " ".join(map(str, self.buckets))
            raise UserError("they must start with 0 and ascend", field="evaluate.buckets", value=buckets)


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes that train together, each started with the same command: see `jax.distributed.initialize`.

    Under Slurm, MPI, Kubernetes and on TPUs `enabled` is enough: JAX finds the rest in the environment.
    """

    enabled: bool = False
    """This is one of several processes."""
    coordinator: str | None = None
    """Address and port of the first process."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """Which one this is, from 0."""

    def __post_init__(self):
        if not self.enabled and (self.coordinator, self.processes, self.process) != (None, None, None):
            name = next(name for name in ("coordinator", "processes", "process") if getattr(self, name) is not None)
            rule = "it needs distributed.enabled"
            raise UserError(rule, field=f"distributed.{name}", value=getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What a run reports, and when it gives up."""

    every: int = 1
    """Steps between two lines of metrics.jsonl."""
    bar: bool = True
    """Show a progress bar, where standard error is a terminal."""
    skips: int = 10
    """Stop after this many steps in a row without a finite loss and gradient."""
    stalled: float = 10.0
    """Stop when a step takes this many times the median, and at least `stalled_seconds`."""
    stalled_seconds: float = 120.0
    """Seconds below which no step counts as stalled."""
    tensorboard: bool = False
    """Write TensorBoard files too (needs the package tensorboardX)."""
    wandb: str | None = None
    """Send metrics to this Weights & Biases project too (needs the package wandb)."""
    profile: tuple[int, int] | None = None
    """Write a profile of the steps from the first number to the second."""

    def __post_init__(self):
        for name in ("every", "skips", "stalled", "stalled_seconds"):
            if getattr(self, name) <= 0:
                raise UserError("it must be above 0", field=f"watch.{name}", value=getattr(self, name))
        if self.profile is not None and not 1 <= self.profile[0] < self.profile[1]:
            steps = " ".join(map(str, self.profile))
            raise UserError("it must be a step from 1 on, and a later one", field="watch.profile", value=steps)


MAY_CHANGE = (
    *("folder", "mesh", "cpu_devices", "distributed", "stop_at", "checkpoint", "evaluate", "watch"),
    *("data.cache", "data.held_out"),
    *("step.attention", "step.remat", "step.accumulation", "step.loss_chunk"),
)
"""Fields of a run that may differ when it is resumed: they do not change what it computes, except for rounding."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run. The same config in the same folder resumes it."""

    folder: str
    """The run's files: config.json, data.json, metrics.jsonl, tokenizer/, checkpoints/STEP/{model,train}/."""
    model: ModelConfig
    data: DataConfig
    steps: int
    """Length of the run and of its learning-rate schedule."""
    seed: int = 0
    """Seed of the initial weights and the order of the data."""
    init_from: str | None = None
    """Start from these weights: a checkpoint, a Hugging Face folder, a GGUF file, or another run's folder (its newest
    checkpoint)."""
    resume_from: str | None = None
    """Continue from the newest checkpoint of another run's folder: weights, optimizer, step, position in the data."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    step: StepConfig = field(default_factory=StepConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Remaining devices go to fsdp."""
    cpu_devices: int | None = None
    """Simulate this many CPU devices."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    stop_at: int | None = None
    """Save and stop after this step, as on SIGTERM; the same command without it continues to the end."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self):
        if self.steps < 1:
            raise UserError("it must be at least 1", field="steps", value=self.steps)
        if self.stop_at is not None and not 1 <= self.stop_at <= self.steps:
            rule = f"it must be a step of the run, from 1 to {self.steps}"
            raise UserError(rule, field="stop_at", value=self.stop_at)
        if self.watch.profile is not None and self.watch.profile[1] > self.steps:
            steps = " ".join(map(str, self.watch.profile))
            rule = f"it must end within the run, at step {self.steps} or before"
            raise UserError(rule, field="watch.profile", value=steps)
        if self.init_from is not None and self.resume_from is not None:
            rule = "it excludes resume_from: a run starts from weights, or continues another run"
            raise UserError(rule, field="init_from", value=self.init_from)
        if self.data.window > self.model.context_length:
            raise UserError(
                f"it must be at most model.context_length {self.model.context_length}; for longer windows raise that, "
                "and the rotary settings with it",
                field="data.window",
                value=self.data.window,
            )

    def resume_invariant(self) -> dict[str, Any]:
        """What must be the same when the run is resumed, flat: dotted names and values."""
        return resume_invariant(flat(self))


def resume_invariant(fields: dict[str, Any]) -> dict[str, Any]:
    """Those of a run's flat fields that may not change when it is resumed."""
    free = tuple(name + "." for name in MAY_CHANGE)
    return {name: value for name, value in fields.items() if not f"{name}.".startswith(free)}


RENAMED = {"start": "init_from", "go_on_from": "resume_from"}
"""Fields as runs that began under earlier versions name them, and their names now."""


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """The fields of nested dataclasses and tuples by their dotted names, and `type` for the class of each."""
    if dataclasses.is_dataclass(config):
        items: list[tuple[str, Any]] = [("type", type(config).__name__)]
        items += [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    elif isinstance(config, tuple):
        items = [(str(number), value) for number, value in enumerate(config)]
    else:
        return {prefix.rstrip("."): config}
    return {name: value for key, item in items for name, value in flat(item, f"{prefix}{key}.").items()}
