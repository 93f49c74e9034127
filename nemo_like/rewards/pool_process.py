"""The pool's end of one reward process, from its start to its end."""

import asyncio
import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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
from nemo_like.rewards.protocol import RewardResult, failed
from nemo_like.rewards.variables import with_hint

CONCURRENT_GRACE_S = 3.0
"""A process cancels rows of an ``async def`` itself; this much later it is taken to be blocked."""
EXIT_GRACE_S = 1.0
PAUSE_S = 0.002
"""A process that answers faster than this is read this often: many results for one wake-up."""


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
    most_rows: int
    """After so many it is replaced, and when it has grown. 0: it is kept while it works."""
    log: Path | None
    """File for its output. None: this process's own output."""


@dataclass(frozen=True)
class WaitingRow:
    """A row as JSON, the id that its result has to repeat, and what its caller waits for."""

    id: str
    message: bytes
    result: asyncio.Future[RewardResult]
    """Of the caller's event loop."""
    since: float = field(default_factory=time.monotonic)


Answers = Sequence[tuple[WaitingRow, RewardResult | BaseException]]


def answer(answers: Answers) -> None:
    """Hand over what rows wait for, with one wake-up of the event loop where they wait."""
    for loop, of_loop in itertools.groupby(answers, key=lambda one: one[0].result.get_loop()):
        with contextlib.suppress(RuntimeError):  # it is closed, so nobody waits
            loop.call_soon_threadsafe(_hand_over, list(of_loop))


def _hand_over(answers: Answers) -> None:
    for row, result in answers:
        if not row.result.done():  # or its caller was cancelled
            if isinstance(result, BaseException):
                row.result.set_exception(result)
            else:
                row.result.set_result(result)


@dataclass
class _Call:
    """Rows that a process got in one message."""

    rows: dict[str, WaitingRow]
    """By id, in order; those that have no result yet."""
    num_together: int
    """Rows that share a time limit."""
    done: asyncio.Future[None]
    since: float = field(default_factory=time.monotonic)
    """When the first of ``rows`` began, as far as the pool knows: at the result before."""
    is_first: bool = False
    """Whether it began before the process had scored any row."""
    extra_s: float = 0.0
    """Of the first row that a process scores."""


class RewardProcess(asyncio.Protocol):
    """One process and its socket, on the pool's event loop; ``kill`` may come from other threads.

    Whatever it writes is checked. Anything but a result on a row that it holds ends it.
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
        self._in_flight: dict[str, _Call] = {}
        self._first_word = asyncio.get_running_loop().create_future()
        """Gets what ``read_first_word`` returns."""
        self._ready_by = time.monotonic() + settings.start_timeout_s
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None
        self._is_ready = False
        self._is_retired = False
        self.num_scored = 0
        self._killing = threading.Lock()
        self.is_gone = False
        """Whether nothing is left of it."""
        self._socket, theirs = socket.socketpair()
        with theirs, settings.log.open("ab") if settings.log else nullcontext() as log:
            limits = [settings.timeout_s, first_s, settings.memory_limit_bytes, settings.most_rows]
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

    async def score(self, rows: Sequence[WaitingRow]) -> Sequence[WaitingRow]:
        """Answer rows as their results come; returns those that it did not begin.

        Rows of a function that takes several are sent together and share their time limits; others
        are scored one after the other, so what ends the process costs the first that is left.
        """
        assert self._transport is not None
        together = len(rows) if self.is_batched else 1
        done = asyncio.get_running_loop().create_future()
        call = _Call({row.id: row for row in rows}, together, done, is_first=not self.num_scored)
        self._in_flight |= dict.fromkeys(call.rows, call)
        messages = [row.message for row in rows]
        frames = [messages] if self.is_batched else [[message] for message in messages]
        self._transport.write(b"".join(map(rows_frame, frames)))
        try:
            while not done.done():
                await asyncio.wait({done}, timeout=self._left_s(call))
                if not done.done():
                    await self._read()
            done.result()
        except LostError as error:
            lost = [*call.rows][:together]
            answer([(call.rows.pop(row_id), failed(str(error))) for row_id in lost])
        for row_id in call.rows:
            self._in_flight.pop(row_id, None)
        if self._is_retired and not self._in_flight:
            self.lose("the reward process was replaced")
        return [*call.rows.values()]

    async def _read(self) -> None:
        """Read what lies in the socket: this event loop may have stood still."""
        assert self._transport is not None
        self._transport.resume_reading()
        for _ in range(2):  # one turn to look, and one to read
            await asyncio.sleep(0)

    def _left_s(self, call: _Call) -> float:
        """Seconds until the row that is scored is late; if it is, ends the process: LostError."""
        limit_s = self._settings.timeout_s
        left_s = call.since + limit_s * call.num_together + call.extra_s - time.monotonic()
        if self.is_concurrent:
            left_s += CONCURRENT_GRACE_S
        may_import = not self.num_scored or (self.is_concurrent and call.is_first)
        if left_s <= 0 and may_import and not call.extra_s:
            call.extra_s = self._first_s
            left_s += call.extra_s
        if left_s <= 0:
            late = f"took longer than {limit_s + call.extra_s:g} s"
            self.lose(f"the reward process was ended with another row, which {late}")
            raise LostError(f"{late} each" if call.num_together > 1 else late)
        return left_s

    def retire(self) -> None:
        """No more rows come; end the process when it has scored those that it holds."""
        self._is_retired = True
        if not self._in_flight:
            self.lose("the reward process was replaced")

    def lose(self, why: str) -> None:
        """End the process, and all calls of ``score``."""
        if self._lost is not None:
            return
        self._lost = why
        for waiting in (self._first_word, *(call.done for call in self._in_flight.values())):
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
        answers: list[tuple[WaitingRow, RewardResult]] = []
        try:
            for payload in self._frames.feed(data):
                self._receive(payload, answers)
        except FrameError as error:
            self.lose(f"the reward process wrote something else to its socket: {error}")
        answer(answers)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lost is None:
            self._ending = asyncio.create_task(self._lose_ended())

    def _receive(self, payload: bytes, answers: list[tuple[WaitingRow, RewardResult]]) -> None:
        if self._lost is not None:
            return
        assert self._transport is not None
        if not self._first_word.done():
            self._first_word.set_result(read_first_word(payload))
            return
        row_id, result = read_result(payload)
        call = self._in_flight.pop(row_id, None)
        if call is None:
            raise FrameError("a result on a row that it does not hold")
        if result.error:
            result = replace(result, error=with_hint(result.error, self._settings.withheld))
        answers.append((call.rows.pop(row_id), result))
        now = time.monotonic()
        if call.rows and now - call.since < PAUSE_S and self._transport.is_reading():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(PAUSE_S, self._transport.resume_reading)
        call.since, call.extra_s = now, 0.0
        self.num_scored += 1
        self.spent = self.spent or result.spent
        ends = not call.rows or (self.spent and not self.is_batched)
        if ends and not call.done.done():
            call.done.set_result(None)

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
