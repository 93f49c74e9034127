"""Steps of a run on a clock: the run's own rule of admission, engines that share their speed.

An engine makes one more token of each of its completions at a time, the slower the more there are;
what begins beyond its slots waits for one. A step trains for as long as given.
"""

import heapq
import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
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
    """Seconds of a step's training, while engines go on."""
    refit_s: float = 0.0
    """Seconds of a refit, while engines stand still."""
    tokens: Draw
    """Draws the length of a completion."""
    token_s: Callable[[int], float]
    """Seconds of one more token of each of so many completions."""
    row_s: float = 0.0
    """Seconds for which an engine stops to read a prompt, and to read a completion again after a
    refit."""
    group_s: float = 0.0
    """Seconds from a group's last token until it can train."""
    shared: float = 0.0
    """Seconds that each second of training takes longer, and engines stand still, where these share
    a GPU with policy ranks: 1 if they take turns."""
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
class _Engine:
    work: Workload
    token_s: list[float]
    """See ``Workload``, by the number of completions."""
    now: float = 0.0
    tokens: float = 0.0
    """Length by now of a completion that began at time 0 and never ends."""
    busy: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)
    """Heap of completions: ``tokens`` at its end, and its group."""
    waiting: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def begin(self, group: int, tokens: float) -> None:
        if len(self.running) == self.work.slots:
            self.waiting.append((tokens, group))
        else:
            heapq.heappush(self.running, (self.tokens + tokens, group))
        self.now += self.work.row_s

    def ends(self) -> dict[int, float]:
        """When groups will end if no others begin."""
        running, waiting = self.running.copy(), self.waiting.copy()
        return replace(self, running=running, waiting=waiting).run(math.inf)

    def run(self, until: float) -> dict[int, float]:
        """Sample until then; returns when the last completion of each group ended meanwhile."""
        ends: dict[int, float] = {}
        running, waiting, now, tokens = self.running, self.waiting, self.now, self.tokens
        while running and now <= until:
            count = len(running)
            token_s, (end, group) = self.token_s[count], running[0]
            seconds = (end - tokens) * token_s
            if now + seconds > until:
                tokens += (until - now) / token_s
                self.busy += (until - now) * count
                now = until
                break
            now += seconds
            tokens = end
            self.busy += seconds * count
            ends[group] = now
            if waiting:
                most, group = waiting.popleft()
                heapq.heapreplace(running, (end + most, group))
            else:
                heapq.heappop(running)
        self.now, self.tokens = now, tokens
        return ends

    def stop(self, begin: float, seconds: float) -> dict[int, float]:
        """Sample until ``begin``, then stand still; running completions are read again."""
        ends = self.run(begin)
        self.now = max(self.now, begin) + seconds + self.work.row_s * len(self.running)
        return ends


class _Engines:
    def __init__(self, work: Workload) -> None:
        self.work, self.now = work, 0.0
        token_s = [0.0, *map(work.token_s, range(1, work.slots + 1))]
        self.all = [_Engine(work, token_s) for _ in range(work.engines)]
        self.ends: dict[int, float] = {}
        """When the last completion of each group ended, so far."""

    def begin(self, group: int, draw: random.Random) -> Any:
        for _ in range(self.work.group_size):
            self.all[group % self.work.engines].begin(group, self.work.tokens(draw))
        return SimpleNamespace(refs={group: 0})

    def wait(self, calls: Collection[Any], enough: Callable[[Any], bool]) -> list[list[Any]]:
        """Let time pass until enough groups have finished; see ``Generation.results``."""
        groups = [next(iter(call.refs)) for call in calls]
        ends = self.ends.copy()
        for engine in self.all:
            ends |= engine.ends()
        ready = {group: ends[group] + self.work.group_s for group in groups}
        times = sorted({self.now, *(time for time in ready.values() if time > self.now)})

        def is_enough(time: float) -> bool:
            return enough({group for group in groups if ready[group] <= time})

        self.now = times[bisect_left(times, True, key=is_enough)]
        return [[group] if ready[group] <= self.now else [] for group in groups]

    def train(self) -> None:
        """Sample on for the time of training, then stand still for a refit."""
        pause_s = self.work.refit_s
        for engine in self.all:
            self.ends |= engine.run(self.now)
        if any(engine.running for engine in self.all):
            pause_s += self.work.shared * self.work.train_s
        self.now += self.work.train_s
        for engine in self.all:
            self.ends |= engine.stop(self.now, pause_s)
        self.now += pause_s

    @property
    def busy(self) -> float:
        return sum(engine.busy for engine in self.all)


def simulate(work: Workload, steps: int = 40, seed: int = 0) -> Outcome:
    """Run ``steps`` after the first ones, which begin with idle engines."""
    engines, draw, first = _Engines(work), random.Random(seed), max(3, 2 * work.lag)
    ahead = Ahead(work.lag, work.groups, steps + first + work.lag, work.by_readiness)
    groups, began, ages, start, busy = 0, dict[int, int](), 0, 0.0, 0.0
    for step in range(1, steps + first + 1):
        if step == first + 1:
            start, busy = engines.now, engines.busy
        for _ in range(ahead.room(step, work.groups)):
            ahead.add(step, groups, engines.begin(groups, draw))
            began[groups] = step
            groups += 1
        used = ahead.next(step, work.groups, engines.wait)
        ages += sum(step - began[one.group] for one in used) if step > first else 0
        engines.train()
    elapsed = engines.now - start
    return Outcome(
        step_s=elapsed / steps,
        engines_idle=max(0.0, 1 - (engines.busy - busy) / (elapsed * work.engines * work.slots)),
        trainer_idle=max(0.0, 1 - steps * (work.train_s + work.refit_s) / elapsed),
        staleness=ages / (steps * work.groups),
    )


def log_normal(median: float, spread: float = 0.9, most: float = 10.0) -> Draw:
    """A function that draws; none is longer than ``most`` medians."""
    return lambda draw: median * min(math.exp(spread * draw.gauss(0, 1)), most)
