"""One training step: the optimizer, its schedule, and how the step computes."""

from dataclasses import dataclass, field
from typing import Literal

from treering.configs.errors import UserError
from treering.configs.precision import Precision


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over steps, as a share of its peak: a linear warm-up from 0, then one of four shapes."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """cosine and linear decay from the end of the warm-up to the last step; constant stays at the peak; wsd (warm-up,
    stable, decay) stays and decays linearly over its last `decay_steps`."""
    warmup_steps: int = 0
    """Steps to the peak; the first step trains at 1 / warmup_steps of it."""
    decay_steps: int | None = None
    """wsd only: steps of the decay at the end."""
    final_share: float = 0.1
    """The share of the peak at the last step; no effect on constant."""

    def __post_init__(self):
        if self.warmup_steps < 0:
            raise _wrong("schedule.warmup_steps", self.warmup_steps, "it must be at least 0, which starts at the peak")
        if not 0 <= self.final_share <= 1:
            raise _wrong("schedule.final_share", self.final_share, "it must be a share of the peak, from 0 to 1")
        if (self.kind == "wsd") != (self.decay_steps is not None):
            rule = f"it is for optimizer.schedule.kind wsd, which needs it, and not for {self.kind}"
            if self.kind == "wsd":
                rule = "optimizer.schedule.kind wsd needs it: the steps of the decay"
            raise _wrong("schedule.decay_steps", self.decay_steps, rule)
        if self.decay_steps is not None and self.decay_steps < 1:
            raise _wrong("schedule.decay_steps", self.decay_steps, "it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates."""

    kind: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-4
    """The peak of the schedule."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    b1: float = 0.9
    """adamw: decay of the running mean of gradients."""
    b2: float = 0.95
    """adamw: decay of the running mean of their squares."""
    eps: float = 1e-8
    """adamw: added to the square root of that mean."""
    momentum: float = 0.0
    """sgd: decay of the running sum of gradients; 0 keeps none."""
    weight_decay: float = 0.0
    """Decay of matrices (by their declared dims), never of norms and biases. adamw subtracts learning rate x this x the
    weight (decoupled); sgd adds it to the gradient."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None does not clip."""

    def __post_init__(self):
        if not self.learning_rate >= 0:
            raise _wrong("learning_rate", self.learning_rate, "it must be at least 0")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise _wrong(name, getattr(self, name), "it must be at least 0 and below 1")
        if self.kind == "adamw" and self.momentum:
            raise _wrong("momentum", self.momentum, "it is for optimizer.kind sgd; adamw has optimizer.b1")
        if not self.weight_decay >= 0:
            raise _wrong("weight_decay", self.weight_decay, "it must be at least 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise _wrong("clip_norm", self.clip_norm, "it must be above 0, or None for no clipping")


def _wrong(name: str, value: object, rule: str) -> UserError:
    return UserError(rule, field=f"optimizer.{name}", value=value)


ContextParallel = Literal["ring", "gather"]
Remat = Literal["none", "attention", "full"]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How a step computes; only the dtypes and `z_loss` change what it computes beyond rounding."""

    precision: Precision = field(default_factory=lambda: Precision(compute="bfloat16"))
    """bfloat16 activations over float32 parameters, gradients summed in float32."""
    attention: ContextParallel = "ring"
    """Attention over the context axis: keys and values are sent around it, or gathered by every device."""
    remat: Remat = "attention"
    """What the backward pass recomputes. none: nothing, all activations stay in memory. attention: all but attention.
    full: everything, a layer keeps only its input."""
    accumulation: int = 1
    """Parts of the batch that are computed one after the other, to save memory. Their gradients are summed before the
    update."""
    loss_chunk: int = 512
    """Tokens per device whose logits exist at a time."""
    z_loss: float = 0.0
    """Weight of the square of the log of the softmax's denominator (arXiv 2204.02311, section 5)."""

    def __post_init__(self):
        for name in ("accumulation", "loss_chunk"):
            if getattr(self, name) < 1:
                raise UserError("it must be at least 1", field=f"step.{name}", value=getattr(self, name))
        for name, wide, why in (
            ("params", True, "an update below 1/256 of a parameter would vanish in bfloat16"),
            ("reduce", True, "sums over many tokens stop growing in bfloat16"),
            ("compute", False, "float16 gradients vanish without a loss scale, which is not implemented"),
        ):
            given = getattr(self.precision, name)
            works = ("float32", "float64") if wide else ("bfloat16", "float32", "float64")
            if given not in works:
                raise UserError(why, field=f"step.precision.{name}", value=given, works=works)
        if not self.z_loss >= 0:
            raise UserError("it must be at least 0", field="step.z_loss", value=self.z_loss)
