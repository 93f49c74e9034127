"""Descendants of a reward process: adopts orphans, buries what has ended, kills the rest."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of orphans below, so that ``kill_tree`` finds daemons (on Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(before: set[int]) -> set[int]:
    """Clear away what has ended and was adopted; the rest of what has ended is returned.

    One's own children are for who started them to wait for, until the next call: what had ended
    ``before`` goes too. A daemon's session, its parent's that is gone, tells it from a child at
    once; a child's is its own or this process's.
    """
    left: set[int] = set()
    try:  # much cheaper than what follows
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return left
    except ChildProcessError:  # there is none
        return left
    children = ""
    with contextlib.suppress(OSError):  # Linux only
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    for pid in map(int, children.split()):
        with contextlib.suppress(OSError):  # gone meanwhile
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            if pid in before or os.getsid(pid) not in (pid, os.getsid(0)):
                os.waitpid(pid, os.WNOHANG)
            else:
                left.add(pid)
    return left


def kill_tree(pid: int) -> None:
    """Kill the leader of a process group, the group, and descendants that left it.

    A function that runs code often gives it a session of its own, to end it when it is late, and
    may itself be ended before that. What belongs to another user, as after sudo, is left alone.
    """
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
