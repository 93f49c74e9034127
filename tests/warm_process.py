"""A process that has imported what takes seconds, so that others like it start in no time.

This one is asked by its parent, by a pipe; ``forked_workers`` has one that Ray asks, by a socket.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from nemo_like.imports import without_collector


class WarmProcess:
    """``start("module:function", *args)`` runs the function in a fork of it, as a process of its
    own; ``wait`` gives the exit code. It computes nothing itself, so that a fork finds no thread.
    """

    def __init__(self, *modules: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, modules))
        self._process.start()
        theirs.close()

    def start(self, target: str, *args: Any) -> int:
        """The new process's id."""
        return self._ask("start", target, args)

    def wait(self, pid: int, timeout_s: float) -> int:
        """Its exit code, negative after a signal; it is killed when its time is over."""
        return self._ask("wait", pid, timeout_s)

    def kill(self, pid: int) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.wait(pid, 10.0)

    def close(self) -> None:
        """End this process; those that it started go on."""
        self._pipe.close()
        self._process.join()

    def _ask(self, *request: Any) -> int:
        self._pipe.send(request)
        return self._pipe.recv()


def warm_up(modules: Iterable[str]) -> None:
    """What this process does before it is forked."""
    with without_collector():
        for module in modules:
            importlib.import_module(module)
    gc.freeze()  # or every fork's first collection would copy all that it shares


def _serve(pipe: Connection, modules: tuple[str, ...]) -> None:
    warm_up(modules)
    while True:
        try:
            what, *request = pipe.recv()
        except EOFError:
            os._exit(0)
        if what == "wait":
            pipe.send(_wait(*request))
            continue
        target, args = request
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            pipe.close()
            end_with(_call, target, args)
        pipe.send(pid)
        del request, args  # closes here the pipes that it was given


def _call(target: str, args: tuple[Any, ...]) -> None:
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(*args)


def end_with(function: Callable[..., None], *args: Any) -> NoReturn:
    """Call it as the last that this process, a fork, does."""
    code = 1
    try:
        function(*args)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the boundary of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # taking apart all that was imported would take a second


def _wait(pid: int, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)
