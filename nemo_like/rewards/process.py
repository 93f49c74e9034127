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

BatchReward = Callable[[Sequence[RewardRow]], list[RewardResult]]
"""One result for each row, in their order; never raises."""


def serve(argv: Sequence[str], load: "Callable[[str], BatchReward | RewardFunction]") -> None:
    """Load what the pool's spec names (UserError goes to the pool), then score until it closes."""
    file_descriptor, spec, timeout_s, first_s, memory_limit_bytes = argv
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
    _limit_memory(int(memory_limit_bytes))
    try:
        with without_collector():
            scorer = load(spec)
    except UserError as error:
        pool.sendall(first_word_frame(str(error)))
        return
    if not isinstance(scorer, RewardFunction):
        pool.sendall(first_word_frame(None, is_batched=True))
        _serve(pool, scorer, float(timeout_s), float(first_s))
    elif scorer.is_async:
        pool.sendall(first_word_frame(None, is_concurrent=True))
        from nemo_like.rewards.concurrent import serve_concurrently

        serve_concurrently(pool, scorer, float(timeout_s), float(first_s))
    else:
        pool.sendall(first_word_frame(None, is_batched=scorer.is_batched))
        runner = asyncio.Runner()
        by_row = partial(score_rows, scorer, runner=runner)
        _serve(pool, by_row, float(timeout_s), float(first_s))


def _serve(pool: socket.socket, scorer: BatchReward, timeout_s: float, first_s: float) -> None:
    ended, frames = set[int](), Frames(MOST_BYTES)
    while data := pool.recv(1 << 16):
        for rows in map(read_rows, frames.feed(data)):
            limit_s = timeout_s * len(rows) + first_s + SELF_DESTRUCT_GRACE_S
            faulthandler.dump_traceback_later(limit_s, exit=True)
            results = scorer(rows)
            faulthandler.cancel_dump_traceback_later()
            first_s = 0.0
            ended = bury_orphans(ended)
            signal.setitimer(signal.ITIMER_REAL, 0)  # one left behind must not hit the next row
            for row, result in zip(rows, results, strict=True):
                pool.sendall(result_frame(row.id, result))


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
