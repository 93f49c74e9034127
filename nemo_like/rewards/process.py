"""What runs in a reward process: ``python -m nemo_like.rewards.process FD SPEC …``.

It scores in its main thread, where libraries may set signal alarms. It talks to its pool over one
socket, in frames of plain data: first whether the reward can be used, then for each list of rows a
result each.
"""

import asyncio
import contextlib
import faulthandler
import io
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

from nemo_like.errors import UserError
from nemo_like.imports import without_collector
from nemo_like.rewards.find import load_reward
from nemo_like.rewards.frames import MOST_BYTES, Frames, first_word_frame, read_rows, result_frame
from nemo_like.rewards.function import RewardFunction, score_rows
from nemo_like.rewards.process_tree import adopt_orphans, bury_orphans, kill_tree
from nemo_like.rewards.protocol import RewardResult, RewardRow

PARENT_POLL_S = 1.0
# The pool stops a row that is late; this only ends a process whose pool was killed meanwhile, and
# works while native code holds the interpreter lock.
SELF_DESTRUCT_GRACE_S = 5.0

GROWTH_SHARE = 0.5
"""Of the memory that was free after the first row: a process that keeps more is replaced."""
GROWTH_SHARE_BUSY = 0.8
"""The same while the process scores other rows, since their memory counts too."""

_GIB = 2**30

BatchReward = Callable[[Sequence[RewardRow]], list[RewardResult]]
"""One result for each row, in their order; never raises."""


@dataclass
class Limits:
    """Of the time of rows, and of what a process takes before it is replaced."""

    timeout_s: float
    first_s: float
    """Extra seconds for rows until one is scored."""
    memory_bytes: float
    most_rows: float
    """0: it is kept while it works, however much it grows."""
    _num_scored: int = field(default=0, init=False)
    _first_bytes: int | None = field(default=None, init=False)

    def checked(self, result: RewardResult, *, is_busy: bool = False) -> RewardResult:
        """One row's result, which says if later rows would suffer from this process."""
        self._num_scored += 1
        if self.most_rows and not result.spent:
            result = replace(result, spent=self._spent(is_busy))
        return result

    def _spent(self, is_busy: bool) -> str | None:
        if self._num_scored >= self.most_rows:
            return f"it has scored {self._num_scored} rows"
        try:  # memory of the kind that its limit counts
            pages = int(Path("/proc/self/statm").read_bytes().split()[5])
        except OSError:  # no files are left, or this is not Linux
            return None
        held, limit = pages * resource.getpagesize(), self.memory_bytes
        first = self._first_bytes = self._first_bytes or held
        share = GROWTH_SHARE_BUSY if is_busy else GROWTH_SHARE
        if held - first <= share * max(0, limit - first):
            return None
        return f"it has grown to {held / _GIB:.2f} GiB of at most {limit / _GIB:.2f}"


def serve(argv: Sequence[str], load: "Callable[[str], BatchReward | RewardFunction]") -> None:
    """Load what the pool's spec names (UserError goes to the pool), then score until it closes."""
    file_descriptor, spec, *numbers = argv
    limits = Limits(*map(float, numbers))
    pool = socket.socket(fileno=int(file_descriptor))
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(
            line_buffering=True
        )  # output must be visible even if the function hangs
    _keep_from_children(pool)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's; it ends the pool
    leave_sigterm_to_driver()
    adopt_orphans()
    _die_with_parent(os.getppid())
    _limit_memory(int(limits.memory_bytes))
    try:
        with without_collector():
            scorer = load(spec)
    except UserError as error:
        pool.sendall(first_word_frame(str(error)))
        return
    if not isinstance(scorer, RewardFunction):
        pool.sendall(first_word_frame(None, is_batched=True))
        _serve(pool, scorer, limits)
    elif scorer.is_async:
        pool.sendall(first_word_frame(None, is_concurrent=True))
        from nemo_like.rewards.concurrent import serve_concurrently

        serve_concurrently(pool, scorer, limits)
    else:
        pool.sendall(first_word_frame(None, is_batched=scorer.is_batched))
        runner = asyncio.Runner()
        by_row = partial(score_rows, scorer, runner=runner)
        _serve(pool, by_row, limits)


def _serve(pool: socket.socket, scorer: BatchReward, limits: Limits) -> None:
    ended, frames, is_spent = set[int](), Frames(MOST_BYTES), False
    while data := pool.recv(1 << 16):
        watched_until = 0.0
        for rows in map(read_rows, frames.feed(data)):
            if is_spent:
                continue  # the pool gives them to another process
            if time.monotonic() > watched_until:  # not for each row, since it starts a thread
                limit_s = limits.timeout_s * len(rows) + limits.first_s
                faulthandler.dump_traceback_later(limit_s + SELF_DESTRUCT_GRACE_S, exit=True)
                watched_until = time.monotonic() + SELF_DESTRUCT_GRACE_S / 2
            results = scorer(rows)
            limits.first_s = 0.0
            ended = bury_orphans(ended)
            signal.setitimer(signal.ITIMER_REAL, 0)  # one left behind must not hit the next row
            for row, result in zip(rows, map(limits.checked, results), strict=True):
                is_spent = is_spent or result.spent is not None
                pool.sendall(result_frame(row.id, result))
        faulthandler.cancel_dump_traceback_later()


def _keep_from_children(pool: socket.socket) -> None:
    """Close the socket in what the function forks or runs, so that this process alone answers."""
    pool.set_inheritable(False)
    file_descriptor = pool.fileno()

    def close() -> None:
        with contextlib.suppress(OSError):  # closed by the function itself
            os.close(file_descriptor)

    os.register_at_fork(after_in_child=close)


def _die_with_parent(parent: int) -> None:
    """End with all that was started when the pool's process is gone, even in a row's middle."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        kill_tree(os.getpid())

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _limit_memory(memory_limit_bytes: int) -> None:
    """Turn a row that eats memory into a MemoryError, or at worst into the first process to go."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, hard))
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")


def leave_sigterm_to_driver() -> None:
    """SIGTERM to all processes of a run must not cost rows; what a function starts obeys it still.

    A handler, as children would inherit that a signal is ignored, or blocked as it comes here.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


if __name__ == "__main__":
    serve(sys.argv[1:], load_reward)
