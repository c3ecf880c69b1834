"""A loaded model with a running batch: texts are read once, kept on disk, and answered."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from treering.configs.sampling import RequestConfig
from treering.infer.engine import Engine
from treering.infer.load import Loaded
from treering.infer.request import Session
from treering.infer.saved_cache.folder import load_cache, save_cache
from treering.infer.saved_cache.record import SavedCache
from treering.infer.scheduler import Scheduler
from treering.infer.text.answer import Answer
from treering.infer.text.progress import count, run_with_progress, say


class TextGenerator:
    """What the commands that generate have in common: an engine, its scheduler, and the tokenizer."""

    def __init__(self, loaded: Loaded, engine: Engine):
        self.loaded, self.engine, self.tokenizer = loaded, engine, loaded.tokenizer
        self.scheduler = Scheduler(engine)

    def read(self, prompt: Sequence[int], session: Session | None = None) -> Session:
        """A session, or this one, whose row holds the keys and values of a prompt."""
        session = session or Session()
        number = self.scheduler.submit(prompt, RequestConfig(max_new_tokens=0), session=session)
        for _ in run_with_progress(self.scheduler, number):
            pass
        jax.block_until_ready(self.scheduler.state)
        return session

    def save(self, folder: str | Path, session: Session) -> None:
        """`save_cache`; says what it wrote and how long it took."""
        assert self.loaded.identity is not None, "loaded without a fingerprint"
        started = time.perf_counter()
        size = save_cache(folder, self.scheduler, session, self.loaded.identity)
        took = time.perf_counter() - started
        say(f"{count(len(session.tokens), 'token')} saved in {folder}: {size:,} bytes in {took:.1f} s")

    def restore(self, saved: SavedCache) -> Session:
        """`load_cache`; says what it read and how long it took."""
        started = time.perf_counter()
        session, size = load_cache(saved, self.scheduler)
        took = time.perf_counter() - started
        say(f"{count(len(saved.tokens), 'token')} loaded from {saved.folder}: {size:,} bytes in {took:.1f} s")
        return session

    def answer(
        self,
        prompt: Sequence[int],
        answers: Sequence[Answer],
        *,
        streamed: bool = False,
        session: Session | None = None,
    ) -> Iterator[str]:
        """Answers a prompt, in a session if one is given; the pieces of text as they come.

        `streamed` says that somebody waits for them. Each of several answers draws by its own config.
        """
        asked = {"end_ids": self.tokenizer.end_ids, "streamed": streamed, "session": session}
        active = {self.scheduler.submit(prompt, answer.config, **asked): answer for answer in answers}
        for event in run_with_progress(self.scheduler, min(active)):
            yield active[event.request].follow(event, self.scheduler)
