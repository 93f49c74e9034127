"""From ``environment.reward`` to a function: found, imported and checked before anything starts."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_like.config.sampling import REWARDS
from nemo_like.errors import UserError

_KEY = "environment.reward"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and the names of the row fields that it takes."""

    spec: str
    function: Callable[..., Any]
    accepted_fields: frozenset[str] | None
    """None: every field (the function has ``**fields``)."""
    required_fields: frozenset[str]
    """Fields without a default: a row that lacks one cannot be graded."""
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
    """Import the function that ``spec`` names; UserError says why it cannot be used."""
    return _checked(spec, REWARDS.load(_KEY, spec))


def _checked(spec: str, function: Callable[..., Any]) -> RewardFunction:
    """Read the signature; prompt and completion are passed by name, so that order is free."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"environment.reward={spec} has no readable signature.") from error
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    named = frozenset(p.name for p in parameters if p.kind in _NAMED)
    required = {p.name for p in parameters if p.default is p.empty and p.kind in _NAMED}
    positional_only = [
        p.name
        for p in parameters
        if p.kind is inspect.Parameter.POSITIONAL_ONLY and p.default is p.empty
    ]
    fits = not positional_only and (takes_all or {"prompt", "completion"} <= named)
    if not fits:
        raise UserError(
            f"environment.reward={spec} takes {inspect.signature(function)}, but is called with "
            "prompt=…, completion=… and the row's fields; write "
            "def reward(prompt, completion, **fields)."
        )
    own = {"prompt", "completion"}
    accepted = None if takes_all else named - own
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    required_fields = frozenset(required - own - {"messages"})
    return RewardFunction(spec, function, accepted, required_fields, is_async)
