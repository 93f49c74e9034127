"""Steps of a run on a clock: the run's own rule of admission, engines with a number of slots.

An engine works on ``slots`` completions at once, each as fast as any other; what begins later waits
for a slot. A step trains for as long as given.
"""

import heapq
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from nemo_like.rollout.ahead import Ahead

Draw = Callable[[random.Random], float]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A run; times in seconds."""

    groups: int
    """Of a step."""
    group_size: int
    engines: int
    slots: int
    """Completions that an engine works on at once."""
    train_s: float
    """Of a step, with its refit."""
    seconds: Draw
    """Of a completion."""
    lag: int = 0
    by_readiness: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Means over the steps of a simulated run, without its first ones."""

    step_s: float
    engines_idle: float
    """Share of slots and time without a completion."""
    trainer_idle: float
    staleness: float
    """Steps from a group's beginning to the one it trains in."""


@dataclass
class _Engines:
    work: Workload
    draw: random.Random
    now: float = 0.0
    busy: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = [[0.0] * self.work.slots for _ in range(self.work.engines)]

    def begin(self, group: int) -> Any:
        """Give each completion the slot of its engine that is free first."""
        free, ends = self.free[group % self.work.engines], []
        for _ in range(self.work.group_size):
            seconds = self.work.seconds(self.draw)
            ends.append(max(self.now, free[0]) + seconds)
            heapq.heapreplace(free, ends[-1])
            self.busy += seconds
        self.ends[group] = max(ends)
        return SimpleNamespace(refs={group: 0})

    def wait(self, calls: Collection[Any], enough: Callable[[Any], bool]) -> list[list[Any]]:
        """Let time pass until enough groups have finished; see ``Generation.results``."""
        groups = [next(iter(call.refs)) for call in calls]
        times = sorted(
            {self.now, *(end for group in groups if (end := self.ends[group]) > self.now)}
        )

        def is_enough(time: float) -> bool:
            return enough({group for group in groups if self.ends[group] <= time})

        self.now = times[bisect_left(times, True, key=is_enough)]
        return [[group] if self.ends[group] <= self.now else [] for group in groups]


def simulate(work: Workload, steps: int = 40, seed: int = 0) -> Outcome:
    """Run ``steps`` after the first ones, which begin with idle engines."""
    engines, first = _Engines(work, random.Random(seed)), max(3, 2 * work.lag)
    ahead = Ahead(work.lag, work.groups, steps + first + work.lag, work.by_readiness)
    groups, began, ages, start, busy = 0, dict[int, int](), 0, 0.0, 0.0
    for step in range(1, steps + first + 1):
        if step == first + 1:
            start, busy = engines.now, engines.busy
        for _ in range(ahead.room(step, work.groups)):
            ahead.add(step, groups, engines.begin(groups))
            began[groups] = step
            groups += 1
        used = ahead.next(step, work.groups, engines.wait)
        ages += sum(step - began[one.group] for one in used) if step > first else 0
        engines.now += work.train_s
    elapsed = engines.now - start
    return Outcome(
        step_s=elapsed / steps,
        engines_idle=max(0.0, 1 - (engines.busy - busy) / (elapsed * work.engines * work.slots)),
        trainer_idle=1 - steps * work.train_s / elapsed,
        staleness=ages / (steps * work.groups),
    )


def log_normal(median: float, spread: float = 0.9, most: float = 10.0) -> Draw:
    """A function that draws; none is longer than ``most`` medians."""
    return lambda draw: median * min(math.exp(spread * draw.gauss(0, 1)), most)
