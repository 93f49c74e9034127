"""Scores rows in processes of their own, so that a reward function can fail in any way it likes.

Every process has its own socket and a hard limit per row: one that is late, dead or worn out, or
writes what it should not, is replaced, and only what it was scoring is lost. (A pool whose
workers share a queue, such as pebble's or the standard library's, is broken for good when a worker
dies between two rows; ``multiprocessing`` would import the main module, here Ray's, in every
process, and unpickle what a process sends, which a reward function can write.)
"""

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_like.errors import UserError
from nemo_like.rewards.frames import PlainDataError, write_row
from nemo_like.rewards.pool_process import (
    LostError,
    ProcessSettings,
    RewardProcess,
    WaitingRow,
    answer,
)
from nemo_like.rewards.protocol import RewardResult, RewardRow, failed
from nemo_like.rewards.variables import reward_variables

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
MOST_ROWS = 10_000
"""Rows after which a process is replaced, for what leaks and is not measured."""
MEMORY_SHARE = 0.5
MOST_BYTES_AHEAD = 1 << 17
"""Of rows in one message: a socket takes them at once, so the pool need not wait to write."""
FIRST_S = 60.0
"""Most extra time for the first rows of a process, since they may import."""
FIRST_SHARE = 5.0
"""The same, in multiples of the time limit."""
TRIES = 2
"""Processes in a row that may fail to load the reward before all waiting rows fail; also the number
of processes that get extra time before any row has been scored."""
_SHUT_DOWN = "the reward process was shut down"


class RewardPool:
    """An ``Environment`` of ``num_processes`` processes that call one reward function.

    ``reward`` is resolved in the reward processes only, by ``module``; UserError if it cannot be
    used. A row that takes longer than ``timeout_s`` to score (waiting for a free process does not
    count) or more than ``memory_limit_bytes`` fails. Processes get ``pass_variables`` besides those
    that ``variables`` lists. Their output goes to ``log`` (None: this process's own output).

    A process scores one row after the other, or ``concurrency`` at once by an ``async def``. If
    there is only one, of the first kind, it gets all waiting rows in one message. A process is
    replaced when it holds on to much of its memory, or runs out of it, and after ``most_rows``
    (None: it is kept while it works). If the reward takes several rows in one call, a free process
    gets up to ``concurrency`` waiting rows, which share time limits and succeed or fail together.
    """

    def __init__(
        self,
        reward: str,
        *,
        timeout_s: float = 10.0,
        num_processes: int = 1,
        memory_limit_bytes: int | None = None,
        pass_variables: Sequence[str] = (),
        concurrency: int = 32,
        most_rows: int | None = MOST_ROWS,
        module: str = "nemo_like.rewards.process",
        start_timeout_s: float = START_TIMEOUT_S,
        log: Path | None = None,
    ) -> None:
        variables = reward_variables(os.environ, pass_variables)
        own = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [memory_limit_bytes or memory_share(num_processes)]
        limits += [one for one in own if one != resource.RLIM_INFINITY]
        settings = ProcessSettings(
            module=module,
            reward=reward,
            timeout_s=timeout_s,
            memory_limit_bytes=min(limits),
            start_timeout_s=start_timeout_s,
            variables=variables,
            withheld=frozenset(os.environ.keys() - variables.keys()),
            most_rows=most_rows or 0,
            log=log,
        )
        self._concurrency = concurrency
        self._waiting: deque[WaitingRow] = deque()
        self._is_shut_down = False
        self._lock = threading.Lock()
        self._loop = asyncio.SelectorEventLoop()  # not uvloop, which Ray makes the default
        self._thread = threading.Thread(
            target=self._loop.run_forever, daemon=True, name="reward-pool"
        )
        self._thread.start()
        self._lanes = [_Lane(settings) for _ in range(num_processes)]
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self.shutdown()
            raise

    @property
    def takes_several(self) -> bool:
        """Whether the reward function is an ``async def``, or takes several rows in one call."""
        return all(lane.is_concurrent or lane.is_batched for lane in self._lanes)

    async def score(self, prompt: str, completion: str, fields: Mapping[str, Any]) -> RewardResult:
        """Score one completion; whatever goes wrong is in ``RewardResult.error``."""
        row_id = secrets.token_hex(16)
        try:
            message = write_row(RewardRow(row_id, prompt, completion, dict(fields)))
        except PlainDataError as error:
            return failed(str(error))
        row = WaitingRow(row_id, message, asyncio.get_running_loop().create_future())
        with self._lock:
            if self._is_shut_down:
                return failed(_SHUT_DOWN)
            self._waiting.append(row)
            if len(self._waiting) == 1:  # others are dealt with it, or when there is room
                self._loop.call_soon_threadsafe(self._deal)
        return await row.result

    def shutdown(self) -> None:
        """Kill the processes, and what they started; rows that wait come back as failed."""
        with self._lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        await asyncio.gather(*(lane.start() for lane in self._lanes))

    async def _end(self) -> None:
        await asyncio.gather(*(lane.end() for lane in self._lanes))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        answer([(row, failed(_SHUT_DOWN)) for row in self._waiting])
        await self._loop.shutdown_default_executor()

    def _deal(self) -> None:
        """Give rows that wait to the processes that have most room."""
        while self._waiting and not self._is_shut_down:
            lane = max(self._lanes, key=self._room)
            if self._room(lane) <= 0:
                return
            if rows := self._next_rows(lane):
                lane.num_calls += 1
                task = asyncio.create_task(self._score(lane, rows))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _next_rows(self, lane: "_Lane") -> list[WaitingRow]:
        """Rows for one message: all that wait if they are scored one after the other anyway.

        Where there are several processes, none waits behind a slow one while a process is idle.
        """
        is_only = len(self._lanes) == 1 and not lane.is_concurrent
        most = self._concurrency if lane.is_batched else len(self._waiting) if is_only else 1
        rows: list[WaitingRow] = []
        num_bytes = 0
        while self._waiting and len(rows) < most:
            num_bytes += len(self._waiting[0].message)
            if rows and num_bytes > MOST_BYTES_AHEAD and not lane.is_batched:
                break
            row = self._waiting.popleft()
            if not row.result.cancelled():
                rows.append(row)
        return rows

    def _room(self, lane: "_Lane") -> int:
        return (self._concurrency if lane.is_concurrent else 1) - lane.num_calls

    async def _score(self, lane: "_Lane", rows: Sequence[WaitingRow]) -> None:
        left: Sequence[WaitingRow] = ()
        try:
            process = await lane.usable(max(row.since for row in rows))
            left = await process.score(rows)
        except (LostError, UserError) as error:  # no process could be started
            lost = rows if lane.refused else rows[:1]
            answer([(row, failed(str(error))) for row in lost])
            left = rows[len(lost) :]
        except BaseException as error:  # whoever waits for a row is to see it
            answer([(row, error) for row in rows])
            raise
        finally:
            lane.num_calls -= 1
            self._waiting.extendleft(reversed(left))
            self._deal()


