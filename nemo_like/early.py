"""Imported first by a command: Ctrl-C ends it without a traceback even while it still imports.

Python's garbage collector is off until then; see ``imports``.
"""

import gc
import os
import sys
from types import TracebackType

from nemo_like.errors import EXIT_INTERRUPTED

_before = sys.excepthook


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt) and not hasattr(sys, "ps1"):  # no prompt to go back to
        os._exit(EXIT_INTERRUPTED)
    _before(kind, error, trace)


def is_over() -> None:
    """From now on the command handles its own end."""
    sys.excepthook = _before
    if _collects:
        gc.enable()


_collects = gc.isenabled()
gc.disable()
sys.excepthook = _end
