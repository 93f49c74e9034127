"""What a reward process gets for a row, and what it answers."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST = 3e38
"""Nearly float32's largest number: what losses compute with."""

IS_CHAT = "__chat__"
"""Field that marks a row with messages as its prompt, for functions that need to know."""


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """The reward of one completion, or the reason why there is none.

    ``reward`` is None when it failed (``error`` says how): such a row is masked and counted, never
    taken for a wrong answer.
    """

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    answer: str | None = None
    """The completion's answer, to recognise equal answers; empty if it stated none. None if the
    environment does not say."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Metrics that are left out, and why."""
    steps: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by the id of the completion that earned them; the empty id stands for the
    last one. Empty: the whole reward belongs to the last completion."""
    spent: str | None = None
    """Why the reward process should be replaced, though it still works; the pool reads it."""


class RewardRow(NamedTuple):
    """A row as it reaches a reward process."""

    id: str
    """Random, and new for every row: only a result that repeats it is taken for this row's."""
    prompt: str
    completion: str
    fields: dict[str, Any]


def failed(why: str, spent: str | None = None) -> RewardResult:
    """The result of a row that could not be scored."""
    return RewardResult(reward=None, error=why, spent=spent)
