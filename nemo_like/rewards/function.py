"""Call a reward function on rows, and turn what it returns into results.

A failure costs only its row, or one metric of it.
"""

import asyncio
import contextlib
import errno
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Complex, Real
from pathlib import Path
from typing import Any

from nemo_like.doors import error_place, error_text
from nemo_like.errors import UserError
from nemo_like.rewards.protocol import IS_CHAT, MOST, RewardResult, RewardRow, failed

BATCHED = frozenset({"prompts", "completions"})
_SPENT_ERRNOS = (errno.ENOMEM, errno.EMFILE)
_MOST_CAUSES = 20


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and the names of the row fields that it takes."""

    spec: str
    function: Callable[..., Any]
    accepted_fields: frozenset[str] | None
    """None: every field (the function has ``**fields``)."""
    required_fields: frozenset[str]
    """Fields without a default: a row that lacks one cannot be scored."""
    is_async: bool = False
    """An ``async def``, or an object with one as its ``__call__``."""
    is_batched: bool = False
    """Whether it takes lists, ``(prompts, completions, **columns)``, as in TRL."""
    by_name: bool = True
    """False: call it with prompt, completion and one mapping of all fields."""
    queues: bool = False
    """Whether it queues its own work and limits its time after that."""

    def __call__(self, prompt: str, completion: str, fields: Mapping[str, Any]) -> Any:
        """Call the function with those fields that it names; its result is not checked here."""
        missing = sorted(self.required_fields - fields.keys())
        if missing:
            raise UserError(f"the row lacks {', '.join(missing)}, which {self.spec} needs.")
        if not self.by_name:
            return self.function(prompt, completion, fields)
        if self.is_batched:
            found = self.of_rows([RewardRow("", prompt, completion, dict(fields))])
            return _first(found) if inspect.isawaitable(found) else found[0]
        passed = {name: value for name, value in fields.items() if self._accepts(name)}
        return self.function(**(passed | {"prompt": prompt, "completion": completion}))

    def of_rows(self, rows: Sequence[RewardRow]) -> Any:
        """The list that a batched function returns for these rows, or an awaitable of it."""
        names = dict.fromkeys(name for row in rows for name in row.fields if self._accepts(name))
        columns = {name: [row.fields.get(name) for row in rows] for name in names}
        own = {"prompts": [_prompt(row) for row in rows]}
        own["completions"] = [_completion(row) for row in rows]
        taken = {name: one for name, one in own.items() if self._accepts(name, BATCHED)}
        found = self.function(**(columns | taken))
        count = len(rows)
        return _awaited(found, count) if inspect.isawaitable(found) else _listed(found, count)

    def _accepts(self, name: str, also: frozenset[str] = frozenset()) -> bool:
        accepted = self.accepted_fields
        return name != IS_CHAT and (accepted is None or name in accepted | also)


def _prompt(row: RewardRow) -> Any:
    return row.fields["messages"] if row.fields.get(IS_CHAT) else row.prompt


def _completion(row: RewardRow) -> Any:
    is_chat = row.fields.get(IS_CHAT)
    return [{"role": "assistant", "content": row.completion}] if is_chat else row.completion


def _listed(found: Any, count: int) -> list[Any]:
    if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__len__"):
        raise UserError(
            f"returned a {type(found).__name__}, not a list with one reward per completion."
        )
    if len(found) != count:
        raise UserError(f"returned {len(found)} rewards for {count} completions.")
    return list(found)


async def _awaited(found: Awaitable[Any], count: int) -> list[Any]:
    return _listed(await found, count)


async def _first(found: Awaitable[list[Any]]) -> Any:
    return (await found)[0]


def score_row(function: RewardFunction, row: RewardRow, runner: asyncio.Runner) -> RewardResult:
    """Score one row outside of an event loop; ``runner`` is for a plain function's awaitable."""

    async def awaited(result: Awaitable[Any]) -> Any:
        return await result

    with _one_process():
        try:
            result = function(row.prompt, row.completion, row.fields)
            return to_result(runner.run(awaited(result)) if inspect.isawaitable(result) else result)
        except BaseException as error:  # sys.exit() in a row's scoring must not end the process
            return _failed_by(error, function)


