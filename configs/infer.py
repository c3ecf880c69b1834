"""Options of the commands that generate."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from treering.configs.cli import Positional
from treering.configs.mesh import MeshConfig
from treering.configs.sampling import RequestConfig, SamplingConfig


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where and how a model runs: the same for every command that runs one."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    cpu_devices: int | None = None
    """Simulate this many CPU devices."""
    dtype: Literal["float16", "bfloat16", "float32"] | None = None
    """Compute in this dtype; default float32 on CPU, bfloat16 elsewhere."""
    layers: Literal["auto", "stacked", "unrolled"] = "auto"
    """How blocks run: stacked compiles faster, unrolled decodes faster on CPU. auto unrolls on a single CPU device."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How text is chosen and when it ends."""

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

    def request(self) -> RequestConfig:
        """What these options ask of the engine; raises ValueError for values outside their bounds."""
        for name in ("top_k", "top_p", "min_p", "seed"):
            if self.temperature == 0 and (value := getattr(self, name)) != getattr(AnswerOptions, name):
                raise ValueError(f"{name} {value} goes with --temperature above 0: at 0 the likeliest token is taken")
        shared = {option.name for option in dataclasses.fields(SamplingConfig)} & set(self.__dict__)
        return RequestConfig(
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            sampling=SamplingConfig(**{name: getattr(self, name) for name in shared}),
        )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnswerOptions, DeviceOptions):
    """Generate text from a checkpoint, on any mesh. The text goes to standard output as it comes."""

    checkpoint: Positional[str]
    """A checkpoint, as `treering convert` and a run write it, or a Hugging Face folder or GGUF file as it is."""
    prompt: str | None = None
    """Text to continue; - reads standard input."""
    prompts: str | None = None
    """File of JSON lines, each {"prompt": TEXT} or {"messages": [...]}, answered side by side. A line may name itself
    ("id") and have options of its own: "n", "max_new_tokens", "temperature" and what else decides an answer."""
    output: str | None = None
    """With --prompts, the file that answers are added to as JSON lines; those it holds already are not made again."""
    rows: int = 8
    """With --prompts or --n, how many answers are made side by side."""
    save_cache: str | None = None
    """With --prompt, a new folder for the prompt's keys and values, so that it is not read again; for you alone."""
    load_cache: str | None = None
    """A folder that --save-cache wrote: the prompt, or each, goes on from the text that it holds, on any mesh."""
    n: int = 1
    """Answers to a prompt, which is read once; each draws with a seed one above the last's. Several take --json."""
    chat: bool = False
    """Wrap the prompt as a user's message in the checkpoint's chat template."""
    json: bool = False
    """Print one JSON object instead of the text: text, tokens, prompt_tokens, finish_reason, timings, cache bytes."""
    logprobs: int | None = None
    """In JSON, the log-probability of each token and of this many likeliest alternatives."""
    prompt_logprobs: bool = False
    """In JSON, --logprobs of the prompt's tokens after the first, too."""

    def request(self) -> RequestConfig:
        """See `AnswerOptions`."""
        return dataclasses.replace(super().request(), logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs)


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AnswerOptions, DeviceOptions):
    """Talk with a model in the terminal. The KV cache is kept between turns: each reads only what is new.

    /reset begins anew, /save FILE writes the conversation as JSON, /exit (or end of input) leaves.
    """

    checkpoint: Positional[str]
    """A checkpoint, Hugging Face folder or GGUF file, with a chat template."""
    system: str | None = None
    """What the model is told before the conversation."""
    load_cache: str | None = None
    """A folder that `treering generate --save-cache` wrote: the conversation goes on from the text that it holds."""
    capacity: int = 8192
    """Tokens that the conversation may hold beside such a text, together at most the model's context."""
