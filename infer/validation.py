"""What an engine cannot do for a request, found out before anything runs."""

from collections.abc import Collection, Sequence

from treering.configs.errors import UserError
from treering.configs.sampling import RequestConfig
from treering.infer.engine import Engine
from treering.infer.sequence_state import MAX_ENDS


def check_prompt(engine: Engine, prompt: Sequence[int], budget: int) -> None:
    """Raises ValueError for a prompt that is empty or too long with `budget` new tokens, and for unknown tokens."""
    vocab, pages = engine.model.config.vocab, engine.pages_for(len(prompt) + budget)
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token to continue from")
    if len(prompt) > engine.capacity:
        raise ValueError(f"the prompt has {len(prompt)} tokens and a row holds {engine.capacity}: shorten it")
    wrong = [token for token in prompt if not 0 <= token < vocab]
    if wrong:
        raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {vocab}")
    if pages > engine.group_pages:
        raise ValueError(
            f"{len(prompt)} prompt and {budget} new tokens take {pages} pages of {engine.page_tokens} tokens, and "
            f"the pool has {engine.group_pages}: ask for fewer, or build the engine with more pages"
        )


def check_settings(
    engine: Engine, config: RequestConfig, end_ids: Collection[int], *, budget: int, in_session: bool
) -> None:
    """Raises ValueError for more end tokens than a row takes, a bias beyond the vocabulary, and a prompt that cannot be
    scored."""
    vocab = engine.model.config.vocab
    if len(end_ids) > MAX_ENDS:
        raise ValueError(f"{len(end_ids)} end tokens: a row takes up to {MAX_ENDS}")
    for token, _ in config.sampling.logit_bias:
        if not 0 <= token < vocab:
            raise UserError(f"it is outside the vocabulary of {vocab}", field="logit_bias", value=f"of token {token}")
    if config.prompt_logprobs and budget == 0:
        rule = f"the prompt fills the row's {engine.capacity} tokens: it must leave room for 1"
        raise UserError(rule, field="prompt_logprobs")
    if config.prompt_logprobs and in_session:
        raise UserError("what a session's row holds is not read again: submit without one", field="prompt_logprobs")
