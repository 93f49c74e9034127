"""What runs in a grading process: ``python -m nemo_like.environments.grading_process FD SPEC …``.

It grades in its main thread, where libraries may set signal alarms. It talks to its pool over one
socket: first a word on the import (None, or why it failed), then for each list of pickled rows a
list of ``Verdict``, plain numbers and text.
"""

import asyncio
import contextlib
import faulthandler
import inspect
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from numbers import Complex, Real
from pathlib import Path
from typing import Any

from nemo_like.environments.process_tree import adopt_orphans, bury_orphans, kill_tree
from nemo_like.environments.protocol import Verdict
from nemo_like.environments.rewards import (
    RewardFunction,
    error_place,
    error_text,
    resolve_reward,
)
from nemo_like.errors import UserError

PARENT_POLL_S = 1.0
# The pool stops a row that is late; this only ends a process whose pool was killed meanwhile, and
# works while native code holds the interpreter lock.
SELF_DESTRUCT_GRACE_S = 5.0

_MOST = 3e38
"""Nearly float32's largest number: what losses compute with."""

Grader = Callable[[Sequence[bytes]], list[Verdict]]
"""One verdict for each pickled ``(prompt, completion, fields)``."""


def main(argv: Sequence[str]) -> None:
    """Grade by a reward function, one row after the other."""

    def load(spec: str) -> Grader:
        function = resolve_reward(spec)
        return lambda rows: [grade_row(function, row) for row in rows]

    serve(argv, load)


def serve(argv: Sequence[str], load: Callable[[str], Grader]) -> None:
    """Load what the pool's spec names (UserError goes to the pool), then grade until it closes."""
    file_descriptor, spec, timeout_s, memory_limit_bytes = argv
    connection = Connection(int(file_descriptor))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's; it ends the pool
    adopt_orphans()
    _die_with_parent(os.getppid())
    _limit_memory(int(memory_limit_bytes))
    try:
        grader = load(spec)
    except UserError as error:
        connection.send(str(error))
        return
    connection.send(None)
    _serve(connection, grader, float(timeout_s))


def _serve(connection: Connection, grader: Grader, timeout_s: float) -> None:
    own, ended = os.getpid(), set[int]()
    while True:
        try:
            rows = connection.recv()
        except EOFError:
            return
        limit_s = timeout_s * len(rows) + SELF_DESTRUCT_GRACE_S
        faulthandler.dump_traceback_later(limit_s, exit=True)
        verdicts = grader(rows)
        if os.getpid() != own:  # the function forked, and one of the two has to answer
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        ended = bury_orphans(ended)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind must not hit the next row
        connection.send(verdicts)


def grade_row(function: RewardFunction, row: bytes) -> Verdict:
    """Grade one pickled ``(prompt, completion, fields)``; whatever happens costs this row only."""
    try:
        prompt, completion, fields = pickle.loads(row)
        result = function(prompt, completion, fields)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return to_verdict(result)
    except BaseException as error:  # one row's grading: sys.exit() in it must not end the process
        return None, {}, _failure(function, error), None


async def _awaited(result: Any) -> Any:
    return await result


def _failure(function: RewardFunction, error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    code = getattr(inspect.unwrap(function.function), "__code__", None)
    folder = Path(code.co_filename).parent if code else None
    return f"{error_text(error)} ({error_place(error, folder)})"


def to_verdict(result: Any) -> Verdict:
    """Read what a reward function returned: a number, None, or a dict with ``reward`` and metrics.

    Beside ``reward`` a dict holds numbers, which become metrics, and perhaps ``answer``: what the
    completion answered, or None if it stated none. A ``reward`` of None means that the row cannot
    be graded; then ``error`` may be a text that says why.
    """
    if result is None:
        return None, {}, "returned None", None
    if not isinstance(result, Mapping):
        return _number("the reward", result), {}, None, None
    if "reward" not in result:
        raise UserError(f"returned a dict without 'reward' (it has {sorted(map(str, result))}).")
    rest = {str(key): value for key, value in result.items() if key != "reward"}
    if result["reward"] is None:
        return None, {}, str(rest.get("error", "returned a reward of None")), None
    reward = _number("the reward", result["reward"])
    answer = None
    if "answer" in rest:
        stated = rest.pop("answer")
        answer = "" if stated is None else str(stated)
    metrics = {key: _number(f"metric {key!r}", value) for key, value in rest.items()}
    return reward, metrics, None, answer


def _number(what: str, value: Any) -> float:
    """Any real number of float32, NumPy's and one-element tensors included, but no text.

    Squares of larger ones would overflow, and all advantages of the group be 0 or infinite.
    """
    # NumPy's complex numbers would lose their other half, with a warning that nobody sees.
    kind = type(value)
    is_complex = issubclass(kind, Complex) and not issubclass(kind, Real)
    if isinstance(value, (str, bytes)) or is_complex or not hasattr(kind, "__float__"):
        raise UserError(f"{what} is a {kind.__name__}, not a number.")
    try:
        number = float(value)
    except Exception as error:  # the value's own code: an array of two, an integer of 400 digits
        raise UserError(f"{what} is a {kind.__name__}, not one number: {error}.") from error
    if not abs(number) <= _MOST:  # not ">", so that NaN is refused
        raise UserError(f"{what} is {number:g}, not a finite number of at most {_MOST:g}.")
    return number


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
    limit = memory_limit_bytes if hard == resource.RLIM_INFINITY else min(memory_limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main(sys.argv[1:])
