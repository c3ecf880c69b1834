"""How the next token is chosen."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Settings of one request, in the order they apply. The defaults choose greedily."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and what is added to its logit."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that prompt or answer hold (multiplies negative ones); above 1 discourages."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the answer holds, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit as often as the answer holds it, -2 to 2."""
    temperature: float = 0.0
    """0 takes the likeliest token; above 0 samples, the higher the more freely."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probabilities reach this."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest."""
    seed: int = 0
    """Equal seeds give equal text, on every mesh and beside any neighbours."""

    def __post_init__(self):
        bounds = (
            (
                "temperature",
                0 <= self.temperature <= MAX_FACTOR,
                f"at least 0 (0 takes the likeliest token) and at most {MAX_FACTOR:g}",
            ),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1 (0 keeps all)"),
            (
                "repetition_penalty",
                1 / MAX_FACTOR <= self.repetition_penalty <= MAX_FACTOR,
                f"from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g} (1 changes nothing)",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2 (0 changes nothing)"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2 (0 changes nothing)"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 4294967295"),
        )
        for name, fits, rule in bounds:
            if not fits:
                raise ValueError(f"{name} {getattr(self, name)}: it must be {rule}")

    @property
    def is_plain(self) -> bool:
        """Whether nothing but temperature and seed is set."""
        return self == SamplingConfig(temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class RequestConfig:
    """What is asked of the engine beside the prompt."""

    max_new_tokens: int = 256
    """Stop after this many tokens ("length"), if nothing stops the text before."""
    stop: tuple[str, ...] = ()
    """Strings that end the text wherever they appear; they are not part of it."""
    logprobs: int | None = None
    """Report the log-probability of each token and this many likeliest alternatives."""
    prompt_logprobs: bool = False
    """Report the same of the prompt's tokens after the first. Such a prompt is read whole, whatever pages are known."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self):
        if self.prompt_logprobs and not self.max_new_tokens:
            raise ValueError("prompt_logprobs with max_new_tokens 0: nothing is read then; ask for at least 1 token")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens {self.max_new_tokens} is negative: 0 generates nothing")
        if "" in self.stop:
            raise ValueError("a stop string is empty: it would end every text at once")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs {self.logprobs}: from 0 to {MAX_LOGPROBS} alternatives")

    def samples(self, n: int) -> "list[RequestConfig]":
        """`n` requests for one prompt: sample i draws with seed + i, and only the first scores the prompt.

        Raises ValueError for n below one or above `MAX_SAMPLES`, and for several that could not differ.
        """
        if not 1 <= n <= MAX_SAMPLES:
            raise ValueError(f"n {n}: ask for 1 to {MAX_SAMPLES} answers")
        if n > 1 and self.sampling.temperature == 0:
            raise ValueError(f"n {n} with temperature 0, which takes the likeliest token: all {n} answers would be one")
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
