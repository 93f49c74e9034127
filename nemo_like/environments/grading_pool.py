"""Grades rows in processes of their own, so that a reward function can fail in any way it likes.

Every process has its own socket and is driven by one thread, with a hard limit per row: a process
that is late or dead is replaced, and only the row it held is lost. (A pool whose workers share a
queue, such as pebble's or the standard library's, is broken for good when a worker dies between
two rows; and ``multiprocessing`` would import the main module, here Ray's, in every process.)
"""

import asyncio
import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nemo_like.environments.process_tree import kill_tree
from nemo_like.environments.protocol import Grade, Verdict
from nemo_like.errors import UserError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
MEMORY_SHARE = 0.5
EXIT_GRACE_S = 1.0


class GradingPool:
    """An ``Environment`` of ``num_processes`` processes that call one reward function.

    ``reward`` is read as ``rewards.resolve_reward`` says, in the grading processes only; UserError
    if it cannot be used. A row that takes longer than ``timeout_s`` to grade (waiting for a free
    process does not count) or more than ``memory_limit_bytes`` fails; None: half of the machine's
    memory, shared by the processes.

    Another ``module`` than that for functions makes of ``reward`` what it likes. A free process
    gets up to ``rows_at_once`` rows that wait, which share their time limits, and their fate.
    """

    def __init__(
        self,
        reward: str,
        *,
        timeout_s: float = 10.0,
        num_processes: int = 1,
        memory_limit_bytes: int | None = None,
        module: str = "nemo_like.environments.grading_process",
        rows_at_once: int = 1,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        limit = memory_limit_bytes or int(machine_memory_bytes() * MEMORY_SHARE / num_processes)
        self._idle: queue.SimpleQueue[_GradingProcess] = queue.SimpleQueue()
        self._processes = [
            _GradingProcess(module, reward, timeout_s, limit, start_timeout_s)
            for _ in range(num_processes)
        ]
        self._waiting: queue.SimpleQueue[_WaitingRow] = queue.SimpleQueue()
        self._rows_at_once = rows_at_once
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="grading")
        try:
            for process in self._processes:
                process.wait_until_ready()
                self._idle.put(process)
        except BaseException:
            self.shutdown()
            raise

    async def grade(self, prompt: str, completion: str, fields: Mapping[str, Any]) -> Grade:
        """Grade one completion; whatever goes wrong is in ``Grade.error``."""
        try:
            message = pickle.dumps((prompt, completion, dict(fields)))
        except Exception as error:  # one row's grading: fields can hold anything
            return Grade(reward=None, error=f"the row's fields cannot be pickled: {error}")
        row = _WaitingRow(message)
        self._waiting.put(row)
        self._threads.submit(self._grade_waiting)
        return await asyncio.wrap_future(row.grade)

    def shutdown(self) -> None:
        """Kill the processes, and what they started; rows that wait come back as failed."""
        self._threads.shutdown(wait=False)
        for process in self._processes:
            process.close()

    def _grade_waiting(self) -> None:
        """Called once a row; finds none where another call took its row along."""
        rows: list[_WaitingRow] = []
        with contextlib.suppress(queue.Empty):
            while len(rows) < self._rows_at_once:
                row = self._waiting.get_nowait()
                if row.grade.set_running_or_notify_cancel():
                    rows.append(row)
        if not rows:
            return
        process = self._idle.get()  # never waits: there are as many threads as processes
        try:
            grades = process.grade([row.message for row in rows])
        except BaseException as error:  # whoever waits for a row is to see it
            for row in rows:
                row.grade.set_exception(error)
            raise
        finally:
            self._idle.put(process)
        for row, grade in zip(rows, grades, strict=True):
            row.grade.set_result(grade)


@dataclass(frozen=True)
class _WaitingRow:
    message: bytes
    grade: Future[Grade] = field(default_factory=Future)


class _GradingProcess:
    """One process and its socket; replaced by a new process whenever a row spoils it."""

    def __init__(
        self,
        module: str,
        reward: str,
        timeout_s: float,
        memory_limit_bytes: int,
        start_timeout_s: float,
    ) -> None:
        self._module = module
        self._arguments = [reward, str(timeout_s), str(memory_limit_bytes)]
        self._start_timeout_s = start_timeout_s
        self._timeout_s = timeout_s
        self._closed = False
        self._lock = threading.Lock()  # shutdown comes from another thread than grades
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P and PYTHONPATH: the process finds exactly what this one finds, in the same order.
            path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # leads a group: see kill_tree
            )
        self._connection = Connection(ours.detach())
        self._ready_by = time.monotonic() + self._start_timeout_s
        self._is_ready = False
        self._is_killed = False

    def wait_until_ready(self) -> None:
        """Return when the reward function is loaded; UserError if it never will be."""
        if self._is_ready:
            return
        if not self._connection.poll(max(0.0, self._ready_by - time.monotonic())):
            reward = self._arguments[0]
            raise UserError(
                f"environment.reward={reward} was not loaded within {self._start_timeout_s:.0f} s."
            )
        try:
            complaint = self._connection.recv()
        except (EOFError, OSError):
            how = self._how_it_ended()
            complaint = f"environment.reward={self._arguments[0]}: the process that loads it {how}."
        if complaint is not None:
            raise UserError(complaint)
        self._is_ready = True

    def grade(self, rows: Sequence[bytes]) -> list[Grade]:
        """Grade pickled rows within their time limits, and be ready for the next ones."""
        outcome = self._verdicts(rows)
        if isinstance(outcome, str):
            return [Grade(reward=None, error=outcome) for _ in rows]
        return [
            Grade(reward=reward, metrics=metrics, error=error, answer=answer)
            for reward, metrics, error, answer in outcome
        ]

    def _verdicts(self, rows: Sequence[bytes]) -> Sequence[Verdict] | str:
        """The process's own words, or why there are none."""
        if not self._closed and self._process.poll() is not None:
            self._replace()  # it died between two rows, so this row has no part in it
        try:
            self.wait_until_ready()
            self._connection.send(list(rows))
            if not self._connection.poll(self._timeout_s * len(rows)):
                self._replace()
                each = " each" if len(rows) > 1 else ""
                return f"took longer than {self._timeout_s:g} s{each}"
            return self._connection.recv()
        except (EOFError, OSError):
            how = "was shut down" if self._closed else self._how_it_ended()
            self._replace()
            return f"the grading process {how}"
        except UserError as error:  # the replacement could not import what the first one could
            self._replace()
            return str(error)

    def close(self) -> None:
        """Kill the process and its group for good; a thread that waits for it sees it end."""
        with self._lock:
            self._closed = True
            self._kill()

    def _replace(self) -> None:
        with self._lock:
            self._kill()
            self._connection.close()
            if not self._closed:
                logger.warning("Starting another grading process in place of the last.")
                self._start()

    def _kill(self) -> None:
        if self._is_killed:
            return  # its number may belong to another process by now
        kill_tree(self._process.pid)
        self._process.wait()
        self._is_killed = True

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code >= 0:
            return f"ended with exit code {code}"
        cause = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{cause}"


def machine_memory_bytes() -> int:
    """Memory of this machine, or of the container if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or the word "max"
            total = min(total, int(Path(path).read_text()))
    return total
