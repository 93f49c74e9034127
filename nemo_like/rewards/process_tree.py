"""Ends a reward process with all that its reward function has started."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36


def leave_sigterm_to_driver() -> None:
    """SIGTERM to all processes of a run must not cost rows; what a function starts obeys it still.

    A handler, as children would inherit that a signal is ignored, or blocked as it comes here.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own one ends, so that ``kill_tree`` finds daemons.

    Linux only; elsewhere they are init's, and run on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(before: set[int]) -> set[int]:
    """Clear away what has ended and was adopted; the rest of what has ended is returned.

    One's own children are for who started them to wait for, until the next call: what had ended
    ``before`` goes too. A daemon's session, its parent's that is gone, tells it from a child at
    once; a child's is its own or this process's.
    """
    left: set[int] = set()
    for pid in _children():
        with contextlib.suppress(OSError):  # gone meanwhile
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            if pid in before or os.getsid(pid) not in (pid, os.getsid(0)):
                os.waitpid(pid, os.WNOHANG)
            else:
                left.add(pid)
    return left


def _children() -> list[int]:
    try:
        found = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:  # Linux only
        return []
    return [int(pid) for pid in found.split()]


def kill_tree(pid: int) -> None:
    """Kill the leader of a process group, the group, and descendants that left it.

    A function that runs code often gives it a session of its own, to end it when it is late, and
    may itself be ended before that. What belongs to another user, as after sudo, is left alone.
    """
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(pid).children(recursive=True)
    for process in started:
        with contextlib.suppress(psutil.Error):
            process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
