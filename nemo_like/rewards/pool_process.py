"""The pool's end of one reward process, from its start to its end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast

from nemo_like.errors import UserError
from nemo_like.rewards.frames import (
    MOST_RESULT_BYTES,
    FrameError,
    Frames,
    read_first_word,
    read_result,
    rows_frame,
)
from nemo_like.rewards.process_tree import kill_tree
from nemo_like.rewards.protocol import RewardResult
from nemo_like.rewards.variables import with_hint

CONCURRENT_GRACE_S = 3.0
"""A process cancels rows of an ``async def`` itself; this much later it is taken to be blocked."""
EXIT_GRACE_S = 1.0
GROWTH_SHARE = 0.5
"""Of the memory that was free after the first row: a process that keeps more is replaced."""
GROWTH_SHARE_BUSY = 0.8
"""The same while the process scores other rows, since their memory counts too."""

_GIB = 2**30


class LostError(Exception):
    """There will be no result on these rows; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    module: str
    reward: str
    timeout_s: float
    memory_limit_bytes: int
    start_timeout_s: float
    variables: Mapping[str, str]
    withheld: frozenset[str]
    """Names of variables that it does not get."""
    most_rows: int | None
    """After so many it is replaced, and when it has grown. None: it is kept while it works."""
    log: Path | None
    """File for its output. None: this process's own output."""


