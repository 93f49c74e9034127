"""A calculator for a model whose chat template has no tools; calling it earns a little, too."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_like.environments.protocol import Action, Observation, StepResult
from nemo_like.environments.tools import Tools
from nemo_like.rewards.math.reward import reward

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "23 * 41"}}\n</tool_call>'
EXAMPLE = [
    {"role": "user", "content": "Solve the following multiplication: 23 * 41."},
    {"role": "assistant", "content": CALL},
]


class Calculator(Tools):
    """One conversation about a row with an ``answer``."""

    def __init__(self, call: float = 0.2) -> None:
        """``call``: the reward of the first call that can be computed; a right answer earns 1."""
        super().__init__(in_messages=True)
        self.call = call

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin with the description of the calculator and an example of a call."""
        self.row, self.called = row, False
        described, *question = super().reset(row).messages or ()
        return Observation(messages=[described, *EXAMPLE, *question])

    async def step(self, action: Action) -> StepResult:
        """Compute a call, or score the answer."""
        result = await super().step(action)
        count = result.metrics
        works = count["tool_calls"] > count["failed_calls"] and not self.called
        fields = {**self.row, "completion": action.text}
        right = (reward(**fields)["reward"] or 0.0) if result.done else 0.0
        self.called = self.called or works
        metrics = {
            **count,
            "called": works,
            "right": right,
            "right_after_call": right * self.called,
        }
        return replace(result, reward=self.call * works + right, metrics=metrics)
