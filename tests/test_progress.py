"""What is said while a long prompt is read."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from treering.infer.request import Event
from treering.infer.scheduler import Scheduler
from treering.infer.text import progress


class Reader(Scheduler):
    """Reads 100 tokens at a step, then reports two events."""

    def __init__(self, tokens: int):
        self.state: Any = ()
        self.left = tokens

    def unread(self, number: int) -> int:
        assert number == 7
        return self.left

    def step(self) -> list[Event]:
        self.left = max(self.left - 100, 0)
        return [] if self.left else [Event(7, 1, None)]

    def run(self) -> Iterator[Event]:
        while self.left:
            yield from self.step()
        yield Event(7, 2, "length")


def events(tokens: int) -> list[int | None]:
    return [event.token for event in progress.run_with_progress(Reader(tokens), 7)]


def test_a_long_prompt_is_announced_and_its_end_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert events(1050) == [1, 2]
    out, err = capsys.readouterr()
    before, after = err.splitlines()
    assert out == "" and before == "reading 1,050 tokens"
    assert re.fullmatch(r"1,050 tokens read in \d+\.\d\d s, [\d,]+ tokens/s", after)


def test_of_a_short_prompt_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert events(200) == [1, 2] and events(0) == [2]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_how_much_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    assert events(1050) == [1, 2]
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "reading" in shown and "1050/1050 tokens" in shown and "reading 1,050" not in shown
    assert "1,050 tokens read in" in shown.splitlines()[-1]


def test_one_of_a_thing_is_singular() -> None:
    assert [progress.count(number, "row") for number in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