@dataclass(frozen=True)
class WaitingRow:
    """A row as JSON, the id that its result has to repeat, and what its caller waits for."""

    id: str
    message: bytes
    result: Future[RewardResult] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class RewardProcess(asyncio.Protocol):
    """One process and its socket, on the pool's event loop; ``kill`` may come from other threads.

    Whatever it writes is read at once and checked. Anything but a result on a row that it holds
    ends it, and costs the rows that it holds.
    """

    def __init__(self, settings: ProcessSettings, first_s: float) -> None:
        """Start the process; ``start`` connects to it as well."""
        self.spent: str | None = None
        """Why it should be replaced once its rows are scored."""
        self.is_concurrent = False
        self.is_batched = False
        self._settings = settings
        self._first_s = first_s
        self._frames = Frames(MOST_RESULT_BYTES)
        self._in_flight: dict[str, asyncio.Future[RewardResult]] = {}
        self._first_word = asyncio.get_running_loop().create_future()
        """Gets what ``read_first_word`` returns."""
        self._ready_by = time.monotonic() + settings.start_timeout_s
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None
        self._is_ready = False
        self._is_retired = False
        self.num_scored = 0
        self._first_bytes: int | None = None
        """Memory that it had after its first row."""
        self._killing = threading.Lock()
        self.is_gone = False
        """Whether nothing is left of it."""
        self._socket, theirs = socket.socketpair()
        with theirs, settings.log.open("ab") if settings.log else nullcontext() as log:
            limits = [settings.timeout_s, first_s, settings.memory_limit_bytes]
            command = [settings.module, theirs.fileno(), settings.reward, *limits]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=dict(settings.variables),
                start_new_session=True,  # leads a group: see kill_tree
            )

    @classmethod
    async def start(cls, settings: ProcessSettings, first_s: float) -> Self:
        """A process that loads its reward; ``first_s``: extra seconds for its first rows."""
        process = cls(settings, first_s)
        await asyncio.get_running_loop().create_connection(lambda: process, sock=process._socket)
        return process

    async def wait_until_ready(self) -> None:
        """Return when the reward is loaded; UserError if it never will be."""
        if self._is_ready:
            return
        what = f"environment.reward={self._settings.reward}"
        try:
            async with asyncio.timeout(self._ready_by - time.monotonic()):
                first_word = await asyncio.shield(self._first_word)
            complaint, self.is_concurrent, self.is_batched = first_word
        except TimeoutError:
            complaint = f"{what} was not loaded within {self._settings.start_timeout_s:.0f} s."
        except LostError as error:
            complaint = f"{what}: {error}, while it was loaded."
        if complaint is not None:
            self.lose(complaint)
            raise UserError(with_hint(complaint, self._settings.withheld))
        self._is_ready = True

    @property
    def is_usable(self) -> bool:
        """Whether the next row may go to it."""
        spoilt = not self._in_flight and self._frames.has_part
        gone = self._lost is not None or self._transport is None or self._transport.is_closing()
        return not (spoilt or gone or self.spent or self._process.poll() is not None)

    async def score(self, rows: Sequence[WaitingRow]) -> list[RewardResult]:
        """Results on rows, within their time limits; LostError if there will be none."""
        assert self._transport is not None
        for row in rows:
            self._in_flight[row.id] = asyncio.get_running_loop().create_future()
        results = asyncio.gather(*(self._in_flight[row.id] for row in rows))
        self._transport.write(rows_frame([row.message for row in rows]))
        limit_s = self._settings.timeout_s
        grace_s = CONCURRENT_GRACE_S if self.is_concurrent else 0.0
        done, _ = await asyncio.wait({results}, timeout=limit_s * len(rows) + grace_s)
        if not done and not self.num_scored:  # it may still import
            limit_s += self._first_s
            done, _ = await asyncio.wait({results}, timeout=self._first_s)
        if not done:
            late = f"took longer than {limit_s:g} s"
            results.cancel()
            self.lose(f"the reward process was ended with another row, which {late}")
            raise LostError(f"{late} each" if len(rows) > 1 else late)
        found = results.result()
        self._wear(found)
        if self._is_retired and not self._in_flight:
            self.lose("the reward process was replaced")
        return found

    def retire(self) -> None:
        """No more rows come; end the process when it has scored those that it holds."""
        self._is_retired = True
        if not self._in_flight:
            self.lose("the reward process was replaced")

    def lose(self, why: str) -> None:
        """End the process; rows that it holds fail."""
        if self._lost is not None:
            return
        self._lost = why
        for waiting in (self._first_word, *self._in_flight.values()):
            if not waiting.done():
                waiting.set_exception(LostError(why))
                waiting.exception()  # perhaps nobody waits
        self._in_flight.clear()
        if self._transport is not None:
            self._transport.abort()
        asyncio.get_running_loop().run_in_executor(None, self.kill)

    def kill(self) -> None:
        """Kill the process and all that it has started; returns when it is gone."""
        with self._killing:
            if self.is_gone:
                return  # its number may belong to another process by now
            kill_tree(self._process.pid)
            self._process.wait()
            self.is_gone = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio, whenever the process has written something."""
        try:
            for payload in self._frames.feed(data):
                self._receive(payload)
        except FrameError as error:
            self.lose(f"the reward process wrote something else to its socket: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lost is None:
            self._ending = asyncio.create_task(self._lose_ended())

    def _receive(self, payload: bytes) -> None:
        if self._lost is not None:
            return
        if not self._first_word.done():
            self._first_word.set_result(read_first_word(payload))
            return
        row_id, result = read_result(payload)
        if row_id not in self._in_flight:
            raise FrameError("a result on a row that it does not hold")
        waiting = self._in_flight.pop(row_id)
        if not waiting.done():  # its time may just be over
            waiting.set_result(result)

    async def _lose_ended(self) -> None:
        deadline = time.monotonic() + EXIT_GRACE_S
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        how = "closed its socket" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            names = {one.value: one.name for one in signal.Signals}
            cause = " (out of memory?)" if -code == signal.SIGKILL else ""
            how = f"was ended by {names.get(-code, f'signal {-code}')}{cause}"
        self.lose(f"the reward process {how}")

    def _wear(self, results: Sequence[RewardResult]) -> None:
        """Notice what later rows would suffer from."""
        self.num_scored += len(results)
        self.spent = self.spent or next((v.spent for v in results if v.spent), None)
        most_rows, limit = self._settings.most_rows, self._settings.memory_limit_bytes
        if most_rows is None or self.spent:
            return
        if self.num_scored >= most_rows:
            self.spent = f"it has scored {self.num_scored} rows"
        try:  # memory of the kind that its limit counts
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[5])
        except (OSError, IndexError):  # it has ended, or this is not Linux
            return
        held = pages * os.sysconf("SC_PAGE_SIZE")
        if self._first_bytes is None:
            self._first_bytes = held
        share = GROWTH_SHARE_BUSY if self._in_flight else GROWTH_SHARE
        if held - self._first_bytes > share * max(0, limit - self._first_bytes):
            self.spent = f"it has grown to {held / _GIB:.2f} GiB of at most {limit / _GIB:.2f}"
