"""The kinds of rotary position embedding that checkpoints declare."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class DefaultRope:
    """Frequencies `theta ** (-2 i / head_dim)` (arXiv 2104.09864)."""

    kind: ClassVar[str] = "default"
    theta: float


@dataclass(frozen=True, kw_only=True)
class LinearRope:
    """All frequencies divided by `factor` (position interpolation, arXiv 2306.15595)."""

    kind: ClassVar[str] = "linear"
    theta: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's rule: low frequencies divided by `factor`, high ones kept, a linear ramp between.

    Wavelengths above `original_context / low_frequency_factor` are low, those below
    `original_context / high_frequency_factor` high.
    """

    kind: ClassVar[str] = "llama3"
    theta: float
    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class YarnRope:
    """YaRN (arXiv 2309.00071): interpolation by wavelength, and a factor on queries and keys alike.

    `attention_factor` is the number that cosines and sines are multiplied by.
    """

    kind: ClassVar[str] = "yarn"
    theta: float
    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


RopeConfig = DefaultRope | LinearRope | Llama3Rope | YarnRope
ROPE_KINDS: dict[str, type] = {cls.kind: cls for cls in (DefaultRope, LinearRope, Llama3Rope, YarnRope)}
