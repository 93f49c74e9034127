"""A calculator for a model whose chat template has no tools; calling it earns a little, too."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_like.environments.protocol import Action, Observation, StepResult
from nemo_like.environments.tools import Tools
from nemo_like.rewards.math.reward import reward

QUESTION = "Solve the following multiplication: {}. Give only the result as your final answer."
CALL = '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
EXAMPLES = [
    [
        {"role": "user", "content": QUESTION.format(product)},
        {"role": "assistant", "content": CALL.format(product)},
    ]
    for product in ("23 * 41", "112 * 34", "67 * 89")
]


class Calculator(Tools):
    """One conversation about a row with an ``answer``."""

    def __init__(self, call: float = 0.2, examples: int = 2) -> None:
        """``call``: the reward of the first call that can be computed; a right answer earns 1.
        ``examples``: of calls, in the prompt."""
        super().__init__(in_messages=True)
        self.call = call
        self.examples = [one for pair in EXAMPLES[:examples] for one in pair]

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin with the description of the calculator and examples of calls."""
        self.row, self.called = row, False
        described, *question = list(super().reset(row).messages or [])
        return Observation(messages=[described, *self.examples, *question])

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
