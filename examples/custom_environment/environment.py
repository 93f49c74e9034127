"""Two tries: a wrong answer is sent back once, and a right one then earns half."""

from collections.abc import Mapping
from typing import Any

from nemo_like.environments.protocol import Action, Observation, StepResult


class TwoTries:
    """One conversation about a row with an ``answer``."""

    def __init__(self, second: float = 0.5) -> None:
        """``second``: the reward of an answer that is right at the second try."""
        self.rewards = [1.0, second]

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin with the row's own messages."""
        self.prompt, self.answer = row["prompt"], row["answer"]
        self.tries = 0
        return Observation()

    def step(self, action: Action) -> StepResult:
        """Score an answer; ask again after the first wrong one."""
        self.tries += 1
        right = f"<answer>{self.answer}</answer>" in action.text
        if right or self.tries == len(self.rewards):
            reward = self.rewards[self.tries - 1] if right else 0.0
            return StepResult(reward=reward, done=True, metrics={"right": right})
        again = {"role": "user", "content": f"No. {self.prompt}"}
        return StepResult(messages=[again])
