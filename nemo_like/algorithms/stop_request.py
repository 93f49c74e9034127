"""SIGUSR1: save the step in progress and end; remembered whenever it comes."""

import logging
import signal
from types import FrameType

from nemo_like.errors import StoppedError

logger = logging.getLogger(__name__)


class StopRequest:
    """A handler of SIGUSR1, which ends a process that has none."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.came = True
        logger.info("Told to stop: the step in progress is the last one.")

    def obey(self, where: str) -> None:
        """Raise StoppedError if it came; ``where`` it ends, and how to go on."""
        if self.came:
            raise StoppedError(f"Stopped as told {where}.")


def listen() -> StopRequest:
    """The handler that is in place, or a new one; in the main thread only."""
    handler = signal.getsignal(signal.SIGUSR1)
    if isinstance(handler, StopRequest):
        return handler
    request = StopRequest()
    signal.signal(signal.SIGUSR1, request)
    return request
