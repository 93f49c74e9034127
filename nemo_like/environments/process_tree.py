"""Ends a grading process with all that its reward function has started."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own one ends, so that ``kill_tree`` finds daemons.

    Linux only; elsewhere they are init's, and run on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans() -> None:
    """Clear away ended daemons that were adopted; children of one's own are for who started them.

    A daemon's session is its parent's that is gone, a child's is its own or this process's.
    """
    own = os.getpid()
    with contextlib.suppress(OSError):  # Linux only
        for pid in map(int, Path(f"/proc/self/task/{own}/children").read_text().split()):
            if os.getsid(pid) not in (pid, os.getsid(0)):
                os.waitpid(pid, os.WNOHANG)


def kill_tree(pid: int) -> None:
    """Kill the leader of a process group, the group, and descendants that left it.

    A function that runs code often gives it a session of its own, to end it when it is late, and
    may itself be ended before that.
    """
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(pid).children(recursive=True)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
