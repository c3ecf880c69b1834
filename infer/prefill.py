"""One call's share of the prompts that are being read: a chunk of one prompt in each group of devices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treering.infer.request import Request, TokenLogprob


@dataclass(frozen=True)
class Reading:
    """A prompt that a row reads."""

    group: int
    row: int
    request: Request


class PrefillBatch:
    """The host's arrays for one call of `append`: the next `size` tokens of each prompt.

    A group without a prompt names a row of its own, to which nothing is appended.
    """

    def __init__(self, readings: list[Reading], *, groups: int, group_rows: int, size: int):
        self.readings, self.size = readings, size
        self.fresh = not any(reading.request.done for reading in readings)
        """Whether all these rows are empty."""
        self.index = np.arange(groups, dtype=np.int32) * group_rows
        self.count = np.zeros(groups, np.int32)
        self.tokens = np.zeros((groups, size), np.int32)
        self.targets = np.zeros_like(self.tokens)
        """The token after each."""
        for reading in readings:
            group, prompt, done = reading.group, reading.request.prompt, reading.request.done
            part, following = prompt[done : done + size], prompt[done + 1 : done + size + 1]
            self.index[group], self.count[group] = reading.row, len(part)
            self.tokens[group, : len(part)] = part
            self.targets[group, : len(following)] = following

    @property
    def top(self) -> int | None:
        """The most alternatives that a prompt's tokens are scored with; None where none are scored."""
        scored = [reading.request.config for reading in self.readings if reading.request.config.prompt_logprobs]
        return max((config.logprobs or 0 for config in scored), default=None)

    def mark_read(self) -> None:
        """After the call: the cache holds these tokens."""
        for reading in self.readings:
            reading.request.done += int(self.count[reading.group])

    def keep_scores(self, scores: Sequence[np.ndarray]) -> None:
        """Gives what `append_scored` returned to the requests that asked for it."""
        own, values, ids = scores
        for reading in self.readings:
            group, request = reading.group, reading.request
            if request.config.prompt_logprobs:
                # A target for each token appended, but for the prompt's last.
                some = range(self.count[group] - request.is_read)
                top = request.config.logprobs
                request.scored += [TokenLogprob.of(own[group, i], values[group, i], ids[group, i], top) for i in some]
