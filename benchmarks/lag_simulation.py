"""What sampling ahead comes to, by simulation: the run's own rule of admission, and a clock.

    python benchmarks/lag_simulation.py --gpus 8 64 512 4096 --train-share 0.25

Completions are log-normal, at most ten times the median; an engine works on as many at once as a
step has for it, and a step trains for as long as given. A GPU more for training shortens that, a
GPU more for engines takes completions off the others.
"""

import argparse
import heapq
import json
import math
import random
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from nemo_like.rollout.ahead import Ahead


@dataclass(kw_only=True)
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
    seconds: Callable[[random.Random], float]
    """That a completion takes."""
    lag: int = 0
    by_readiness: bool = False


@dataclass(kw_only=True)
class Outcome:
    """Of a simulated run, its first steps left out."""

    step_s: float
    engines_idle: float
    trainer_idle: float
    staleness: float


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
        """Each completion takes the slot of its engine that is free first."""
        free, ends = self.free[group % self.work.engines], []
        for _ in range(self.work.group_size):
            seconds = self.work.seconds(self.draw)
            ends.append(max(self.now, free[0]) + seconds)
            heapq.heapreplace(free, ends[-1])
            self.busy += seconds
        self.ends[group] = max(ends)
        return SimpleNamespace(refs={group: 0})

    def wait(self, calls: Collection[Any], enough: Callable[[Any], bool]) -> list[list[Any]]:
        """Let time pass until enough groups have finished."""
        groups = [next(iter(call.refs)) for call in calls]
        times = sorted({self.now, *(self.ends[group] for group in groups)})
        times = times[times.index(self.now) :]

        def is_enough(time: float) -> bool:
            return enough({group for group in groups if self.ends[group] <= time})

        self.now = times[bisect_left(times, True, key=is_enough)]
        return [[group] if self.ends[group] <= self.now else [] for group in groups]


def simulate(work: Workload, steps: int = 40, seed: int = 0) -> Outcome:
    """Steps of a run, and what engines and trainer waited for."""
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
        engines_idle=1 - (engines.busy - busy) / (elapsed * work.engines * work.slots),
        trainer_idle=1 - steps * work.train_s / elapsed,
        staleness=ages / (steps * work.groups),
    )


def log_normal(median: float, spread: float = 0.9, most: float = 10.0) -> Any:
    """A function that draws."""
    return lambda draw: median * min(math.exp(spread * draw.gauss(0, 1)), most)


def main() -> None:
    """Every number of GPUs, split and lag, as lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--median-s", type=float, default=20.0, help="of a completion")
    parser.add_argument(
        "--train-share", type=float, default=0.25, help="GPU seconds of training per one of engines"
    )
    args = parser.parse_args()
    slots, group_size, draw = 32, 8, log_normal(args.median_s)
    mean = sum(map(draw, [random.Random(0)] * 4000)) / 4000
    for gpus in args.gpus:
        for lag in args.lags:
            for training in sorted({gpus // 8, gpus // 4, gpus // 2} - {0}):
                engines, groups = gpus - training, gpus * slots // group_size
                work = groups * group_size * mean / slots * args.train_share
                found = simulate(
                    Workload(
                        groups=groups,
                        group_size=group_size,
                        engines=engines,
                        slots=slots,
                        train_s=work / training,
                        seconds=draw,
                        lag=lag,
                    ),
                    steps=20 if gpus < 1000 else 6,
                )
                record = {"gpus": gpus, "training": training, "lag": lag, **vars(found)}
                sys.stdout.write(f"{json.dumps(record)}\n")


if __name__ == "__main__":
    main()
