"""A write that fails, reported once: without what orbax, asyncio and tensorstore print in addition to the error."""

import contextlib
import logging
import sys
import warnings


def quiet_orbax() -> contextlib.ExitStack:
    """From now on a write that fails is reported by the error that it raises, and by nothing else.

    The stack that it returns undoes that: `with quiet_orbax(): ...`, or never, where the process ends with the command.
    orbax logs that error too, and does not wait for the other writes in flight, whose errors asyncio logs and whose
    callbacks find the event loop closed, from threads of their own and as late as the end of the process. All that it
    changes (loggers, warning filters, the hook for errors that cannot be raised) belongs to the whole process, so no
    library function calls it.
    """
    undo = contextlib.ExitStack()
    undo.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    for logger in (logging.getLogger(name) for name in ("absl", "asyncio")):
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
    hook = sys.unraisablehook

    def without_closed_loops(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(unraisable)

    undo.callback(setattr, sys, "unraisablehook", hook)
    sys.unraisablehook = without_closed_loops
    return undo
