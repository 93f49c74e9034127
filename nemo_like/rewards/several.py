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
            result |= {f"{name}/{metric}": number for metric, number in one.metrics.items()}
            result[f"{keys.REWARD_OF}{name}"] = one.reward
            if one.answer is not None:
                result.setdefault("answer", one.answer)
        return result if len(result) > 1 else {"reward": None, "error": "no reward applies"}

    def plain(prompt: str, completion: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return total({name: one(prompt, completion, fields) for name, one in functions.items()})

    async def awaiting(prompt: str, completion: str, fields: Mapping[str, Any]) -> dict[str, Any]:
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
        by_name=False,
        queues=any(one.queues for one in functions.values()),
    )
