"""How a command ends: with one sentence and an exit code, and with signals as they were."""

import atexit
import errno
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeVar

from nemo_like.errors import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    RunError,
    StoppedError,
    UserError,
    WaitTimeoutError,
    exit_code,
)
from nemo_like.run.stop_request import SIGNALS, StopRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A file system that has no room, may not be written or is broken.
_DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

_HANDLED = (signal.SIGINT, signal.SIGHUP, *SIGNALS)


def end_on_error(action: Callable[[], T]) -> T:
    """Carry out ``action``; failures with an explanation end the process without a traceback."""
    with handlers_restored():
        for number in (signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and not isinstance(handler, StopRequest):  # nohup; run
                signal.signal(number, _raise_interrupt)
        try:
            return action()
        except SystemExit:
            raise
        except BaseException as error:
            if (told := told_to_end(error)) is not None:
                end_early(told)
            if (sentence := _sentence(error)) is None:
                raise
            logger.debug("The run ended here:", exc_info=True)
            sys.stderr.write(f"Error: {sentence}\n")
            sys.exit(exit_code(error))


def _sentence(error: BaseException) -> str | None:
    """The sentence for an error that needs no traceback."""
    if isinstance(error, (UserError, RunError, WaitTimeoutError)):
        return str(error)
    if isinstance(error, OSError) and error.errno in _DISK_REFUSES:
        return (
            f"{error.filename or 'a file'} cannot be written: {error.strerror}; make room "
            "or repair the file system, then continue with run.resume=true."
        )
    return None


def told_to_end(error: BaseException) -> BaseException | None:
    """The interrupt that ``error`` is, or wraps.

    Calls in C wrap what a signal's handler raises in them, and what is cut short may fail itself.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, (StoppedError, KeyboardInterrupt)):
        seen = seen.__cause__ or seen.__context__
    return seen


def end_early(told: BaseException) -> NoReturn:
    """End the process as it was told to; signals that follow change nothing."""
    _ignore_signals()
    interrupted = "Interrupted; workers are ended, finished checkpoints are kept."
    sys.stderr.write(f"{told if isinstance(told, StoppedError) else interrupted}\n")
    sys.exit(exit_code(told))


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore signal handlers afterwards, since the process may go on, or exit.

    Its exit ignores signals: the next one would end the end of Ray half-way, or change the code.
    So does all that follows a signal which ended it, except at a prompt.
    """
    before = {number: signal.getsignal(number) for number in _HANDLED}
    ends = False
    try:
        yield
    except SystemExit as end:
        ends = end.code in (EXIT_INTERRUPTED, EXIT_STOPPED) and not hasattr(sys, "ps1")
        raise
    finally:
        for number, handler in before.items():
            if handler is not None and not ends:  # None is none of Python's
                signal.signal(number, handler)
        atexit.unregister(_ignore_signals)
        atexit.register(_ignore_signals)  # the last one is called first


def _ignore_signals() -> None:
    for number in _HANDLED:
        signal.signal(number, signal.SIG_IGN)


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    """A closed terminal sends SIGHUP, and where there is no run SIGTERM is like Ctrl-C, too."""
    raise KeyboardInterrupt
