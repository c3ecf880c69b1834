"""From tokens to the text that a caller sees: streamed, and cut at stop strings."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Pieces(Protocol):
    """Tokens to pieces of text, such as `Tokenizer.stream()` gives."""

    def push(self, token: int) -> str:
        """The text that is certain now."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class TextStream:
    """Text of tokens that come one by one, up to the first stop string.

    Text that could still turn out to be the beginning of a stop string is held back, so that no part of one is ever
    handed out, across however many tokens it is spread.
    """

    def __init__(self, pieces: Pieces, stop: Sequence[str] = ()):
        self._pieces = pieces
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string has come; all later text is dropped."""

    def push(self, token: int) -> str:
        """The text that is certain now."""
        return self._release(self._pieces.push(token), final=False)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return self._release(self._pieces.finish(), final=True)

    def _release(self, piece: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
