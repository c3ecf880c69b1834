"""The tokenizer of Meta's folders, as a Hugging Face folder: SentencePiece up to Llama 2, tiktoken's form from 3 on.

Both become the metadata of a GGUF file, whose reader builds a tokenizer from a list of tokens.
"""

import base64
import binascii
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece

from treering.models.files import check_no_pointer
from treering.models.formats import gguf_tokenizer

_FILE = "tokenizer.model"
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
"""Values of `tokenizer.ggml.token_type`."""
_SPECIAL = 256
"""Tokens that Meta's code adds after those of a tiktoken file."""
_LLAMA3 = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}
_LLAMA3_1 = _LLAMA3 | {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}
"""The places of those that have a name; the others are reserved."""
_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")


def save_tokenizer(folder: Path, config: Mapping[str, Any], target: Path) -> bool:
    """Writes the tokenizer next to the weights, or in the folder above (where Llama 2's is), into `target`.

    `config` is the model's config.json. False where there is no tokenizer; ValueError for one of neither kind.
    """
    file = next((path for path in (folder / _FILE, folder.resolve().parent / _FILE) if path.is_file()), None)
    if file is None:
        return False
    check_no_pointer(file)
    ranks = _read_ranks(file)
    if ranks is None:
        metadata = _sentencepiece(file)
        shutil.copyfile(file, target / _FILE)
        ends: Any = metadata["tokenizer.ggml.eos_token_id"]
    else:
        metadata = _tiktoken(file, ranks, config["vocab_size"], newer="rope_scaling" in config)
        tokens = metadata["tokenizer.ggml.tokens"]
        ends = [tokens.index(token) for token in _ENDS if token in tokens]
    ids = {"bos_token_id": metadata["tokenizer.ggml.bos_token_id"], "eos_token_id": ends}
    return gguf_tokenizer.save_tokenizer(metadata, {**config, **ids}, target)


def _read_ranks(file: Path) -> list[bytes] | None:
    """The tokens of a tiktoken file in order of rank; None for any other file.

    Raises ValueError for one whose ranks do not count up from 0.
    """
    tokens: list[bytes] = []
    try:
        for number, line in enumerate(file.read_bytes().splitlines()):
            token, rank = line.split()
            tokens.append(base64.b64decode(token, validate=True))
            if int(rank) != number:
                raise ValueError(f"{file}: line {number + 1} has rank {int(rank)} instead of {number}")
    except (binascii.Error, ValueError) as error:
        if tokens:
            raise ValueError(f"{file} is not a tiktoken file, or a damaged one: {error}") from None
        return None
    return tokens


def _tiktoken(file: Path, ranks: list[bytes], vocab: int, *, newer: bool) -> dict[str, Any]:
    count = min(_SPECIAL, vocab - len(ranks))
    named = _LLAMA3_1 if newer else _LLAMA3
    if count <= max(named):
        raise ValueError(
            f"{file} has {len(ranks)} tokens and the embedding table {vocab} rows: the special ones have no room"
        )
    known, letters = set(ranks), _byte_letters()
    special, reserved = [], 0
    for place in range(count):
        special.append(named.get(place, f"<|reserved_special_token_{reserved}|>"))
        reserved += place not in named

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # Every way to split a token into two others is a merge; the token's rank says when it applies.
    place = {token: number for number, token in enumerate(ranks)}
    merges = []
    for token in ranks:
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(place[left], place[right], left, right) for left, right in cuts if {left, right} <= known]
        merges += [f"{written(left)} {written(right)}" for *_, left, right in sorted(pairs)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*map(written, ranks), *special],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [_NORMAL] * len(ranks) + [_CONTROL] * count,
        "tokenizer.ggml.bos_token_id": len(ranks),
        "tokenizer.ggml.eos_token_id": len(ranks) + 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def _byte_letters() -> dict[int, str]:
    """The character for a byte in byte-level vocabularies: itself if it is printable, else one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + number) for number, byte in enumerate(hidden)}


def _sentencepiece(file: Path) -> dict[str, Any]:
    try:
        model: Any = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        message = " ".join(str(error).split())[:200]
        raise ValueError(f"{file} is neither SentencePiece's nor tiktoken's, or it is damaged: {message}") from None
    kinds = ((model.is_unknown, _UNKNOWN), (model.is_control, _CONTROL), (model.is_byte, _BYTE))
    ids = range(model.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((kind for holds, kind in kinds if holds(i)), _NORMAL) for i in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }
