"""What one training step is: the optimizer, its schedule, and how the step computes."""

from dataclasses import dataclass, field
from typing import Literal

from treering.configs.precision import Precision


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves, as a share of its peak: a linear warm-up from 0, then one of four shapes."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """cosine and linear fall from the warm-up to the last step; constant stays; wsd (warm-up, stable, decay) stays and
    falls linearly over its last `decay_steps`."""
    warmup_steps: int = 0
    """Steps to the peak; step 0 then trains at 1 / warmup_steps of it."""
    decay_steps: int | None = None
    """wsd only: steps of the fall at the end."""
    final_share: float = 0.1
    """The share of the peak at the last step; without effect on constant."""

    def __post_init__(self):
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps {self.warmup_steps} is negative: 0 starts at the peak")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"schedule.final_share {self.final_share}: it is a share of the peak, from 0 to 1")
        if (self.kind == "wsd") != (self.decay_steps is not None):
            raise ValueError(
                f"schedule.kind {self.kind} with schedule.decay_steps {self.decay_steps}: wsd needs the steps of its "
                "fall, and no other kind has them"
            )
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ValueError(f"schedule.decay_steps {self.decay_steps}: the fall takes at least 1 step")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates."""

    kind: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-4
    """The peak of the schedule."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    b1: float = 0.9
    """adamw: memory of the mean of gradients."""
    b2: float = 0.95
    """adamw: memory of the mean of their squares."""
    eps: float = 1e-8
    """adamw: added to the root of that mean."""
    momentum: float = 0.0
    """sgd: memory of past gradients; 0 keeps none."""
    weight_decay: float = 0.0
    """Decay of matrices (by their declared dims), never of norms and biases. adamw takes learning rate x this off the
    weight itself; sgd adds it to the gradient."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this norm, taken over all of them; None leaves them."""

    def __post_init__(self):
        if not self.learning_rate >= 0:
            raise ValueError(f"optimizer.learning_rate {self.learning_rate}: it must be 0 or above")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} {getattr(self, name)}: it must be at least 0 and below 1")
        if self.kind == "adamw" and self.momentum:
            raise ValueError(f"optimizer.momentum {self.momentum} with adamw: that is sgd's; adamw has b1")
        if not self.weight_decay >= 0:
            raise ValueError(f"optimizer.weight_decay {self.weight_decay}: it must be 0 or above")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm {self.clip_norm}: it must be above 0 (None for no clipping)")


ContextParallel = Literal["ring", "gather"]
Remat = Literal["none", "attention", "full"]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How a step computes; nothing here changes what it computes, but for rounding, the dtypes and `z_loss`."""

    precision: Precision = field(default_factory=lambda: Precision(compute="bfloat16"))
    """bfloat16 activations over float32 parameters, gradients summed in float32."""
    attention: ContextParallel = "ring"
    """How attention spans the context axis: keys travel around it, or every device gathers them."""
    remat: Remat = "attention"
    """What the backward pass computes again. none: nothing, all activations stay in memory. attention: all but
    attention. full: a layer keeps its input alone."""
    accumulation: int = 1
    """Parts of the batch that are computed in turn, to save memory. Their gradients are summed before the update."""
    loss_chunk: int = 512
    """Tokens a device whose logits exist at a time."""
    z_loss: float = 0.0
    """Weight of the square of the log of the softmax's denominator (arXiv 2204.02311, section 5); 0 for none."""

    def __post_init__(self):
        if self.accumulation < 1:
            raise ValueError(f"step.accumulation {self.accumulation}: the batch has at least 1 part")
        if self.loss_chunk < 1:
            raise ValueError(f"step.loss_chunk {self.loss_chunk}: a chunk has at least 1 token")
        for name, wide, why in (
            ("params", True, "an update below 1/256 of a parameter would vanish in bfloat16"),
            ("reduce", True, "sums over many tokens stop growing in bfloat16"),
            ("compute", False, "float16 gradients vanish without a loss scale, which there is not"),
        ):
            given = getattr(self.precision, name)
            works = ("float32", "float64") if wide else ("bfloat16", "float32", "float64")
            if given not in works:
                raise ValueError(f"step.precision.{name} {given}: {why} (what works: {', '.join(works)})")
        if not self.z_loss >= 0:
            raise ValueError(f"step.z_loss {self.z_loss}: it must be 0 or above")
