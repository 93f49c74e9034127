"""Several rewards in place of one, by weight: ``environment.rewards``."""

import inspect
from collections.abc import Mapping
from typing import Any

from nemo_like.batch import keys
from nemo_like.errors import UserError
from nemo_like.rewards.find import resolve_reward
from nemo_like.rewards.function import RewardFunction, to_result


def combined(
    parts: Mapping[str, Mapping[str, Any]], judge: Mapping[str, Any] | None = None
) -> RewardFunction:
    """One function that combines several by weight; see ``environment.rewards``."""
    functions = {name: resolve_reward(part["function"], judge) for name, part in parts.items()}

    def total(found: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {"reward": 0.0}
        for name, value in found.items():
            if value is None and functions[name].is_batched:  # TRL: it does not apply to this row
                continue
            one = to_result(value)
            if one.reward is None:
                raise UserError(f"{name}: {one.error}")
            result["reward"] += parts[name].get("weight", 1) * one.reward
            numbers = one.metrics | dict.fromkeys(one.dropped, float("nan"))  # which is told
            result |= {f"{name}/{metric}": number for metric, number in numbers.items()}
            result[f"{keys.REWARD_OF}{name}"] = one.reward
            if one.answer is not None:
                result.setdefault("answer", one.answer)
        return result if len(result) > 1 else {"reward": None, "error": "no reward applies"}

    async def awaited(found: Mapping[str, Any]) -> dict[str, Any]:
        return total({k: await v if inspect.isawaitable(v) else v for k, v in found.items()})

    def call(prompt: str, completion: str, fields: Mapping[str, Any]) -> Any:
        found = {name: one(prompt, completion, fields) for name, one in functions.items()}
        return awaited(found) if any(map(inspect.isawaitable, found.values())) else total(found)

    return RewardFunction(
        ", ".join(one.spec for one in functions.values()),
        call,
        accepted_fields=None,
        required_fields=frozenset().union(*(one.required_fields for one in functions.values())),
        is_async=any(one.is_async for one in functions.values()),
        by_name=False,
        queues=any(one.queues for one in functions.values()),
    )
