"""New tokenizers, for models that are trained from scratch: Hugging Face folders, made without network access."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from treering.configs.errors import UserError

BEGIN, END = "<|begin|>", "<|end|>"
BYTE_VOCAB = 258
"""256 bytes, a begin token and an end token."""


def write_tokenizer(folder: Path, kind: Literal["bytes", "bpe"], texts: Iterable[str], vocab: int) -> None:
    """Writes a tokenizer with at most `vocab` tokens into a new `folder`; it puts a begin token before each text.

    `bytes` has one token per byte. `bpe` learns byte pairs from `texts` (arXiv 1508.07909), the same from the same
    texts. Both decode every text exactly.

    Raises ValueError for a vocabulary too small to hold all bytes.
    """
    if vocab < BYTE_VOCAB:
        raise UserError(f"it must be at least {BYTE_VOCAB} for tokenizer {kind}", field="model.vocab", value=vocab)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    # Words keep the spaces before them; bytes alone need no words.
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bpe")
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab if kind == "bpe" else BYTE_VOCAB,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts if kind == "bpe" else [], trainer)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, inner.token_to_id(BEGIN))]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BEGIN, eos_token=END)
    made.save_pretrained(str(folder))
