"""Options of the commands that generate."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from treering.configs.cli import Positional
from treering.configs.errors import UserError
from treering.configs.mesh import MeshConfig
from treering.configs.sampling import LengthOptions, RequestConfig, SamplingConfig, SamplingOptions


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
class AnswerOptions(SamplingOptions, LengthOptions):
    """How text is chosen and when it ends."""

    def __post_init__(self):
        SamplingOptions.__post_init__(self)
        LengthOptions.__post_init__(self)
        for name in ("top_k", "top_p", "min_p", "seed"):
            if self.temperature == 0 and (value := getattr(self, name)) != getattr(AnswerOptions, name):
                rule = "it requires a temperature above 0: at 0 the most likely token is taken"
                raise UserError(rule, field=name, value=value)

    def request(self) -> RequestConfig:
        """What these options ask of the engine."""
        lengths, sampling = (
            {one.name: getattr(self, one.name) for one in dataclasses.fields(part)}
            for part in (LengthOptions, SamplingOptions)
        )
        return RequestConfig(**lengths, sampling=SamplingConfig(**sampling))


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnswerOptions, DeviceOptions):
    """Generate text from a checkpoint, on any mesh. The text is written to standard output as it is generated."""

    checkpoint: Positional[str]
    """A checkpoint, as `treering convert` and `treering train` write it, a Hugging Face folder, or a GGUF file."""
    prompt: str | None = None
    """Text to continue; - reads standard input."""
    prompts: str | None = None
    """File of JSON lines, each {"prompt": TEXT} or {"messages": [...]}, answered as a batch. A line may have an "id"
    and options of its own: "n", "max_new_tokens", "temperature" and whatever else decides an answer."""
    output: str | None = None
    """With --prompts, the file that answers are appended to as JSON lines; prompts that it answers are skipped."""
    rows: int = 8
    """With --prompts or --n, how many answers are generated at the same time."""
    save_cache: str | None = None
    """With --prompt, a new folder for the prompt's keys and values, so that it is read once; private (mode 0700)."""
    load_cache: str | None = None
    """A folder that --save-cache wrote: the prompt, or each, continues the text that it holds, on any mesh."""
    n: int = 1
    """Answers to a prompt, which is read once; each draws with the previous one's seed + 1. Several require --json."""
    chat: bool = False
    """Wrap the prompt as a user's message in the checkpoint's chat template."""
    json: bool = False
    """Print one JSON object instead of the text: text, tokens, prompt_tokens, finish_reason, timings, cache bytes."""
    logprobs: int | None = None
    """In JSON, the log-probability of each token and of this many most likely alternatives."""
    prompt_logprobs: bool = False
    """In JSON, --logprobs of the prompt's tokens after the first, too."""

    def request(self) -> RequestConfig:
        """See `AnswerOptions`."""
        return dataclasses.replace(super().request(), logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs)


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AnswerOptions, DeviceOptions):
    """Chat with a model in the terminal. The KV cache is kept between turns: each reads only what is new.

    /reset starts over, /save FILE writes the conversation as JSON, /exit (or end of input) leaves.
    """

    checkpoint: Positional[str]
    """A checkpoint, Hugging Face folder or GGUF file, with a chat template."""
    system: str | None = None
    """The system message."""
    load_cache: str | None = None
    """A folder that `treering generate --save-cache` wrote: the conversation continues the text that it holds."""
    capacity: int = 8192
    """Tokens that the conversation may hold in addition to such a text, together at most the model's context."""
