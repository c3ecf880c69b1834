"""The tokenizer inside a GGUF file, as a Hugging Face folder.

transformers can read it too, but only where torch is installed, and it splits text as GPT-2 does where a file names a
splitter that it does not know.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from treering.configs.errors import UserError
from treering.models.tokenizer import transformers

_CONTROL, _USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (_GPT2,),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
"""What `tokenizer.ggml.pre` says: expressions that cut text, one after the other, before merges apply."""


def save_tokenizer(metadata: Mapping[str, Any], config: Mapping[str, Any], target: Path) -> bool:
    """Writes tokenizer, chat template, generation settings and `config` as config.json; False without a tokenizer.

    Raises ValueError for a kind of tokenizer, or a way to split text, that is not known here.
    """
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config.get(name) is not None}
    own = {key: value for key, value in config.items() if "." not in key and value is not None}
    (target / "config.json").write_text(json.dumps(own, indent=2) + "\n")
    (target / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind = ggml.get("model")
    if kind is None or "tokens" not in ggml:
        return False
    if kind not in ("gpt2", "llama"):
        raise UserError(
            "it is not supported", field="tokenizer.ggml.model", value=kind, works=("gpt2 (byte-level)", "llama")
        )
    tokens = ggml["tokens"]
    tokenizer = _byte_level(ggml) if kind == "gpt2" else _sentencepiece(ggml)
    types = dict(zip(tokens, ggml.get("token_type", ()), strict=False))
    for wanted, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        special = wanted == _CONTROL
        add([AddedToken(token, normalized=False, special=special) for token in tokens if types.get(token) == wanted])
    special = {
        f"{name}_token": tokens[ggml[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if ggml.get(f"{key}_token_id") is not None
    }
    _add_bos_eos(tokenizer, special, ggml, kind)
    wrapped = transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )
    wrapped.save_pretrained(target)
    return True


def _byte_level(ggml: Mapping[str, Any]) -> Tokenizer:
    name = ggml.get("pre", "default")
    if name not in _SPLITS:
        raise UserError("it is not supported", field="tokenizer.ggml.pre", value=name, works=_SPLITS)
    vocabulary = {token: index for index, token in enumerate(ggml["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in ggml["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name.startswith("llama")))
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in _SPLITS[name]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(ggml: Mapping[str, Any]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(ggml["tokens"])}
    unknown = ggml["tokens"][ggml.get("unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, ggml["scores"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = ggml.get("add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies: every way to cut a piece into two, best pieces first."""
    found = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_bos_eos(tokenizer: Tokenizer, special: Mapping[str, str], ggml: Mapping[str, Any], kind: str) -> None:
    """Puts the first and last tokens around a text where the file asks for them; a SentencePiece file does for BOS."""
    before = [special["bos_token"]] if ggml.get("add_bos_token", kind == "llama") and "bos_token" in special else []
    after = [special["eos_token"]] if ggml.get("add_eos_token", False) and "eos_token" in special else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)],
        )
