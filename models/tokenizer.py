"""Text to tokens and back, with the tokenizer and the chat template that a checkpoint carries."""

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treering.models.files import check_no_pointer, read_json

TOKENIZER = "tokenizer"
"""The folder of a checkpoint that holds its tokenizer, a Hugging Face folder without weights."""
TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files of a Hugging Face folder that are not weights; they are copied as they are."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_WINDOW = 64
"""Tokens that a stream decodes again at each step before it drops the older ones."""


def transformers() -> Any:
    """The module, imported when it is needed: it takes seconds, and without this prints that it misses PyTorch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return importlib.import_module("transformers")


class Tokenizer:
    """A Hugging Face tokenizer, and the token ids that end a text."""

    def __init__(self, inner: Any, end_ids: frozenset[int]):
        self._inner = inner
        self.end_ids = end_ids
        self.vocab_size: int = max(inner.get_vocab().values()) + 1
        """One more than the largest token id."""
        self.special_ids = frozenset(token for token, added in inner.added_tokens_decoder.items() if added.special)
        """Tokens that decoding leaves out."""
        self.text_vocab_size: int = max(set(inner.get_vocab().values()) - self.special_ids, default=-1) + 1
        """`vocab_size` without special tokens after all others, which a text model may lack: Gemma's for an image."""

    @property
    def end_id(self) -> int | None:
        """The token that ends a text the model is trained on; None where the tokenizer has none."""
        return self._inner.eos_token_id

    @property
    def named_ids(self) -> dict[str, int | None]:
        """The tokens that begin a text, end it, and fill a row: `bos`, `eos` and `pad`."""
        return {name: getattr(self._inner, f"{name}_token_id") for name in ("bos", "eos", "pad")}

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """The tokenizer of the checkpoint at `path`.

        Nothing is downloaded and no code of the folder is run. Raises ValueError where there is none, or it cannot be
        read.
        """
        return Tokenizer.from_folder(Path(path) / TOKENIZER)

    @staticmethod
    def from_folder(folder: Path, *, origin: str | None = None) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder; `origin` is what a message calls it.

        Raises ValueError where there is none, or it cannot be read.
        """
        called = (origin or str(folder)).removesuffix("/config.json")
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise ValueError(f"{called} holds no tokenizer: convert a folder or file that has one")
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                check_no_pointer(folder / name)
        try:
            inner = transformers().AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, **_config_of_unknown(folder)
            )
        except Exception as error:  # Whatever transformers raises for files that it cannot read.
            raise ValueError(f"{called} has a tokenizer that transformers cannot read: {_line(error)}") from error
        return Tokenizer(inner, _end_ids(folder, inner))

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, with the first token that the tokenizer puts before a text, once.

        Raises ValueError for half a character: a surrogate, as bytes that are not UTF-8 become.
        """
        _check_text(text)
        return self._begun_once(self._inner.encode(text))

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, on all cores where the tokenizer can."""
        rows = self._inner(list(texts), return_attention_mask=False, verbose=False)["input_ids"]
        return [self._begun_once(ids) for ids in rows]

    def _begun_once(self, ids: Sequence[int]) -> list[int]:
        bos = self._inner.bos_token_id
        return list(ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids)

    def without_bos(self, ids: Sequence[int]) -> list[int]:
        """Tokens of a text that continues another: without the first token that the tokenizer puts before a text.

        One that it does not put there may begin a chat's turns, as SmolLM2's does.
        """
        begin = self._inner.encode("")[:1]
        return list(ids[1:] if begin and list(ids[:1]) == begin == [self._inner.bos_token_id] else ids)

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        """`encode`, and for each token the character that it begins at; -1 for those without text.

        Raises ValueError for a tokenizer that does not say.
        """
        if not self._inner.is_fast:
            raise ValueError("this tokenizer does not say where in the text its tokens begin: it has no tokenizer.json")
        encoded = self._inner(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
        places = [start if end > start else -1 for start, end in encoded["offset_mapping"]]
        ids = self._begun_once(encoded["input_ids"])
        return ids, places[len(places) - len(ids) :]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation up to where the assistant speaks, exactly as the chat template gives them.

        Raises ValueError where there is no chat template, or it refuses these messages.
        """
        if not self._inner.chat_template:
            raise ValueError("this checkpoint's tokenizer has no chat template: give it a plain prompt, without --chat")
        for message in messages:
            _check_text(message.get("content", ""))
        try:
            return list(
                self._inner.apply_chat_template(
                    list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
                )
            )
        except Exception as error:  # Templates raise what they like.
            raise ValueError(f"the chat template refuses these messages: {_line(error)}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return self._inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def stream(self) -> "Stream":
        """A decoder for tokens that come one by one."""
        return Stream(self)

    def ends_in_bytes(self, token: int) -> bool:
        """Whether `token` is one byte of a SentencePiece vocabulary, whose text depends on the bytes next to it."""
        piece = self._inner.convert_ids_to_tokens(token)
        return piece is not None and _BYTE_TOKEN.fullmatch(piece) is not None


class Stream:
    """Decodes tokens as they come. The pieces of text, joined, are the text of all tokens at once.

    A piece is held back while later tokens may still change it: the first bytes of a character, or a run of byte
    tokens, which SentencePiece decodes together.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """The last tokens; those before are decoded and dropped."""
        self._given = 0
        """Characters of the window's text that were returned."""

    def push(self, token: int) -> str:
        """The text that is certain now that `token` has come; often one word, sometimes nothing."""
        if token in self._tokenizer.special_ids:
            return ""
        self._window.append(token)
        if self._tokenizer.ends_in_bytes(token):
            return ""
        text = self._tokenizer.decode(self._window)
        certain = len(text.rstrip("�"))
        piece = text[self._given : certain]
        self._given = max(self._given, certain)
        if certain == len(text) and len(self._window) >= _WINDOW:
            self._shorten(text)
        return piece

    def finish(self) -> str:
        """The rest."""
        piece = self._tokenizer.decode(self._window)[self._given :]
        self._window, self._given = [], 0
        return piece

    def _shorten(self, text: str) -> None:
        """Drops old tokens, where what stays decodes to the end of the same text."""
        kept = self._window[-_WINDOW // 4 :]
        head, tail = self._tokenizer.decode(kept[:1]), self._tokenizer.decode(kept)
        if head.strip() and "�" not in head and text.endswith(tail):
            self._window, self._given = kept, len(tail)


def _config_of_unknown(folder: Path) -> dict[str, Any]:
    """The `config` to load a tokenizer with where transformers does not know the model, as of a plugin's family: the
    one that it falls back to, without the warning that it cannot compute such a model."""
    raw = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type in transformers().CONFIG_MAPPING:
        return {}
    return {"config": transformers().PreTrainedConfig.from_dict(raw)}


def _end_ids(folder: Path, inner: Any) -> frozenset[int]:
    """The end tokens that any of the tokenizer, generation_config.json and config.json names."""
    found = {inner.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            found |= set(value) if isinstance(value, list) else {value}
    return frozenset(token for token in found if token is not None)


def _line(error: Exception) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())[:300]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"{text[error.start]!r} at character {error.start}"
        raise ValueError(f"the text holds {wrong}, which is not a character: give text in UTF-8") from None
