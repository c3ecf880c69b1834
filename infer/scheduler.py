"""Continuous batching: requests join and leave a running batch.

A request waits until a row and the pages for all its tokens are free, then its prompt is appended chunk by chunk,
between which running rows decode, so that no row stalls for longer than a chunk. A row that ends returns its pages at
once. Full pages of a prompt that another request has read already are shared and not read again.
"""

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from treering.configs.sampling import RequestConfig
from treering.infer.chunks import Chunks
from treering.infer.engine import MAX_STEPS, Drawn, Engine
from treering.infer.pages import Pages, page_keys
from treering.infer.prefill import PrefillBatch, Reading
from treering.infer.request import Event, Request, Session, TokenLogprob, least_program
from treering.infer.sequence_state import SequenceState
from treering.infer.validation import check_prompt, check_settings
from treering.layers.operations.pool import PagePool


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
        that leaves no token to draw, the prompt is still read for a `session`, and only then.

        Raises ValueError for an empty prompt, one longer than the capacity, ids beyond the vocabulary, and a request
        that the pool could never hold.
        """
        engine = self.engine
        budget = min(config.max_new_tokens, engine.capacity - len(prompt))
        check_prompt(engine, prompt, budget)
        check_settings(engine, config, end_ids, budget=budget, in_session=session is not None)
        request = Request(
            next(self._numbers),
            list(prompt),
            config,
            frozenset(end_ids),
            budget,
            engine.pages_for(len(prompt) + budget),
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

    def unread(self, number: int) -> int:
        """Tokens of a request's prompt that are still to be read: 0 for one that has ended."""
        for request in self._rows:
            if request is not None and request.number == number:
                return request.left
        for request in self._waiting:
            if request.number == number:
                keys = request.shareable(self.engine.page_tokens)
                shared = max(len(self.pages.find(group, keys)) for group in range(self.engine.groups))
                return len(request.prompt) - max(request.in_session(), shared * self.engine.page_tokens)
        return 0

    def hold(self, tokens: Sequence[int]) -> Session:
        """A session that has a row and pages for `tokens`, whose keys and values the caller writes there.

        Raises ValueError where no row has room for them.
        """
        count = self.engine.pages_for(len(tokens))
        free = [row for row, request in enumerate(self._rows) if request is None and row not in self._pinned]
        free = [row for row in free if self.pages.free(self._group(row)) >= count]
        if not free or len(tokens) > self.engine.capacity:
            raise ValueError(
                f"{len(tokens)} tokens take a row of {self.engine.capacity} and {count} pages of "
                f"{self.engine.page_tokens}, and none has them free"
            )
        self._pinned.add(free[0])
        return Session(free[0], self.pages.take(self._group(free[0]), count), list(tokens))

    def pool(self, place: int) -> PagePool:
        """The keys and values of the layers at a place of the pattern, for programs of `Engine.pool_program`."""
        return self.state.cache.pools[place]

    def replace_pool(self, place: int, pool: PagePool) -> None:
        """Puts back what such a program returned."""
        self.state = eqx.tree_at(lambda state: state.cache.pools[place], self.state, pool)

    def close(self, session: Session) -> None:
        """Frees a session's row and pages."""
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
        if not request.pinned:
            self.release(request.session, request.caller)

    def _admit(self) -> None:
        """In order of arrival: a request that does not fit yet lets none pass it."""
        engine = self.engine
        while self._waiting:
            request = self._waiting[0]
            session = request.session
            missing = max(request.pages - len(session.pages), 0)
            rows = [session.row] if session.row is not None else range(engine.batch)
            keys = request.shareable(engine.page_tokens)
            shared = [self.pages.find(group, keys) for group in range(engine.groups)]
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
            if request.pinned:
                self._pinned.add(row)
            self.pages.share(group, shared[group])
            session.pages += shared[group] + self.pages.take(group, missing - len(shared[group]))
            request.done = max(request.in_session(), len(shared[group]) * engine.page_tokens)
            self._admit_on_device(row, request)

    def _admit_on_device(self, row: int, request: Request) -> None:
        """Puts a request's pages and settings into its row on the devices."""
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

    def _share(self, row: int, request: Request) -> None:
        """Takes over what became known while the request waited for its turn to be read: full pages by reference, and
        a copy of the page after them, where the row of a prompt that continues alike holds it."""
        engine, group, pages = self.engine, self._group(row), request.session.pages
        before = request.done
        shared = self.pages.find(group, request.shareable(engine.page_tokens))
        if len(shared) * engine.page_tokens > request.done:
            self.pages.share(group, shared)
            self.pages.give_back(group, pages[: len(shared)])
            pages[: len(shared)] = shared
            request.done = len(shared) * engine.page_tokens
        neighbours = self._rows[group * engine.group_rows : (group + 1) * engine.group_rows]
        longest, source = max(
            ((request.shared_with(other, engine.page_tokens), other) for other in neighbours if other),
            key=lambda pair: pair[0],
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

    def _group(self, row: int) -> int:
        return row // self.engine.group_rows

    def _prefill(self) -> None:
        """One chunk of the oldest unfinished prompt of each group."""
        readings = self._choose_prompts()
        if not readings:
            return
        batch = self._make_batch(readings)
        logits = self._append(batch)
        self._finish_prompts(batch, logits)

    def _choose_prompts(self) -> list[Reading]:
        engine, chosen = self.engine, []
        for group in range(engine.groups):
            rows = range(group * engine.group_rows, (group + 1) * engine.group_rows)
            unread = [(r.number, row, r) for row in rows if (r := self._rows[row]) and not r.is_read]
            if unread:
                _, row, request = min(unread)
                if not request.begun:
                    self._share(row, request)
                    request.begun = True
                chosen.append(Reading(group, row, request))
        return chosen

    def _make_batch(self, readings: list[Reading]) -> PrefillBatch:
        engine = self.engine
        # A long chunk cannot be scored.
        scored = any(reading.request.config.prompt_logprobs for reading in readings)
        chunks, running = Chunks() if scored else engine.chunks, bool(self._running())
        size = max(chunks.next(reading.request.left, beside_others=running) for reading in readings)
        return PrefillBatch(readings, groups=engine.groups, group_rows=engine.group_rows, size=size)

    def _append(self, batch: PrefillBatch) -> jax.Array:
        """Runs the batch; returns the logits after each prompt's chunk."""
        engine, top = self.engine, batch.top
        inputs = [engine.put(batch.index), engine.put(batch.tokens), engine.put(batch.count)]
        if top is None:
            program = engine.append_program(engine.groups, batch.size, fresh=batch.fresh)
            self.state, logits = program(engine.model, self.state, *inputs)
            batch.mark_read()
        else:
            program = engine.append_program(engine.groups, batch.size, top=top)
            self.state, logits, scores = program(engine.model, self.state, *inputs, engine.put(batch.targets))
            batch.mark_read()
            batch.keep_scores([np.asarray(x) for x in scores])
        return logits

    def _finish_prompts(self, batch: PrefillBatch, logits: jax.Array) -> None:
        """Full pages become known, and prompts that were read to their ends draw their first tokens."""
        engine, done = self.engine, np.zeros(self.engine.groups, bool)
        for reading in batch.readings:
            request = reading.request
            full = min(request.done // engine.page_tokens, len(request.keys))
            self.pages.remember(reading.group, request.keys[:full], request.session.pages[:full])
            done[reading.group] = request.is_read and request.budget > 0
            if request.is_read and request.budget == 0:
                self._events.append(Event(request.number, None, "length"))
                self._leave(reading.row)
        if done.any():
            asked = [reading.request.config for reading in batch.readings if done[reading.group]]
            start = engine.start_program(*least_program(asked))
            self.state, drawn = start(engine.model, self.state, logits, engine.put(batch.index), engine.put(done))
            self._report(drawn, batch.index)

    def _running(self) -> list[Request]:
        """The requests whose prompts are read."""
        return [request for request in self._rows if request and request.is_read]

    def _decode(self) -> None:
        running = self._running()
        if not running:
            return
        # Somebody waits: for this token, or for the next chunk of a prompt.
        patient = not (self._waiting or any(request and not request.is_read for request in self._rows))
        steps = MAX_STEPS if patient and not any(request.streamed for request in running) else 1
        program = self.engine.decode_program(*least_program([request.config for request in running]))
        if steps not in self._counts:
            self._counts[steps] = self.engine.put(np.int32(steps))
        self.state, drawn = program(self.engine.model, self.state, self._counts[steps])
        self._report(drawn, np.arange(self.engine.batch))

    def _report(self, drawn: Drawn, rows: np.ndarray) -> None:
        """Events of the tokens drawn, `[steps some]`, in `rows`; rows that ended are free."""
        tokens = np.asarray(drawn.tokens)
        logprobs = None if drawn.logprobs is None else [np.asarray(x) for x in drawn.logprobs]
        for step, column in np.argwhere(tokens >= 0):
            row = int(rows[column])
            request = self._rows[row]
            assert request is not None
            logprob = None
            if logprobs is not None and request.config.logprobs is not None:
                own, values, ids = (x[step, column] for x in logprobs)
                logprob = TokenLogprob.of(own, values, ids, request.config.logprobs)
            event = request.draw(int(tokens[step, column]), logprob)
            self._events.append(event)
            if event.finish_reason is not None:
                self._leave(row)
