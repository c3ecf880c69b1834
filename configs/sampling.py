"""How the next token is chosen, and when a text ends."""

from dataclasses import dataclass, field, replace

from treering.configs.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Settings that are single numbers. The defaults choose greedily."""

    temperature: float = 0.0
    """0 takes the most likely token; above 0 samples, and higher is more random."""
    top_k: int = 0
    """Sample among this many most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Sample among the fewest most likely tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Sample among tokens at least this many times as likely as the most likely."""
    repetition_penalty: float = 1.0
    """Above 1 discourages tokens of prompt and answer: divides their logits (multiplies negative ones)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer contains; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the answer contains it; -2 to 2."""
    seed: int = 0
    """Seed of the sampling; equal seeds give equal text, on every mesh and next to any other requests."""

    def __post_init__(self):
        factors = f"from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}"
        bounds = (
            ("temperature", 0 <= self.temperature <= MAX_FACTOR, f"from 0 (the most likely token) to {MAX_FACTOR:g}"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1 (0 keeps all)"),
            (
                "repetition_penalty",
                1 / MAX_FACTOR <= self.repetition_penalty <= MAX_FACTOR,
                f"{factors} (1 changes nothing)",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2 (0 changes nothing)"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2 (0 changes nothing)"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 4294967295"),
        )
        for name, fits, rule in bounds:
            if not fits:
                raise UserError(f"it must be {rule}", field=name, value=getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(SamplingOptions):
    """Settings of one request. They apply in this order: bias, penalties, temperature, top-k, top-p, min-p."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and what is added to its logit."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing but temperature and seed is set."""
        return self == SamplingConfig(temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """When a text ends, if no end token comes first."""

    max_new_tokens: int = 256
    """Stop after this many tokens ("length"), if nothing else ends the text first; 0 generates nothing."""
    stop: tuple[str, ...] = ()
    """Strings that end the text wherever they appear; they are not part of it."""

    def __post_init__(self):
        if self.max_new_tokens < 0:
            raise UserError(
                "it must be at least 0 (0 generates nothing)", field="max_new_tokens", value=self.max_new_tokens
            )
        if "" in self.stop:
            raise UserError("an empty string would end every text at once", field="stop")


@dataclass(frozen=True, kw_only=True)
class RequestConfig(LengthOptions):
    """What is asked of the engine in addition to the prompt."""

    logprobs: int | None = None
    """Report the log-probability of each token and of this many most likely alternatives."""
    prompt_logprobs: bool = False
    """Report the same of the prompt's tokens after the first. Such a prompt is read whole, whatever pages are known."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self):
        super().__post_init__()
        if self.prompt_logprobs and not self.max_new_tokens:
            raise UserError(
                "prompt_logprobs requires at least 1: with 0 no prompt is read",
                field="max_new_tokens",
                value=self.max_new_tokens,
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise UserError(f"it must be from 0 to {MAX_LOGPROBS}", field="logprobs", value=self.logprobs)

    def samples(self, n: int) -> "list[RequestConfig]":
        """`n` requests for one prompt: sample i draws with seed + i, and only the first scores the prompt.

        Raises ValueError for n below one or above `MAX_SAMPLES`, and for several that could not differ.
        """
        if not 1 <= n <= MAX_SAMPLES:
            raise UserError(f"it must be from 1 to {MAX_SAMPLES}", field="n", value=n)
        if n > 1 and self.sampling.temperature == 0:
            raise UserError("it requires a temperature above 0: at 0 all answers would be the same", field="n", value=n)
        seeds = [replace(self.sampling, seed=self.sampling.seed + i) for i in range(n)]
        return [
            replace(self, sampling=one, prompt_logprobs=self.prompt_logprobs and i == 0) for i, one in enumerate(seeds)
        ]


MAX_FACTOR = 1e6
"""Of temperature and repetition penalty: logits overflow far beyond it."""
MAX_SAMPLES = 1024
"""Answers to one prompt."""
MAX_LOGPROBS = 20
"""Alternatives that one request may ask for."""
