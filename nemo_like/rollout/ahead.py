"""Sample groups ahead of training, with a bound on their age."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from nemo_like.config.sampling import SamplingRunConfig

if TYPE_CHECKING:  # a simulation of runs needs neither Ray nor torch
    from nemo_like.distributed.waiting import Pending
    from nemo_like.rollout.worker import RolloutResult

Calls: TypeAlias = "Sequence[Pending[RolloutResult]]"
Wait: TypeAlias = "Callable[[Calls, Callable[[Set[Any]], bool]], list[list[RolloutResult]]]"
"""See ``Generation.results``."""


@dataclass(eq=False)
class Group:
    """A group that is being sampled, or waits to train."""

    group: int
    last_step: int
    """The last step it may train in; after that its oldest token would be too old."""
    call: "Pending[RolloutResult]"
    result: "RolloutResult | None" = None


@dataclass
class Ahead:
    """At most (max_lag + 1) x groups per step, in the order they began."""

    max_lag: int
    per_step: int
    max_steps: int
    by_readiness: bool
    """Whether groups train as they finish, unless another would become too old."""

    def __post_init__(self) -> None:
        self._open: list[Group] = []

    @classmethod
    def of(cls, config: SamplingRunConfig) -> Self:
        """The bookkeeping of a run with lag."""
        per_step, by_readiness = config.loop.num_prompts_per_step, config.rollout_order == "ready"
        return cls(config.max_lag, per_step, config.max_steps, by_readiness)

    def room(self, step: int, count: int) -> int:
        """How many groups may begin now, in ``step``, which still needs ``count``."""
        ahead = min(self.max_lag, self.max_steps - step) * self.per_step
        return max(0, ahead + count - len(self._open))

    def place_of_next(self, step: int) -> tuple[int, int]:
        """The step in which the next group trains if none overtakes another, and its place."""
        later, place = divmod(len(self._open), self.per_step)
        return step + later, place

    def add(self, step: int, group: int, call: "Pending[RolloutResult]") -> None:
        """Add a group that begins with the weights of ``step``."""
        self._open.append(Group(group, step + self.max_lag, call))

    def next(self, step: int, count: int, wait: Wait) -> list[Group]:
        """Wait for the ``count`` groups that train in ``step``, and return them."""
        waiting = [one for one in self._open if one.result is None]
        calls = [one.call for one in waiting]

        def enough(done: Set[Any]) -> bool:
            return self._choice(step, count, done) is not None

        if not enough(frozenset()):
            for one, found in zip(waiting, wait(calls, enough), strict=True):
                one.result = found[0] if found else None
        chosen = self._choice(step, count)
        assert chosen is not None
        taken = set(chosen)
        self._open = [one for one in self._open if one not in taken]
        return chosen

    def _choice(self, step: int, count: int, done: Set[Any] = frozenset()) -> list[Group] | None:
        """The groups that train in ``step``; None if more have to finish first.

        ``done``: references of calls that have just finished. Each later step takes at least
        ``per_step`` groups, so the i-th remaining group trains i // per_step steps later.
        """
        finished = [
            one.result is not None or not done.isdisjoint(one.call.refs) for one in self._open
        ]
        if not self.by_readiness:
            return self._open[:count] if all(finished[:count]) else None
        chosen = [one for one, is_ready in zip(self._open, finished, strict=True) if is_ready]
        chosen = chosen[:count]
        taken = set(chosen)
        left = [one for one in self._open if one not in taken]
        late = any(step + 1 + i // self.per_step > one.last_step for i, one in enumerate(left))
        return chosen if len(chosen) == count and not late else None
