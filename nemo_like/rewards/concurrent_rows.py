"""Many rows at once by an ``async def``, on one event loop that lives as long as the process.

So a session or a semaphore that the user's module makes for one row still works for the next.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from nemo_like.rewards.frames import MOST_BYTES, Frames, read_rows, verdict_frame
from nemo_like.rewards.process_tree import bury_orphans
from nemo_like.rewards.protocol import GradingRow, Verdict, failed
from nemo_like.rewards.resolve import RewardFunction
from nemo_like.rewards.verdicts import grade_async

CANCEL_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds."""

    row_s: float
    """A row is cancelled after them."""
    self_destruct_s: float
    """The process ends if its loop is blocked for so much longer."""


def serve_concurrently(pool: socket.socket, function: RewardFunction, limits: Limits) -> None:
    """Grade until the pool closes; does not return."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    pool.setblocking(False)
    serving = loop.create_task(_Server(pool, function, limits).run())
    while not serving.done():
        # A SystemExit in a task of the user's comes out here too, not only where it is awaited.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(serving)
    os._exit(0)  # nobody waits for rows that still run, or that do not let themselves be cancelled


class _Server:
    def __init__(self, pool: socket.socket, function: RewardFunction, limits: Limits) -> None:
        self._pool = pool
        self._function = function
        self._limits = limits
        self._answers: set[asyncio.Task[None]] = set()
        self._num_open = 0
        """Rows that are still graded."""
        self._writing = asyncio.Lock()
        self._ended = set[int]()

    async def run(self) -> None:
        async for row in self._incoming():
            self._num_open += 1
            self._watch_loop()
            task = asyncio.create_task(self._answer(row))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    async def _incoming(self) -> AsyncIterator[GradingRow]:
        loop, frames = asyncio.get_running_loop(), Frames(MOST_BYTES)
        while data := await loop.sock_recv(self._pool, 1 << 16):
            for payload in frames.feed(data):
                for row in read_rows(payload):
                    yield row

    async def _answer(self, row: GradingRow) -> None:
        verdict = await self._grade(row)
        self._num_open -= 1
        if not self._num_open:  # others may still wait for children, or for an alarm
            self._ended = bury_orphans(self._ended)
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._watch_loop()
        async with self._writing:
            message = verdict_frame(row.id, verdict)
            await asyncio.get_running_loop().sock_sendall(self._pool, message)

    async def _grade(self, row: GradingRow) -> Verdict:
        task = asyncio.create_task(grade_async(self._function, row))
        done, _ = await asyncio.wait({task}, timeout=self._limits.row_s)
        if done:
            return task.result()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        stuck = None if done else "a row that was late does not let itself be cancelled"
        return failed(f"took longer than {self._limits.row_s:g} s", spent=stuck)

    def _watch_loop(self) -> None:
        """Called whenever the loop shows that it is not blocked."""
        if self._num_open:
            limit_s = self._limits.row_s + CANCEL_GRACE_S + self._limits.self_destruct_s
            faulthandler.dump_traceback_later(limit_s, exit=True)
        else:
            faulthandler.cancel_dump_traceback_later()
