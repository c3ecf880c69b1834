"""A write that fails, reported once: without what orbax and Python log in addition to the error."""

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Within it a write that fails is reported by the error that it raises, and by nothing else.

    orbax logs that error too, and asyncio those of all writes that fail with it, from threads of their own while a
    checkpoint is saved. So a command is inside of it from start to end. It changes loggers and warning filters of the
    whole process, and restores them; for the same reason, no library function enters it.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
