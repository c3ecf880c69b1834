"""Options of the commands that generate."""

from dataclasses import dataclass, field
from typing import Literal

from configs.cli import Positional
from configs.mesh import MeshConfig


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Generate text from a checkpoint, on any mesh. The text goes to standard output as it comes."""

    checkpoint: Positional[str]
    """Checkpoint folder, as `treering convert` writes it."""
    prompt: str
    """Text to continue; - reads standard input."""
    chat: bool = False
    """Wrap the prompt as a user's message in the checkpoint's chat template."""
    max_new_tokens: int = 256
    """Stop after this many tokens, if no end token comes first."""
    temperature: float = 0.0
    """0 takes the likeliest token; above 0 samples, the higher the more freely."""
    seed: int = 0
    """Seed of the sampling; equal seeds give equal text on every mesh."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cpu_devices: int | None = None
    """Simulate this many CPU devices."""
    dtype: Literal["float16", "bfloat16", "float32"] | None = None
    """Compute in this dtype; default float32 on CPU, bfloat16 elsewhere."""
    layers: Literal["auto", "stacked", "unrolled"] = "auto"
    """How blocks run: stacked compiles faster, unrolled decodes faster on CPU. auto unrolls on a single CPU device."""
    json: bool = False
    """Print one JSON object instead of the text: text, tokens, prompt_tokens, finish_reason, timings, cache bytes."""
