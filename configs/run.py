"""A whole training run: what a recipe returns."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from treering.configs.data import DataConfig
from treering.configs.mesh import MeshConfig
from treering.configs.model import ModelConfig
from treering.configs.train import OptimizerConfig, StepConfig


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run saves itself, and what it keeps. It always saves at its end and on SIGTERM."""

    every: int = 500
    """Steps between two checkpoints."""
    keep: int = 2
    """The newest so many are kept; besides them, the newest that was read back and found whole."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""
    read_back: bool = True
    """Read each checkpoint back after it is written, beside the training, and compare it with what was saved."""

    def __post_init__(self):
        for name in ("every", "keep", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.{name} is {value}: it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Loss on the held-out sources."""

    every: int = 500
    """Steps between two evaluations; there is one at the end as well."""
    rows: int | None = None
    """Read no more than so many rows."""
    stride: int | None = None
    """Read long documents as overlapping windows so many tokens apart, so that each position meets the same text.
    Default: windows follow one another, and each token counts once."""
    buckets: tuple[int, ...] = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
    """Loss is also told by position in the document, in ranges that begin here."""

    def __post_init__(self):
        for name in ("every", "rows", "stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"evaluate.{name} is {value}: it must be at least 1")
        if self.buckets[:1] != (0,) or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"evaluate.buckets {self.buckets}: they start with 0 and rise")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes that run as one, each started with the same command: what `jax.distributed.initialize` takes.

    Under Slurm, MPI, Kubernetes and on TPUs `enabled` is enough: JAX finds the rest by the environment.
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
            raise ValueError("distributed.coordinator, processes and process need distributed.enabled")


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What a run tells of itself, and when it gives up."""

    every: int = 1
    """Steps between two lines of metrics.jsonl."""
    bar: bool = True
    """Draw a bar, where standard error is a terminal."""
    skips: int = 10
    """Stop after so many steps in a row without a finite loss and gradient."""
    stalled: float = 10.0
    """Stop when a step takes so many times the median, and at least `stalled_seconds`."""
    stalled_seconds: float = 120.0
    tensorboard: bool = False
    """Write TensorBoard's files too (needs the package tensorboardX)."""
    wandb: str | None = None
    """Send metrics to this Weights & Biases project too (needs the package wandb)."""
    profile: tuple[int, int] | None = None
    """Write a profile of the steps from the first up to the second number."""

    def __post_init__(self):
        for name in ("every", "skips", "stalled", "stalled_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"watch.{name} is {getattr(self, name)}: it must be above 0")
        if self.profile is not None and not 1 <= self.profile[0] < self.profile[1]:
            raise ValueError(f"watch.profile {self.profile}: it is a first step, from 1 on, and a later one")


MAY_CHANGE = (
    *("folder", "mesh", "cpu_devices", "distributed", "stop_at", "checkpoint", "evaluate", "watch"),
    *("data.cache", "data.held_out"),
    *("step.attention", "step.remat", "step.accumulation", "step.loss_chunk"),
)
"""Fields of a run that may differ when it is resumed: they do not change what it computes, but for rounding."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run. The same config in the same folder resumes it."""

    folder: str
    """Where the run lives: config.json, data.json, metrics.jsonl, tokenizer/, checkpoints/STEP/{model,train}/."""
    model: ModelConfig
    data: DataConfig
    steps: int
    """Length of the run, and of its learning-rate schedule."""
    seed: int = 0
    """Of the initial weights and the order of the data."""
    init_from: str | None = None
    """Start from these weights: a checkpoint, a Hugging Face folder, a GGUF file, or another run's folder (its newest
    checkpoint)."""
    resume_from: str | None = None
    """Go on from the newest checkpoint of another run's folder: weights, optimizer, step and place in the data."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    step: StepConfig = field(default_factory=StepConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Devices left over go to fsdp."""
    cpu_devices: int | None = None
    """Simulate this many CPU devices."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    stop_at: int | None = None
    """Save and stop after this step, as on SIGTERM; the same command without it goes on to the end."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}: a run has at least 1")
        if self.stop_at is not None and not 1 <= self.stop_at <= self.steps:
            raise ValueError(f"stop_at is {self.stop_at}: it is a step from 1 to {self.steps}")
        if self.watch.profile is not None and self.watch.profile[1] > self.steps:
            raise ValueError(f"watch.profile {self.watch.profile} ends beyond the run's {self.steps} steps")
        if self.init_from is not None and self.resume_from is not None:
            raise ValueError(
                "init_from and resume_from are both given: a run starts from weights, or continues another run"
            )
        if self.data.window > self.model.context_length:
            raise ValueError(
                f"data.window {self.data.window} is beyond model.context_length {self.model.context_length}: "
                "raise the latter (and the rotary settings with it), or shorten the window"
            )

    def resume_invariant(self) -> dict[str, Any]:
        """What must be the same when the run is resumed, flat: dotted names and values."""
        return resume_invariant(flat(self))


def resume_invariant(fields: dict[str, Any]) -> dict[str, Any]:
    """Of a run's flat fields, those that may not change when it is resumed."""
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
