"""A grader turns a prompt, a completion and the row's fields into a reward."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The reward of one completion, or the reason why there is none.

    ``reward`` is None when grading failed (``error`` says how): such a row is masked and counted,
    never taken for a wrong answer.
    """

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    answer: str | None = None
    """What the completion answered, by which equal answers are told; empty if it stated none. None
    if the environment does not say."""


Verdict = tuple[float | None, dict[str, float], str | None, str | None]
"""Reward, metrics, error and answer of a ``Grade``, as they leave a grading process."""


class Environment(Protocol):
    """Grades completions; safe for many concurrent calls from one event loop."""

    async def grade(self, prompt: str, completion: str, fields: Mapping[str, Any]) -> Grade:
        """Grade one completion within the environment's time limit; never raises for one row.

        ``fields``: the row's own, and ``messages``, all of the prompt.
        """
        ...

    def shutdown(self) -> None:
        """End the grading processes."""
        ...
