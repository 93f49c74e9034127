"""From what a reward function does to a verdict: whatever happens costs one row, or one metric."""

import contextlib
import errno
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from numbers import Complex, Real
from pathlib import Path
from typing import Any

from nemo_like.doors import error_place, error_text
from nemo_like.errors import UserError
from nemo_like.rewards.protocol import MOST, GradingRow, Verdict, failed
from nemo_like.rewards.resolve import RewardFunction

_SPENT_ERRNOS = (errno.ENOMEM, errno.EMFILE)
_MOST_CAUSES = 20


def grade_row(
    function: RewardFunction, row: GradingRow, finish: Callable[[Awaitable[Any]], Any]
) -> Verdict:
    """Grade one row outside of an event loop; ``finish`` gives what an awaitable gives."""
    with _one_process():
        try:
            result = function(row.prompt, row.completion, row.fields)
            return to_verdict(finish(result) if inspect.isawaitable(result) else result)
        except BaseException as error:  # sys.exit() in a row's grading must not end the process
            return _verdict_of(error, function)


async def grade_async(function: RewardFunction, row: GradingRow) -> Verdict:
    """Grade one row by an ``async def``."""
    with _one_process():
        try:
            return to_verdict(await function(row.prompt, row.completion, row.fields))
        except BaseException as error:  # as above; and a row may cancel itself
            return _verdict_of(error, function)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Where the function forked, one of the two has to answer."""
    own = os.getpid()
    yield
    if os.getpid() != own:
        os._exit(0)


def _verdict_of(error: BaseException, function: RewardFunction) -> Verdict:
    return failed(_failure(function, error), spent=_exhausted(error))


def _failure(function: RewardFunction, error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    code = getattr(inspect.unwrap(function.function), "__code__", None)
    folder = Path(code.co_filename).parent if code else None
    return f"{error_text(error)} ({error_place(error, folder)})"


def _exhausted(error: BaseException | None) -> str | None:
    """What the process has no more of, by an error or by one that it came of.

    A function that leaks meets it again on every later row.
    """
    for _ in range(_MOST_CAUSES):
        if error is None:
            break
        text = error_text(error)
        if isinstance(error, MemoryError) or "allocate memory" in text:
            return "out of memory"
        if isinstance(error, OSError) and error.errno in _SPENT_ERRNOS:
            return text
        if "can't start new thread" in text:
            return "out of threads"
        error = error.__cause__ or error.__context__
    return None


def to_verdict(result: Any) -> Verdict:
    """Read what a reward function returned: a number, None, or a dict with ``reward`` and metrics.

    Next to ``reward`` a dict holds numbers, which become metrics, and perhaps ``answer``: what the
    completion answered, or None if it stated none. Metrics that are not finite numbers are
    dropped; the reward still counts. A ``reward`` of None means that the row cannot be graded; then
    ``error`` may be a text that says why. Raises UserError for a reward that is not a number.
    """
    if result is None:
        return failed("returned None")
    if not isinstance(result, Mapping):
        return Verdict(reward=_number("the reward", result))
    if "reward" not in result:
        raise UserError(f"returned a dict without 'reward' (it has {sorted(map(str, result))}).")
    rest = {str(key): value for key, value in result.items() if key != "reward"}
    if result["reward"] is None:
        return failed(str(rest.get("error", "returned a reward of None")))
    reward = _number("the reward", result["reward"])
    answer = None
    if "answer" in rest:
        stated = rest.pop("answer")
        answer = "" if stated is None else str(stated)
    metrics, dropped = dict[str, float](), dict[str, str]()
    for key, value in rest.items():
        try:
            metrics[key] = _number("it", value)
        except UserError as error:
            dropped[key] = str(error)
    return Verdict(reward=reward, metrics=metrics, answer=answer, dropped=dropped)


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
    if not abs(number) <= MOST:  # not ">", so that NaN is refused
        raise UserError(f"{what} is {number:g}, not a finite number of at most {MOST:g}.")
    return number
