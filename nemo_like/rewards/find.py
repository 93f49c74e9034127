"""Find and check reward functions by name."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

from nemo_like.config.environment import JUDGE, REWARDS, EnvironmentConfig
from nemo_like.errors import UserError
from nemo_like.rewards.function import BATCHED, RewardFunction

_KEY = "environment.reward"
_OWN = frozenset({"prompt", "completion"})
MOST_REQUESTS = 32
"""Of a run to a judge, under way at once."""
_OF_TRL = frozenset({"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"})


def resolve_reward(spec: str, judge: Mapping[str, Any] | None = None) -> RewardFunction:
    """The function that ``spec`` names; UserError if it cannot be called with a row by name.

    ``judge``: settings of the judge, in case ``spec`` names it.
    """
    if spec == JUDGE:
        found = REWARDS.load(_KEY, spec)(judge or {})
        return RewardFunction(spec, found, None, found.required_fields, is_async=True, queues=True)
    function = REWARDS.load(_KEY, spec)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"{_KEY}={spec} has no readable signature.") from error
    parameters = signature.parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p for p in parameters if p.default is p.empty}
    is_batched = "completions" in named or ("prompts" in named and not named & _OWN)
    own = BATCHED if is_batched else _OWN
    fits = (takes_all or named >= own) and not (is_batched and named & _OWN)
    if not fits or any(p.kind is p.POSITIONAL_ONLY for p in needed):
        raise UserError(
            f"{_KEY}={spec} takes {signature}; write def reward(prompt, completion, **fields) for "
            "one completion, or def reward(prompts, completions, **columns) for lists of them, as "
            "in TRL."
        )
    required = {p.name for p in needed} & named - own - {"messages"}
    if is_batched and (absent := sorted(required & _OF_TRL)):
        raise UserError(
            f"{_KEY}={spec} needs {', '.join(absent)}, which only TRL's trainer has; give it a "
            "default."
        )
    return RewardFunction(
        spec,
        function,
        accepted_fields=None if takes_all else frozenset(named - own),
        required_fields=frozenset(required),
        is_async=any(map(inspect.iscoroutinefunction, (function, type(function).__call__))),
        is_batched=is_batched,
    )


def reward_spec(environment: EnvironmentConfig, num_processes: int = 1) -> str:
    """A text from which ``load_reward`` makes an environment's reward.

    ``num_processes``: those of the whole run, which share requests to a judge.
    """
    if not environment.rewards and not environment.judges:
        return environment.reward
    judge = environment.judge.model_dump() | {"timeout_s": environment.timeout_s}
    judge["max_requests"] = environment.rows_at_once or max(1, MOST_REQUESTS // num_processes)
    parts = {name: part.model_dump() for name, part in environment.rewards.items()}
    return json.dumps({"reward": environment.reward, "rewards": parts, "judge": judge})


def load_reward(spec: str) -> RewardFunction:
    """The reward that ``reward_spec`` describes; UserError says why it cannot be used."""
    if not spec.startswith("{"):
        return resolve_reward(spec)
    settings = json.loads(spec)
    if settings["rewards"]:
        from nemo_like.rewards.several import combined

        return combined(settings["rewards"], settings["judge"])
    return resolve_reward(settings["reward"], settings["judge"])
