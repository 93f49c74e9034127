"""A text game: find a number by asking whether it is higher or lower."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from nemo_like.environments.protocol import Action, Observation, StepResult

_NUMBER = re.compile(r"(?<!\d)-?\d{1,18}(?!\d)")


class Guess:
    """The reward is 1 at the first guess and falls to 0 with those that halving would not need."""

    def __init__(self, low: int = 1, high: int = 15) -> None:
        """The number is from ``low`` to ``high``; each row has one of its own."""
        self._low, self._high = low, high

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """Explain the game; the row's prompt only draws the number."""
        digest = hashlib.blake2b(str(row["prompt"]).encode(), digest_size=8).digest()
        count = self._high - self._low + 1
        self._secret = self._low + int.from_bytes(digest) % count
        self._most = 2 * count.bit_length()
        self._guesses = 0
        text = (
            f"I think of a number from {self._low} to {self._high}. Guess it: write a number, and "
            "I say higher or lower."
        )
        return Observation(messages=[{"role": "user", "content": text}])

    def step(self, action: Action) -> StepResult:
        """Compare the last number in the text."""
        self._guesses += 1
        found = _NUMBER.findall(action.text)
        if found and int(found[-1]) == self._secret:
            reward = max(0.0, 1 - (self._guesses - 1) / self._most)
            return StepResult(reward=reward, done=True, metrics={"found": 1})
        if self._guesses >= self._most:
            return StepResult(reward=0.0, done=True)
        if not found:
            said = "That is no number. Write a number."
        else:
            said = "Higher." if int(found[-1]) < self._secret else "Lower."
        return StepResult(messages=[{"role": "user", "content": said}], reward=0.0)
