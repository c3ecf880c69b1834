"""Tokenizers: text there and back, streams, chat templates, end tokens."""

import json
import logging
import socket
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

import tiny
from treering.models.formats.gguf_tokenizer import save_tokenizer
from treering.models.tokenizer import Tokenizer

KINDS = ("byte-level", "sentencepiece", "gguf gpt2", "gguf llama")
TEXTS = [*tiny.CORPUS, "", " ", " leading", "  two  spaces ", "\n\nlines\n", "x 𝔘𝔫 ", "ﬁ ﷺ", "2024"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One of each kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    tiny.save_byte_level(root / "byte-level")
    tiny.save_sentencepiece(root / "sentencepiece")
    for kind in ("gpt2", "llama"):
        (root / f"gguf {kind}").mkdir()
        save_tokenizer(tiny.gguf_tokenizer_metadata(kind), {}, root / f"gguf {kind}")
    return {kind: Tokenizer.from_folder(root / kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    ids = tokenizers[kind].encode(text)
    # transformers' Llama tokenizer puts no second space before a text that begins with one, and takes one away.
    lost = kind == "sentencepiece" and text.startswith(" ")
    assert tokenizers[kind].decode(ids) == (text[1:] if lost else text)


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_holds_the_same_tokenizer(tokenizers: dict[str, Tokenizer], text: str) -> None:
    assert tokenizers["gguf gpt2"].encode(text) == tokenizers["byte-level"].encode(text)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=tiny.sentencepiece_model())
    assert tokenizers["gguf llama"].encode(text) == [oracle.bos_id(), *oracle.encode(text)]


def test_digits_are_split_as_the_gguf_file_says(tmp_path: Path) -> None:
    metadata = tiny.gguf_tokenizer_metadata("gpt2")
    tokens = metadata["tokenizer.ggml.tokens"] + ["20", "24"]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["2 0", "2 4"]}
    metadata["tokenizer.ggml.token_type"] = [1] * len(tokens)
    counts = {}
    for kind in ("smollm", "gpt-2"):
        (tmp_path / kind).mkdir()
        save_tokenizer(metadata | {"tokenizer.ggml.pre": kind}, {}, tmp_path / kind)
        counts[kind] = len(Tokenizer.from_folder(tmp_path / kind).encode("2024"))
    assert counts == {"smollm": 1 + 4, "gpt-2": 1 + 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_text(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text * 40)
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
    if len(ids) > 40 and "你" not in text:
        assert sum(map(bool, pieces)) > len(ids) / 8


@given(data=st.data(), kind=st.sampled_from(KINDS), length=st.integers(0, 300))
def test_any_tokens_stream(tokenizers: dict[str, Tokenizer], data: st.DataObject, kind: str, length: int) -> None:
    tokenizer = tokenizers[kind]
    token = st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(token, min_size=length, max_size=length))
    stream = tokenizer.stream()
    joined = "".join([stream.push(token) for token in ids]) + stream.finish()
    assert joined == tokenizer.decode(ids)


def test_characters_arrive_whole(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        stream = tokenizer.stream()
        pieces = [stream.push(token) for token in tokenizer.encode("a 👍🏽 b")]
        assert "�" not in "".join(pieces)


def test_a_stream_costs_the_same_at_any_length(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    seen: list[int] = []

    class Counting(Tokenizer):
        def decode(self, ids):
            seen.append(len(ids))
            return tokenizer.decode(ids)

    stream = Counting(tokenizer._inner, tokenizer.end_ids).stream()
    for token in tokenizer.encode(tiny.CORPUS[1]) * 100:
        stream.push(token)
    assert len(seen) > 2000 and max(seen) < 100


def test_a_conversation_has_one_bos_and_ends_where_the_assistant_speaks(tmp_path: Path) -> None:
    tiny.save_byte_level(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    text = tokenizer._inner.decode(ids)
    assert text == "<|begin|><|user|>hi<|end|><|assistant|>"
    assert ids.count(tokenizer._inner.bos_token_id) == 1
    assert tokenizer.encode("<|begin|>hi") == tokenizer.encode("hi")


def test_a_template_without_bos_gets_none(tmp_path: Path) -> None:
    tiny.save_byte_level(tmp_path, template=tiny.TEMPLATE.replace("{{ bos_token }}", ""))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer._inner.bos_token_id not in tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_no_chat_template(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        tokenizers["sentencepiece"].encode_chat([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses(tmp_path: Path) -> None:
    tiny.save_byte_level(tmp_path, template="{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        Tokenizer.from_folder(tmp_path).encode_chat([{"role": "user", "content": "hi"}])


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    tiny.save_byte_level(tmp_path, template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="unsafe"):
        Tokenizer.from_folder(tmp_path).encode_chat([{"role": "user", "content": "hi"}])


def test_end_tokens_are_those_of_all_files(tmp_path: Path) -> None:
    tiny.save_byte_level(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.end_ids == {1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 9}))
    assert Tokenizer.from_folder(tmp_path).end_ids == {1, 7, 8, 9}


def test_loading_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save_byte_level(tmp_path)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert Tokenizer.from_folder(tmp_path).encode("hi")


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_model_that_transformers_does_not_know_is_loaded_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of a plugin's family: the tokenizer does not depend on it."""
    tiny.save_byte_level(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "twig", "eos_token_id": 4}))
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        tokenizer = Tokenizer.from_folder(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
    assert tokenizer.end_ids == {1, 4} and tokenizer.encode("Paris") == tiny.byte_level_tokenizer().encode("Paris").ids


def test_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    tiny.save_byte_level(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    try:
        Tokenizer.from_folder(tmp_path)
    except ValueError as error:
        assert "\n" not in str(error)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "^tokenizer.ggml.model bert: it is not supported .*llama"),
        ({"tokenizer.ggml.pre": "klingon"}, "^tokenizer.ggml.pre klingon: it is not supported .*llama-bpe"),
    ],
)
def test_an_unknown_kind_of_gguf_tokenizer_is_refused(tmp_path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_tokenizer(tiny.gguf_tokenizer_metadata("gpt2") | change, {}, tmp_path)


def test_a_pointer_in_place_of_a_tokenizers_file_is_told(tmp_path: Path) -> None:
    tiny.save_byte_level(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0")
    with pytest.raises(ValueError, match="tokenizer.json is a Git LFS pointer, not the file itself"):
        Tokenizer.from_folder(tmp_path)


def test_a_text_that_goes_on_begins_with_no_token_of_the_tokenizers(tmp_path: Path) -> None:
    """One that the tokenizer does not put before a text stays: it may be what a chat's turns begin with."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tiny.save_byte_level(tmp_path / "begun")
    begun = Tokenizer.from_folder(tmp_path / "begun")
    chat = begun.encode_chat([{"role": "user", "content": "x"}])
    assert begun.without_bos(begun.encode("x")) == begun.encode("x")[1:] != []
    assert begun.without_bos(chat) == chat[1:] and begun.without_bos(chat[1:]) == chat[1:]

    inner = tiny.byte_level_tokenizer()
    inner.post_processor = processors.ByteLevel()
    tokens = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": tiny.TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=inner, **tokens).save_pretrained(tmp_path / "plain")
    plain = Tokenizer.from_folder(tmp_path / "plain")
    chat = plain.encode_chat([{"role": "user", "content": "x"}])
    assert chat[0] == plain.named_ids["bos"] and plain.without_bos(chat) == chat
    assert plain.without_bos(plain.encode("x")) == plain.encode("x")