class _Lane:
    """The place of one process at a time."""

    def __init__(self, settings: ProcessSettings) -> None:
        self.num_calls = 0
        """That have not returned; the pool counts them."""
        self._settings = settings
        self.is_concurrent = self.is_batched = False
        """What the reward is, once a process has loaded it."""
        self._processes: list[RewardProcess] = []
        """The last one is in use; those before it end when their rows are scored."""
        self._replacing = asyncio.Lock()
        self.refused: tuple[float, UserError] | None = None
        """When processes could not load the reward, and why."""
        self._num_refused = 0
        """Of the last processes."""
        self._num_started = 0
        self._has_scored = False
        self._is_ended = False

    async def start(self) -> None:
        """Start the first process; UserError if it cannot load its reward."""
        await self._start()
        await self._ready()

    async def end(self) -> None:
        self._is_ended = True
        for process in self._processes:
            process.lose(_SHUT_DOWN)
        await asyncio.gather(*(asyncio.to_thread(process.kill) for process in self._processes))

    async def usable(self, since: float) -> RewardProcess:
        """A process for rows that have waited ``since``."""
        async with self._replacing:
            if self._is_ended:
                raise LostError(_SHUT_DOWN)
            if self.refused is not None and since <= self.refused[0]:
                raise self.refused[1]  # or each row that waits would start a process
            last = self._processes[-1]
            if not last.is_usable:
                why = f": {last.spent}" if last.spent else ""
                logger.warning("Starting another reward process in place of the last%s.", why)
                last.retire()
                await self._start()
            try:
                await self._ready()
            except UserError as error:
                self._num_refused += 1
                if self._num_refused >= TRIES:
                    self.refused = time.monotonic(), error
                raise
            self._num_refused, self.refused = 0, None
            return self._processes[-1]

    async def _ready(self) -> None:
        process = self._processes[-1]
        await process.wait_until_ready()
        self.is_concurrent, self.is_batched = process.is_concurrent, process.is_batched

    def _first_s(self) -> float:
        """Extra seconds for the first rows of the next process.

        If the function always hangs, only the first processes get them.
        """
        self._num_started += 1
        self._has_scored = self._has_scored or any(one.num_scored for one in self._processes)
        limit_s = min(FIRST_S, FIRST_SHARE * self._settings.timeout_s)
        return limit_s if self._has_scored or self._num_started <= TRIES else 0.0

    async def _start(self) -> None:
        process = await RewardProcess.start(self._settings, self._first_s())
        self._processes = [one for one in self._processes if not one.is_gone] + [process]
        if self._is_ended:  # ended meanwhile
            process.lose(_SHUT_DOWN)


def memory_share(num_processes: int) -> int:
    """Bytes that each of a machine's, or a container's, reward processes may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or the word "max"
            total = min(total, int(Path(path).read_text()))
    return int(total * MEMORY_SHARE / num_processes)
