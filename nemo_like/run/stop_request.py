"""SIGUSR1 and SIGTERM: finish the step in progress, save it and end, whenever they arrive.

SIGTERM has a limit, ``run.stop_grace_s``, because whoever sends it kills what is left soon after.
Where nothing would be lost, as while a run starts, it ends the run at once; a second one always
does.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from nemo_like.errors import StoppedError

logger = logging.getLogger(__name__)

_NOTHING_LOST = (
    "before the first step, so nothing is lost; start it again (training with a run.dir: with "
    "run.resume=true)"
)
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM)
"""What a request handles; the last one ends the grace."""


class LeftError(BaseException):
    """SIGTERM interrupted a phase that can be repeated later."""


class StopRequest:
    """The handler of both signals. What SIGTERM does depends on the run's phase."""

    def __init__(self) -> None:
        self.came = False
        self.grace_s = 0.0
        """Seconds from SIGTERM until what is in progress is abandoned."""
        self._pid = os.getpid()
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
        self.came = True
        if signum == signal.SIGTERM:
            self._terminated = True
            self._on_term()
        else:
            logger.info("Stopping after the step in progress, which is saved.")

    def obey(self, where: str) -> None:
        """Raise StoppedError if it came; ``where`` it ends, and how to go on."""
        if self.came:
            self._stop_clock()
            raise StoppedError(f"Stopped on request {where}.")

    def start(self, grace_s: float) -> None:
        """A run begins: until its first step nothing is lost by ending at once."""
        self.grace_s = grace_s
        self._on_term = self.obey_before_first_step

    def obey_before_first_step(self) -> None:
        """``obey``, of a run that has made no step."""
        self.obey(_NOTHING_LOST)

    def within_steps(self) -> None:
        """From now on SIGTERM grants the step in progress time to finish."""
        self._on_term = self._start_clock

    def without_checkpoints(self, where: Callable[[], str]) -> None:
        """From now on SIGTERM ends the run at once: there is nothing to save."""
        self._on_term = lambda: self.obey(where())

    def when_done(self) -> None:
        """From now on signals change nothing: the run is about to end anyway."""
        self._stop_clock()
        self._on_term = lambda: None

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Inside, SIGTERM raises LeftError; the grace period is for what follows."""
        before, self._on_term = self._on_term, self._leave
        try:
            yield
        except SystemError as error:  # see ``cli.end_on_error``
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
    """The handler that is in place, or a new one; in the main thread only."""
    handler = signal.getsignal(signal.SIGUSR1)
    if isinstance(handler, StopRequest):
        return handler
    request = StopRequest()
    for number in SIGNALS:
        signal.signal(number, request)
    return request
