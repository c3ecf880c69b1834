"""Options of the commands that generate."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from configs.cli import Positional
from configs.mesh import MeshConfig
from configs.sampling import RequestConfig, SamplingConfig


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
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    temperature: float = 0.0
    """0 takes the likeliest token; above 0 samples, the higher the more freely."""
    top_k: int = 0
    """Sample among this many likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens whose probabilities reach this."""
    min_p: float = 0.0
    """Sample among tokens at least this many times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1 discourages tokens that prompt or answer hold already."""
    presence_penalty: float = 0.0
    """Above 0 discourages tokens that the answer holds already; -2 to 2."""
    frequency_penalty: float = 0.0
    """The same, as often as the answer holds them; -2 to 2."""
    seed: int = 0
    """Seed of the sampling; equal seeds give equal text on every mesh."""
    logprobs: int | None = None
    """With --json, the log-probability of each token and of this many likeliest alternatives."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cpu_devices: int | None = None
    """Simulate this many CPU devices."""
    dtype: Literal["float16", "bfloat16", "float32"] | None = None
    """Compute in this dtype; default float32 on CPU, bfloat16 elsewhere."""
    layers: Literal["auto", "stacked", "unrolled"] = "auto"
    """How blocks run: stacked compiles faster, unrolled decodes faster on CPU. auto unrolls on a single CPU device."""
    json: bool = False
    """Print one JSON object instead of the text: text, tokens, prompt_tokens, finish_reason, timings, cache bytes."""

    def request(self) -> RequestConfig:
        """What these options ask of the engine; raises ValueError for values outside their bounds."""
        shared = {name.name for name in dataclasses.fields(SamplingConfig)} & set(self.__dict__)
        return RequestConfig(
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            logprobs=self.logprobs,
            sampling=SamplingConfig(**{name: getattr(self, name) for name in shared}),
        )
