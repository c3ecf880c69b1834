"""Continuous batching: requests join and leave a running batch.

A request waits until a row and the pages for all its tokens are free, then its prompt is appended chunk by chunk,
between which running rows decode, so that no row stalls for longer than a chunk. A row that ends gives its pages back
at once. Full pages of a prompt that another request has read already are shared and not read again.
"""

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from treering.configs.sampling import RequestConfig
from treering.infer.chunks import Chunks
from treering.infer.engine import MAX_STEPS, Drawn, Engine
from treering.infer.pages import Pages, page_keys
from treering.infer.request import Event, FinishReason, Request, Session, TokenLogprob, least_program
from treering.infer.sequence_state import SequenceState


class Scheduler:
    """Runs requests on an engine. Not thread-safe: one thread submits and steps."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.state = engine.empty_state()
        self.pages = Pages(engine.groups, engine.group_pages)
        self._numbers = itertools.count()
        self._waiting: deque[Request] = deque()
        self._rows: list[Request | None] = [None] * engine.batch
        self._pinned: set[int] = set()
        """Rows of sessions, also between their requests."""
        self._events: list[Event] = []
        self._counts: dict[int, Any] = {}
        """Numbers of steps, on the devices already: to put one there takes longer than to decide on it."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs, or has yet to be reported."""
        return not (self._waiting or self._events or any(self._rows))

    def submit(
        self,
        prompt: Sequence[int],
        config: RequestConfig = RequestConfig(),
        *,
        end_ids: Collection[int] = (),
        streamed: bool = False,
        session: Session | None = None,
        caller: str = "",
    ) -> int:
        """Queues a request; returns its number. `streamed` says that somebody waits for single tokens.

        Where texts of one `caller` begin alike, full pages are read once. Another caller's are never used: the time of
        an answer would tell what was asked. With a `session`, the tokens that the prompt has in common with what the
        session's row holds are not read again.

        A row stops at any of `end_ids` ("stop"), or after max_new_tokens or at the engine's capacity ("length"). Where
        that leaves no token to draw, the prompt is read all the same for a `session`, and for nobody else.

        Raises ValueError for an empty prompt, one longer than the capacity, ids beyond the vocabulary, and a request
        that the pool could never hold.
        """
        engine, vocab = self.engine, self.engine.model.config.vocab
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token to continue from")
        if len(prompt) > engine.capacity:
            raise ValueError(f"the prompt has {len(prompt)} tokens and a row holds {engine.capacity}: shorten it")
        wrong = [token for token in prompt if not 0 <= token < vocab]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {vocab}")
        budget = min(config.max_new_tokens, engine.capacity - len(prompt))
        pages = -(-(len(prompt) + budget) // engine.page_tokens)
        if pages > engine.group_pages:
            raise ValueError(
                f"{len(prompt)} prompt and {budget} new tokens take {pages} pages of {engine.page_tokens} tokens, and "
                f"the pool has {engine.group_pages}: ask for fewer, or build the engine with more pages"
            )
        if config.prompt_logprobs and budget == 0:
            raise ValueError(
                f"prompt_logprobs of a prompt that fills the row's {engine.capacity} tokens: it must leave room for 1"
            )
        if config.prompt_logprobs and session is not None:
            raise ValueError("prompt_logprobs in a session: what its row holds is not read again; submit without one")
        # Checked here, so that a wrong bias is refused before anything runs.
        SequenceState.of_request(prompt, budget, end_ids, config.sampling, vocab)
        request = Request(
            next(self._numbers),
            list(prompt),
            config,
            frozenset(end_ids),
            budget,
            pages,
            streamed,
            session or Session(),
            session is not None,
            caller,
            page_keys(caller, prompt, engine.page_tokens) if session is None else [],
        )
        if budget == 0 and session is None:
            self._events.append(Event(request.number, None, "length"))
        else:
            self._waiting.append(request)
        return request.number

    def cancel(self, number: int) -> None:
        """Ends a request; its row and pages are free at once. One that has ended, or never was, is left alone."""
        for request in self._waiting:
            if request.number == number:
                self._waiting.remove(request)
                self._events.append(Event(number, None, "cancelled"))
                return
        for row, request in enumerate(self._rows):
            if request is not None and request.number == number:
                program = self.engine.release_program()
                self.state = program(self.engine.model, self.state, self.engine.put(np.int32(row)))
                self._leave(row)
                self._events.append(Event(number, None, "cancelled"))
                return

    def step(self) -> list[Event]:
        """Admits what fits, appends one chunk of a prompt, decodes; returns what happened to requests."""
        self._admit()
        self._prefill()
        self._decode()
        events, self._events = self._events, []
        return events

    def run(self) -> Iterator[Event]:
        """Steps until idle."""
        while not self.is_idle:
            yield from self.step()

    def hold(self, tokens: Sequence[int]) -> Session:
        """A session that has a row and pages for `tokens`, whose keys and values are for the caller to write there.

        Raises ValueError where no row has room for them.
        """
        count = -(-len(tokens) // self.engine.page_tokens)
        free = [row for row, request in enumerate(self._rows) if request is None and row not in self._pinned]
        free = [row for row in free if self.pages.free(self._group(row)) >= count]
        if not free or len(tokens) > self.engine.capacity:
            raise ValueError(
                f"{len(tokens)} tokens take a row of {self.engine.capacity} and {count} pages of "
                f"{self.engine.page_tokens}, and none has them free"
            )
        self._pinned.add(free[0])
        return Session(free[0], self.pages.take(self._group(free[0]), count), list(tokens))

    def close(self, session: Session) -> None:
        """Gives a session's row and pages back."""
        if session.row is not None:
            assert self._rows[session.row] is None, "a request still uses the session"
            self.pages.give_back(self._group(session.row), session.pages)
            self._pinned.discard(session.row)
        session.row, session.pages, session.tokens = None, [], []

    def release(self, session: Session, caller: str = "") -> None:
        """`close`, but what its full pages hold stays known: requests of `caller` whose prompts begin with the
        session's tokens share them."""
        if session.row is not None:
            keys = page_keys(caller, session.tokens, self.engine.page_tokens)
            self.pages.remember(self._group(session.row), keys, session.pages[: len(keys)])
        self.close(session)

    def _leave(self, row: int) -> None:
        request = self._rows[row]
        assert request is not None
        self._rows[row] = None
        # The cache holds what was appended; the last token drawn is not in it yet.
        request.session.tokens = request.prompt[: request.done] + request.drawn[:-1]
        if not request.kept:
            self.release(request.session, request.caller)

    def _admit(self) -> None:
        """In order of arrival: a request that does not fit yet lets none pass it."""
        engine = self.engine
        while self._waiting:
            request = self._waiting[0]
            session = request.session
            missing = max(request.pages - len(session.pages), 0)
            rows = [session.row] if session.row is not None else range(engine.batch)
            shared = [self.pages.find(group, self._shareable(request)) for group in range(engine.groups)]
            fitting = [
                row
                for row in rows
                if self._rows[row] is None
                and (row == session.row or row not in self._pinned)
                and self.pages.fits(self._group(row), shared[self._group(row)], missing)
            ]
            if not fitting:
                return
            # The group with most of the prompt, then that with most free pages, so that groups fill evenly.
            row = max(fitting, key=lambda row: (len(shared[self._group(row)]), self.pages.free(self._group(row))))
            group = self._group(row)
            self._waiting.popleft()
            self._rows[row] = request
            session.row = row
            if request.kept:
                self._pinned.add(row)
            self.pages.share(group, shared[group])
            session.pages += shared[group] + self.pages.take(group, missing - len(shared[group]))
            # At least one token is read anew: the next one is drawn from its logits.
            same = itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(session.tokens, request.prompt, strict=False)
            )
            request.done = min(len(list(same)), len(request.prompt) - 1)
            request.done = max(request.done, len(shared[group]) * engine.page_tokens)
            self._admit_on_device(row, request)

    def _admit_on_device(self, row: int, request: Request) -> None:
        """Tells the devices of a request's row."""
        engine = self.engine
        table = np.zeros(engine.row_pages, np.int32)
        table[: len(request.session.pages)] = request.session.pages
        new = SequenceState.of_request(
            request.prompt, request.budget, request.end_ids, request.config.sampling, engine.model.config.vocab
        )
        self.state = engine.admit_program()(
            engine.model,
            self.state,
            engine.put(np.int32(row)),
            engine.put(np.int32(request.done)),
            engine.put(table),
            engine.put(new),
        )

    def _shareable(self, request: Request) -> list[bytes]:
        """The prompt's pages before its last token, which is always read; none where all tokens are to be scored."""
        if request.config.prompt_logprobs:
            return []
        return request.keys[: (len(request.prompt) - 1) // self.engine.page_tokens]

    def _share(self, row: int, request: Request) -> None:
        """Takes over what became known while the request waited for its turn to be read: full pages by reference, and
        of the page after them a copy, where the row of a prompt that goes on alike holds it."""
        engine, group, pages = self.engine, self._group(row), request.session.pages
        before = request.done
        shared = self.pages.find(group, self._shareable(request))
        if len(shared) * engine.page_tokens > request.done:
            self.pages.share(group, shared)
            self.pages.give_back(group, pages[: len(shared)])
            pages[: len(shared)] = shared
            request.done = len(shared) * engine.page_tokens
        neighbours = self._rows[group * engine.group_rows : (group + 1) * engine.group_rows]
        longest, source = max(
            ((self._alike(request, other), other) for other in neighbours if other), key=lambda pair: pair[0]
        )
        left = len(request.prompt) - request.done, len(request.prompt) - longest
        if longest and sum(engine.chunks.of(left[1])) < sum(engine.chunks.of(left[0])):
            page = request.done // engine.page_tokens
            copied = np.zeros((2, engine.groups), np.int32)
            copied[:, group] = source.session.pages[page], pages[page]
            self.state = engine.copy_program()(engine.model, self.state, *engine.put(tuple(copied)))
            request.done = longest
        if request.done > before:
            self._admit_on_device(row, request)

    def _alike(self, request: Request, other: Request) -> int:
        """Tokens that a request would have done with the page after its shared ones as the row of another holds it; 0
        where their texts differ before, or are none of each other's business."""
        start = request.done
        page = start // self.engine.page_tokens
        if other is request or other.kept or request.kept or other.caller != request.caller:
            return 0
        if request.config.prompt_logprobs:
            return 0
        if other.keys[:page] != request.keys[:page]:
            return 0
        end = min((page + 1) * self.engine.page_tokens, len(request.prompt) - 1, other.done)
        same = itertools.takewhile(lambda at: request.prompt[at] == other.prompt[at], range(start, end))
        return start + len(list(same))

    def _group(self, row: int) -> int:
        return row // self.engine.group_rows

    def _prefill(self) -> None:
        """One chunk of the oldest unfinished prompt of each group."""
        engine = self.engine
        chosen: list[tuple[int, int, Request]] = []
        for group in range(engine.groups):
            rows = range(group * engine.group_rows, (group + 1) * engine.group_rows)
            unfinished = [(r.number, row, r) for row in rows if (r := self._rows[row]) and r.done < len(r.prompt)]
            if unfinished:
                _, row, request = min(unfinished)
                if not request.begun:
                    self._share(row, request)
                    request.begun = True
                chosen.append((group, row, request))
        if not chosen:
            return
        scored = [request.config.logprobs or 0 for _, _, request in chosen if request.config.prompt_logprobs]
        chunks = Chunks() if scored else engine.chunks
        beside = bool(self._running())
        size = max(chunks.next(len(r.prompt) - r.done, beside_others=beside) for _, _, r in chosen)
        fresh = not any(request.done for _, _, request in chosen)
        # A group without a prompt names a row of its own, for which nothing is appended.
        index = np.arange(engine.groups, dtype=np.int32) * engine.group_rows
        count = np.zeros(engine.groups, np.int32)
        tokens, done = np.zeros((engine.groups, size), np.int32), np.zeros(engine.groups, bool)
        targets = np.zeros_like(tokens)
        for group, row, request in chosen:
            part = request.prompt[request.done : request.done + size]
            index[group], count[group] = row, len(part)
            tokens[group, : len(part)] = part
            following = request.prompt[request.done + 1 : request.done + size + 1]
            targets[group, : len(following)] = following
            request.done += len(part)
            done[group] = request.done == len(request.prompt) and request.budget > 0
        inputs = [engine.put(index), engine.put(tokens), engine.put(count)]
        if scored:
            append = engine.append_program(engine.groups, size, top=max(scored))
            self.state, logits, scores = append(engine.model, self.state, *inputs, engine.put(targets))
            own, values, ids = (np.asarray(x) for x in scores)
            for group, _, request in chosen:
                if request.config.prompt_logprobs:
                    # A target for each token appended, but for the prompt's last.
                    some = range(count[group] - (request.done == len(request.prompt)))
                    top = request.config.logprobs
                    request.scored += [
                        TokenLogprob.of(own[group, i], values[group, i], ids[group, i], top) for i in some
                    ]
        else:
            append = engine.append_program(engine.groups, size, fresh=fresh)
            self.state, logits = append(engine.model, self.state, *inputs)
        for group, _, request in chosen:
            full = min(request.done // engine.page_tokens, len(request.keys))
            self.pages.remember(group, request.keys[:full], request.session.pages[:full])
        for _, row, request in chosen:
            if request.done == len(request.prompt) and request.budget == 0:
                self._events.append(Event(request.number, None, "length"))
                self._leave(row)
        if done.any():
            ended = [request for group, _, request in chosen if done[group]]
            start = engine.start_program(*least_program([request.config for request in ended]))
            self.state, drawn = start(engine.model, self.state, logits, engine.put(index), engine.put(done))
            self._tell(drawn, index)

    def _running(self) -> list[Request]:
        """The requests whose prompts are read."""
        return [request for request in self._rows if request and request.done == len(request.prompt)]

    def _decode(self) -> None:
        running = self._running()
        if not running:
            return
        # Somebody waits: for this token, or for the next chunk of a prompt.
        patient = not (self._waiting or any(request and request not in running for request in self._rows))
        steps = MAX_STEPS if patient and not any(request.streamed for request in running) else 1
        program = self.engine.decode_program(*least_program([request.config for request in running]))
        if steps not in self._counts:
            self._counts[steps] = self.engine.put(np.int32(steps))
        self.state, drawn = program(self.engine.model, self.state, self._counts[steps])
        self._tell(drawn, np.arange(self.engine.batch))

    def _tell(self, drawn: Drawn, rows: np.ndarray) -> None:
        """Events of the tokens drawn, `[steps some]`, in `rows`; rows that ended are free."""
        tokens = np.asarray(drawn.tokens)
        logprobs = None if drawn.logprobs is None else [np.asarray(x) for x in drawn.logprobs]
        for step, column in np.argwhere(tokens >= 0):
            row, token = int(rows[column]), int(tokens[step, column])
            request = self._rows[row]
            assert request is not None
            request.drawn.append(token)
            reason: FinishReason | None = None
            if token in request.end_ids:
                reason = "stop"
            elif len(request.drawn) == request.budget:
                reason = "length"
            logprob = None
            if logprobs is not None and request.config.logprobs is not None:
                own, values, ids = (x[step, column] for x in logprobs)
                logprob = TokenLogprob.of(own, values, ids, request.config.logprobs)
            asked = request.config.prompt_logprobs and len(request.drawn) == 1
            scored = tuple(request.scored) if asked else None
            self._events.append(Event(request.number, token, reason, logprob, scored))
            if reason is not None:
                self._leave(row)
