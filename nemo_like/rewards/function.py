"""A reward function: found and checked, called on one row, and what it returned as a result.

Whatever happens to a row costs that row, or one of its metrics.
"""

import asyncio
import contextlib
import errno
import inspect
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Complex, Real
from pathlib import Path
from typing import Any

from nemo_like.batch import keys
from nemo_like.config.environment import REWARDS, EnvironmentConfig
from nemo_like.doors import error_place, error_text
from nemo_like.errors import UserError
from nemo_like.rewards.protocol import MOST, RewardResult, RewardRow, failed

_KEY = "environment.reward"
_OWN = {"prompt", "completion"}
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

    def __call__(self, prompt: str, completion: str, fields: Mapping[str, Any]) -> Any:
        """Call the function with those fields that it names; its result is not checked here."""
        missing = sorted(self.required_fields - fields.keys())
        if missing:
            raise UserError(f"the row lacks {', '.join(missing)}, which {self.spec} needs.")
        passed = {
            name: value
            for name, value in fields.items()
            if self.accepted_fields is None or name in self.accepted_fields
        }
        return self.function(**(passed | {"prompt": prompt, "completion": completion}))


def resolve_reward(spec: str) -> RewardFunction:
    """The function that ``spec`` names; UserError if it cannot be called with a row by name."""
    function = REWARDS.load(_KEY, spec)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"{_KEY}={spec} has no readable signature.") from error
    parameters = signature.parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p for p in parameters if p.default is p.empty}
    if any(p.kind is p.POSITIONAL_ONLY for p in needed) or not (takes_all or named >= _OWN):
        raise UserError(
            f"{_KEY}={spec} takes {signature}, but is called with prompt=…, completion=… and the "
            "row's fields; write def reward(prompt, completion, **fields)."
        )
    return RewardFunction(
        spec,
        function,
        accepted_fields=None if takes_all else frozenset(named - _OWN),
        required_fields=frozenset({p.name for p in needed} & named - _OWN - {"messages"}),
        is_async=any(map(inspect.iscoroutinefunction, (function, type(function).__call__))),
    )


def combined(parts: Mapping[str, Mapping[str, Any]]) -> RewardFunction:
    """One function of several, by name; see ``environment.rewards``."""
    functions = {name: resolve_reward(part["function"]) for name, part in parts.items()}

    def total(found: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {"reward": 0.0}
        for name, value in found.items():
            one = to_result(value)
            if one.reward is None:
                raise UserError(f"{name}: {one.error}")
            result["reward"] += parts[name].get("weight", 1) * one.reward
            result |= {f"{name}/{metric}": number for metric, number in one.metrics.items()}
            result[f"{keys.REWARD_OF}{name}"] = one.reward
            if one.answer is not None:
                result.setdefault("answer", one.answer)
        return result

    def plain(prompt: str, completion: str, **fields: Any) -> dict[str, Any]:
        return total({name: one(prompt, completion, fields) for name, one in functions.items()})

    async def awaiting(prompt: str, completion: str, **fields: Any) -> dict[str, Any]:
        found = {}
        for name, one in functions.items():
            value = one(prompt, completion, fields)
            found[name] = await value if inspect.isawaitable(value) else value
        return total(found)

    is_async = any(one.is_async for one in functions.values())
    return RewardFunction(
        ", ".join(one.spec for one in functions.values()),
        awaiting if is_async else plain,
        accepted_fields=None,
        required_fields=frozenset().union(*(one.required_fields for one in functions.values())),
        is_async=is_async,
    )


def reward_spec(environment: EnvironmentConfig) -> str:
    """What names a run's reward or rewards, for ``load_reward``."""
    return json.dumps(environment.rewards) if environment.rewards else environment.reward


def load_reward(spec: str) -> RewardFunction:
    """What ``reward_spec`` names; UserError says why it cannot be used."""
    return combined(json.loads(spec)) if spec.startswith("{") else resolve_reward(spec)


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
    ``error`` may be a text that says why. Raises UserError for a reward that is not a number.
    """
    if result is None:
        return failed("returned None")
    if not isinstance(result, Mapping):
        return RewardResult(reward=_number("the reward", result))
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
