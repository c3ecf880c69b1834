"""Whether a checkpoint computes what transformers computes from the files that it came from."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from treering.configs.rope import DefaultRope
from treering.layers.parallel.sharding import Plan
from treering.models.audit.score import text_logits
from treering.models.conversion.load import OpenModel
from treering.models.tokenizer import transformers
from treering.models.transformer import check_mesh


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far apart two models' logits are on a text."""

    tokens: int
    scale: float
    """The largest logit of the source."""
    largest: float
    """Difference of two logits."""
    mean: float
    """Of the absolute differences."""
    divergence: float
    """KL divergence of our next-token distribution from the source's, in nats per token, on average."""
    same_choice: float
    """Share of tokens after which both find the same next one most likely."""

    def within(self, bound: float) -> bool:
        """Whether no logit differs by more than `bound`, or in proportion where logits are beyond 10."""
        return bool(self.largest <= bound * max(1.0, self.scale / 10))

    def __str__(self) -> str:
        return (
            f"{self.tokens} token{'' if self.tokens == 1 else 's'}: logits differ by {self.largest:.3g} at most and "
            f"{self.mean:.3g} on average (they reach {self.scale:.3g}); KL divergence {self.divergence:.3g} nats per "
            f"token; the most likely next token is the same after {100 * self.same_choice:.1f}%"
        )


def difference(ours: Float[np.ndarray, "seq vocab"], theirs: Float[np.ndarray, "seq vocab"]) -> Difference:
    """Of our logits from the source's; NaN anywhere makes it infinite."""
    wide, right = ours.astype(np.float64), theirs.astype(np.float64)
    apart = np.nan_to_num(np.abs(wide - right), nan=np.inf)
    ours_log, right_log = _log_probabilities(wide), _log_probabilities(right)
    divergence = (np.exp(right_log) * (right_log - ours_log)).sum(axis=-1)
    return Difference(
        tokens=len(ours),
        scale=float(np.abs(right).max()),
        largest=float(apart.max()),
        mean=float(apart.mean()),
        divergence=float(np.nan_to_num(divergence, nan=np.inf).mean()),
        same_choice=float((wide.argmax(axis=-1) == right.argmax(axis=-1)).mean()),
    )


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def verify(opened: OpenModel, source: str | Path, plan: Plan, text: str, *, max_tokens: int) -> Difference:
    """Compares `opened` with the Hugging Face folder or GGUF file `source`, both computed in float32.

    Raises ValueError where torch is missing, the text is empty, or the two models have different vocabularies.
    """
    ids = opened.tokenizer().encode(text)[: min(max_tokens, opened.config.context_length)]
    if not ids:
        raise ValueError("there is nothing to compare: give a text and at least 1 token")
    check_mesh(opened.config, plan)
    theirs = _transformers_logits(Path(source), ids, opened)
    ours = text_logits(opened.load(plan, "float32"), plan, ids)
    if ours.shape != theirs.shape:
        raise ValueError(f"{source} has a vocabulary of {theirs.shape[1]} and the checkpoint one of {ours.shape[1]}")
    return difference(ours, theirs)


def _transformers_logits(source: Path, ids: list[int], opened: OpenModel) -> np.ndarray:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise ValueError("comparing with transformers needs PyTorch: pip install 'treering[torch]'") from None
    if not source.exists():
        raise FileNotFoundError(
            f"{source} does not exist: give the Hugging Face folder or GGUF file; names on the hub are not downloaded"
        )
    options: dict[str, Any] = {}
    folder = source
    if source.is_file():
        if not isinstance(opened.config.rope, DefaultRope):
            raise ValueError(
                f"{source} has scaled rotary frequencies, which transformers ignores in GGUF files: give the "
                "Hugging Face folder"
            )
        folder, options = source.parent, {"gguf_file": source.name}
    try:
        model = transformers().AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, dtype=torch.float32, **options
        )
    except Exception as error:  # Whatever transformers raises for files that it cannot read.
        raise ValueError(f"transformers cannot load {source}: {' '.join(str(error).split())[:300]}") from error
    with torch.no_grad():
        return model.eval()(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
