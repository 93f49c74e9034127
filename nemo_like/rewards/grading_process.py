"""What runs in a grading process: ``python -m nemo_like.rewards.grading_process FD SPEC …``.

It grades in its main thread, where libraries may set signal alarms. It talks to its pool over one
socket, in frames of plain data: first whether the reward can be used, then for each list of rows a
verdict each.
"""

import asyncio
import contextlib
import faulthandler
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_like.errors import UserError
from nemo_like.rewards.concurrent_rows import Limits, serve_concurrently
from nemo_like.rewards.frames import (
    MOST_BYTES,
    FirstWord,
    Frames,
    first_word_frame,
    read_rows,
    verdict_frame,
)
from nemo_like.rewards.process_tree import (
    adopt_orphans,
    bury_orphans,
    kill_tree,
    leave_sigterm_to_driver,
)
from nemo_like.rewards.protocol import GradingRow, Verdict
from nemo_like.rewards.resolve import RewardFunction, resolve_reward
from nemo_like.rewards.verdicts import grade_row

PARENT_POLL_S = 1.0
# The pool stops a row that is late; this only ends a process whose pool was killed meanwhile, and
# works while native code holds the interpreter lock.
SELF_DESTRUCT_GRACE_S = 5.0

BatchGrader = Callable[[Sequence[GradingRow]], list[Verdict]]
"""One verdict for each row, in their order; never raises."""


def main(argv: Sequence[str]) -> None:
    """Grade by a reward function."""
    serve(argv, _load)


def _load(spec: str) -> "BatchGrader | RewardFunction":
    function = resolve_reward(spec)
    if function.is_async:
        return function
    loop = asyncio.Runner()  # for a plain function that returns an awaitable

    def finish(result: Awaitable[Any]) -> Any:
        return loop.run(_awaited(result))

    def grade(rows: Sequence[GradingRow]) -> list[Verdict]:
        return [grade_row(function, row, finish) for row in rows]

    return grade


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def serve(argv: Sequence[str], load: "Callable[[str], BatchGrader | RewardFunction]") -> None:
    """Load what the pool's spec names (UserError goes to the pool), then grade until it closes.

    A ``RewardFunction`` grades many rows at once, on one event loop.
    """
    file_descriptor, spec, timeout_s, memory_limit_bytes = argv
    pool = socket.socket(fileno=int(file_descriptor))
    _keep_from_children(pool)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's; it ends the pool
    leave_sigterm_to_driver()
    adopt_orphans()
    _die_with_parent(os.getppid())
    _limit_memory(int(memory_limit_bytes))
    try:
        grader = load(spec)
    except UserError as error:
        pool.sendall(first_word_frame(FirstWord(refused=str(error), is_concurrent=False)))
        return
    is_concurrent = isinstance(grader, RewardFunction)
    pool.sendall(first_word_frame(FirstWord(refused=None, is_concurrent=is_concurrent)))
    if isinstance(grader, RewardFunction):
        limits = Limits(row_s=float(timeout_s), self_destruct_s=SELF_DESTRUCT_GRACE_S)
        serve_concurrently(pool, grader, limits)
    else:
        _serve(pool, grader, float(timeout_s))


def _serve(pool: socket.socket, grader: BatchGrader, timeout_s: float) -> None:
    ended = set[int]()
    for rows in _lists_of_rows(pool):
        limit_s = timeout_s * len(rows) + SELF_DESTRUCT_GRACE_S
        faulthandler.dump_traceback_later(limit_s, exit=True)
        verdicts = grader(rows)
        faulthandler.cancel_dump_traceback_later()
        ended = bury_orphans(ended)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind must not hit the next row
        for row, verdict in zip(rows, verdicts, strict=True):
            pool.sendall(verdict_frame(row.id, verdict))


def _lists_of_rows(pool: socket.socket) -> Iterator[list[GradingRow]]:
    frames = Frames(MOST_BYTES)
    while data := pool.recv(1 << 16):
        yield from map(read_rows, frames.feed(data))


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


if __name__ == "__main__":
    main(sys.argv[1:])