def score_rows(
    function: RewardFunction, rows: Sequence[RewardRow], runner: asyncio.Runner
) -> list[RewardResult]:
    """Score rows in one call of a batched function; if that fails, each row separately."""
    if function.is_batched and len(rows) > 1:
        with _one_process(), contextlib.suppress(BaseException):
            return [to_result(value) for value in function.of_rows(rows)]
    return [score_row(function, row, runner) for row in rows]


async def score_async(function: RewardFunction, row: RewardRow) -> RewardResult:
    with _one_process():
        try:
            return to_result(await function(row.prompt, row.completion, row.fields))
        except BaseException as error:  # as above; and a row may cancel itself
            return _failed_by(error, function)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Where the function forked, one of the two has to answer."""
    own = os.getpid()
    yield
    if os.getpid() != own:
        os._exit(0)


def _failed_by(error: BaseException, function: RewardFunction) -> RewardResult:
    if isinstance(error, UserError):
        return failed(str(error), spent=_exhausted(error))
    code = getattr(inspect.unwrap(function.function), "__code__", None)
    place = error_place(error, Path(code.co_filename).parent if code else None)
    return failed(f"{error_text(error)} ({place})", spent=_exhausted(error))


def _exhausted(error: BaseException | None) -> str | None:
    """What the process has no more of, by an error or its causes: later rows will meet it again."""
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


def to_result(result: Any) -> RewardResult:
    """Read what a reward function returned: a number, None, or a dict with ``reward`` and metrics.

    Next to ``reward`` a dict holds numbers, which become metrics, and perhaps ``answer``: what the
    completion answered, or None if it stated none. Metrics that are not finite numbers are
    dropped; the reward still counts. A ``reward`` of None means that the row cannot be scored; then
    ``error`` may say why. ``steps`` may hold rewards by the id of the answer that earned them, with
    or without a ``reward`` for the last one. Raises UserError for a reward that is not a number.
    """
    if result is None:
        return failed("returned None")
    if not isinstance(result, Mapping):
        return RewardResult(reward=_number("the reward", result))
    result = dict(result)
    steps = result.pop("steps") if isinstance(result.get("steps"), Mapping) else {}
    if steps:
        return _with_steps(result, steps)
    if "reward" not in result:
        raise UserError(f"returned a dict without 'reward' (it has {sorted(map(str, result))}).")
    rest = {str(key): value for key, value in result.items() if key != "reward"}
    if result["reward"] is None:
        return failed(str(rest.get("error", "returned a reward of None")))
    reward = _number("the reward", result["reward"])
    answer = None
    if "answer" in rest:
        answer = "" if (stated := rest.pop("answer")) is None else str(stated)
    metrics, dropped = dict[str, float](), dict[str, str]()
    for key, value in rest.items():
        try:
            metrics[key] = _number("it", value)
        except UserError as error:
            dropped[key] = str(error)
    return RewardResult(reward=reward, metrics=metrics, answer=answer, dropped=dropped)


def _with_steps(result: Mapping[str, Any], given: Mapping[str, Any]) -> RewardResult:
    steps: dict[str, float] = {}
    for name, value in given.items():
        try:
            steps[str(name)] = _number("the reward of an answer", value)
        except UserError as error:
            raise UserError(f"{error}\n{name}") from error
    if "reward" in result:
        rest = to_result(result)
        if rest.reward is None:
            return rest
        steps[""] = rest.reward
    else:
        rest = to_result(dict(result) | {"reward": 0.0})
    return replace(rest, reward=_number("the reward", sum(steps.values())), steps=steps)


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
