"""Scoring many rows at once in a reward process, by a function that is an ``async def``."""

import asyncio
import contextlib
import faulthandler
import itertools
import os
import signal
import socket

from nemo_like.rewards.frames import MOST_BYTES, Frames, read_rows, result_frame
from nemo_like.rewards.function import RewardFunction, score_async
from nemo_like.rewards.process import SELF_DESTRUCT_GRACE_S, Limits
from nemo_like.rewards.process_tree import bury_orphans
from nemo_like.rewards.protocol import RewardResult, RewardRow, failed

_CANCEL_GRACE_S = 1.0


def serve_concurrently(pool: socket.socket, function: RewardFunction, limits: Limits) -> None:
    """Score many rows at once until the pool closes; does not return.

    One event loop lives as long as the process, so a session or a semaphore that the user's module
    makes for one row still works for the next.
    """
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
        """Rows that are still scored."""
        self._writing = asyncio.Lock()
        self._ended = set[int]()

    async def run(self) -> None:
        loop, frames = asyncio.get_running_loop(), Frames(MOST_BYTES)
        while data := await loop.sock_recv(self._pool, 1 << 16):
            for row in itertools.chain.from_iterable(map(read_rows, frames.feed(data))):
                self._num_open += 1
                self._watch_loop()
                task = asyncio.create_task(self._answer(row))
                self._answers.add(task)
                task.add_done_callback(self._answers.discard)

    async def _answer(self, row: RewardRow) -> None:
        result = await self._score(row)
        self._num_open -= 1
        result = self._limits.checked(result, is_busy=self._num_open > 0)
        if not self._num_open:  # others may still wait for children, or for an alarm
            self._ended = bury_orphans(self._ended)
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._watch_loop()
        async with self._writing:
            message = result_frame(row.id, result)
            await asyncio.get_running_loop().sock_sendall(self._pool, message)

    async def _score(self, row: RewardRow) -> RewardResult:
        task = asyncio.create_task(score_async(self._function, row))
        limit_s = self._limits.timeout_s
        done, _ = await asyncio.wait({task}, timeout=limit_s)
        if not done and (first_s := self._limits.first_s):
            limit_s += first_s
            done, _ = await asyncio.wait({task}, timeout=first_s)
        self._limits.first_s = 0.0
        if done:
            return task.result()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
        stuck = None if done else "a row that was late does not let itself be cancelled"
        return failed(f"took longer than {limit_s:g} s", spent=stuck)

    def _watch_loop(self) -> None:
        """Called whenever the loop shows that it is not blocked."""
        if self._num_open:
            limit_s = self._limits.timeout_s + self._limits.first_s + _CANCEL_GRACE_S
            faulthandler.dump_traceback_later(limit_s + SELF_DESTRUCT_GRACE_S, exit=True)
        else:
            faulthandler.cancel_dump_traceback_later()
