"""Streamed text: joined pieces are the whole, and no part of a stop string is ever handed out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny


class Letters:
    """Tokens are the strings of a list."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, token):
        return self.pieces[token]

    def finish(self):
        return ""


def text_of(pieces, stop):
    from treering.infer.text.stream import TextStream

    stream = TextStream(Letters(pieces), stop)
    given_out = [stream.push(token) for token in range(len(pieces))]
    return given_out + [stream.finish()], stream.stopped


@pytest.mark.parametrize(
    "pieces,stop,text,stopped",
    [
        (["ab", "c", "d"], ["bcd"], "a", True),
        (["ab", "cx"], ["bcd"], "abcx", False),
        (["a", "b", "a", "b", "c"], ["abc"], "ab", True),
        (["hello END more"], ["END", "lo"], "hel", True),
        (["x\n", "\nUser:"], ["\n\nUser:"], "x", True),
        (["nothing"], [], "nothing", False),
        (["ab"], ["b", "ab"], "", True),
    ],
)
def test_stop_strings_across_tokens(pieces, stop, text, stopped):
    given_out, ended = text_of(pieces, stop)
    assert "".join(given_out) == text and ended == stopped


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_any_stream_is_the_whole_up_to_the_first_stop_string(pieces, stop):
    whole = "".join(pieces)
    ends = [at for one in stop if (at := whole.find(one)) >= 0]
    given_out, stopped = text_of(pieces, stop)
    joined = "".join(given_out)
    assert stopped == bool(ends)
    assert whole.startswith(joined)
    if not ends:
        assert joined == whole
    else:
        # A stop string that ends earlier is met first, though another may begin before it.
        assert len(joined) <= max(ends) and not any(one in joined for one in stop)


def test_real_tokens_stream_to_the_decoded_whole(tmp_path):
    from treering.infer.text.stream import TextStream
    from treering.models.tokenizer import Tokenizer

    tiny.save_byte_level(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in tiny.CORPUS:
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer.stream(), ["never in the text"])
        assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids)
