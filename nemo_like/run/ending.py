"""How a command ends: with one sentence and an exit code, and with signals as they were."""

import atexit
import errno
import logging
import os
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

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A file system that has no room, may not be written or is broken.
_DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

_NOTHING_LOST = (
    "before the first step, so nothing is lost; start it again (training with a run.dir: with "
    "run.resume=true)"
)
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM)
"""What a request handles; the last one ends the grace."""
_HANDLED = (signal.SIGINT, signal.SIGHUP, *SIGNALS)


def end_on_error(action: Callable[[], T], *, in_run: bool = False) -> T:
    """End the process with one sentence if ``action`` fails; ``in_run``: it can be continued."""
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
                end_early(told, in_run=in_run)
            if (sentence := _sentence(error, in_run=in_run)) is None:
                raise
            logger.debug("The run ended here:", exc_info=True)
            sys.stderr.write(f"Error: {sentence}\n")
            sys.exit(exit_code(error))


def _sentence(error: BaseException, *, in_run: bool) -> str | None:
    if isinstance(error, (UserError, RunError, WaitTimeoutError)):
        return str(error)
    if isinstance(error, OSError) and error.errno in _DISK_REFUSES:
        remedy = "make room, repair the file system, or choose another folder."
        if in_run:
            remedy = "make room or repair the file system, then continue with run.resume=true."
        return f"{error.filename or 'a file'} cannot be written: {error.strerror}; {remedy}"
    return None


def note_error(error: BaseException, again: str) -> tuple[str, int]:
    """Log in ``run.log`` why a run ended; ``end_on_error`` tells the console.

    ``again``: the command that continues the run. Returns the reason and the exit code.
    """
    told = told_to_end(error)
    sentence = _sentence(error, in_run=True) if told is None else str(told) or "Interrupted."
    logger.log(
        logging.ERROR if told is None else logging.INFO,
        "The run ended here: %s\nTo continue from its latest checkpoint, if it has one: %s",
        sentence or repr(error),
        again,
        exc_info=None if sentence else error,
        extra={"file_only": True},
    )
    return sentence or repr(error), exit_code(told or error)


def told_to_end(error: BaseException) -> BaseException | None:
    """The interrupt that ``error`` is or wraps, as calls in C do with what a handler raises."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, (StoppedError, KeyboardInterrupt)):
        seen = seen.__cause__ or seen.__context__
    return seen


def end_early(told: BaseException, *, in_run: bool = False) -> NoReturn:
    """End the process as it was told to; signals that follow change nothing."""
    _ignore_signals()
    kept = "; workers are ended, finished checkpoints are kept" if in_run else ""
    sys.stderr.write(f"{told if isinstance(told, StoppedError) else f'Interrupted{kept}.'}\n")
    sys.exit(exit_code(told))


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore signal handlers afterwards, since the process may go on, or exit.

    Its exit ignores signals: the next one would end the end of Ray half-way, or change the code. So
    does all that follows a signal which ended it, except at a prompt.
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


class LeftError(BaseException):
    """SIGTERM interrupted a phase that can be repeated later."""


class StopRequest:
    """The handler of SIGUSR1, SIGTERM and a command's Ctrl-C: finish the step, save it and end.

    SIGTERM has a limit, ``run.stop_grace_s``: whoever sends it kills what is left soon after. While
    a run starts, SIGTERM and Ctrl-C end it at once; a second one always does.
    """

    def __init__(self) -> None:
        self.came = False
        self.grace_s = 0.0
        """Seconds from SIGTERM until what is in progress is abandoned."""
        self._pid = os.getpid()
        self._takes_steps = False
        self._terminated = False
        self._clock_runs = False
        self._on_term = self.obey_before_first_step

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork has no run to save
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        if signum == signal.SIGALRM:
            raise StoppedError(
                "Stopped on request; what was in progress took longer than run.stop_grace_s="
                f"{self.grace_s:g} and is abandoned, so go on after the latest checkpoint with "
                "run.resume=true."
            )
        if signum == signal.SIGTERM and self._terminated:
            raise KeyboardInterrupt
        if signum == signal.SIGINT and (self.came or not self._takes_steps):
            raise KeyboardInterrupt
        self.came = True
        if signum == signal.SIGTERM:
            self._terminated = True
            self._on_term()
        else:
            again = "; Ctrl-C again ends the run at once" if signum == signal.SIGINT else ""
            logger.info("Stopping after the step in progress, which is saved%s.", again)

    def obey(self, where: str) -> None:
        """Raise StoppedError if it came; ``where`` it ends, and how to go on."""
        if self.came:
            self._stop_clock()
            raise StoppedError(f"Stopped on request {where}.")

    def start(self, grace_s: float) -> None:
        """A run begins: until its first step nothing is lost by ending at once."""
        self.grace_s = grace_s
        self._takes_steps, self._on_term = False, self.obey_before_first_step

    def obey_before_first_step(self) -> None:
        self.obey(_NOTHING_LOST)

    def within_steps(self) -> None:
        """From now on SIGTERM grants the step in progress time to finish."""
        self._takes_steps, self._on_term = True, self._start_clock

    def without_checkpoints(self, where: Callable[[], str]) -> None:
        """From now on SIGTERM ends the run at once: there is nothing to save."""
        self._on_term = lambda: self.obey(where())

    def when_done(self) -> None:
        """From now on SIGTERM changes nothing: the run is about to end anyway."""
        self._stop_clock()
        self._takes_steps, self._on_term = False, lambda: None

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Inside, SIGTERM raises LeftError; the grace period is for what follows."""
        before, self._on_term = self._on_term, self._leave
        try:
            yield
        except SystemError as error:  # see ``told_to_end``
            raise error.__cause__ if isinstance(error.__cause__, LeftError) else error from None
        finally:
            self._on_term = before

    def _leave(self) -> None:
        self._start_clock()
        raise LeftError

    def _start_clock(self) -> None:
        logger.info(
            "Stopping after the step in progress, which has %g s (run.stop_grace_s) to finish.",
            self.grace_s,
        )
        self._clock_runs = True
        signal.setitimer(signal.ITIMER_REAL, max(self.grace_s, 1e-3))  # 0 would be no limit

    def _stop_clock(self) -> None:
        if self._clock_runs:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._clock_runs = False


def listen() -> StopRequest:
    handler = signal.getsignal(signal.SIGUSR1)
    if isinstance(handler, StopRequest):
        return handler
    request = StopRequest()
    for number in SIGNALS:
        signal.signal(number, request)
    return request


def heed_ctrl_c() -> None:
    """For commands: in a notebook, an interrupt is the exception that everyone expects."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, listen())
