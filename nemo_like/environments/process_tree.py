"""Ends a grading process with all that its reward function has started."""

import contextlib
import os
import signal

import psutil


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
