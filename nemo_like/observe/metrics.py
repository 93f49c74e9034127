"""Numbers that know how to combine: no batch size or rank count changes the result.

Names are ``area/name[_unit]``: ``train/loss``, ``rollout/reward``, ``time/refit_s``.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum


class Reduce(StrEnum):
    """How parts of one metric become one number."""

    mean = "mean"
    sum = "sum"
    max = "max"


@dataclass(frozen=True)
class Metric:
    """One number of one part of a step: a micro-batch, a rank, a validation batch.

    ``weight`` is how much the part measured (tokens, rows). A mean or maximum over nothing
    does not exist, so such a part of weight 0 does not count, whatever its value. A sum over
    nothing is 0: sums take no notice of weights.
    """

    value: float
    weight: float = 1.0
    reduce: Reduce = Reduce.mean

    def __post_init__(self) -> None:
        assert 0 <= self.weight < math.inf, f"weight {self.weight} is not a finite count"

    @property
    def counts(self) -> bool:
        """Whether this part measured anything."""
        return self.weight > 0 or self.reduce is Reduce.sum


Metrics = dict[str, Metric]


def mean_of_steps(steps: Sequence[Metrics]) -> Metrics:
    """Metrics of several optimizer steps in one record: means, also of sums; greatest maxima."""
    if len(steps) == 1:
        return steps[0]
    names = {name: metric.reduce for step in steps for name, metric in step.items()}
    combined: Metrics = {}
    for name, reduce in names.items():
        found = [step[name] for step in steps if name in step]
        mean = Metric(sum(metric.value for metric in found) / len(found), reduce=reduce)
        combined[name] = _combine(found) if reduce is Reduce.max else mean
    return combined


def merge(parts: Sequence[Metrics]) -> Metrics:
    """Combine the metrics of all parts of a step; up to rounding, any grouping gives the same.

    A name that only some parts report is combined over those. A name of which nothing was measured
    is dropped. NaN and infinity in any part that counts reach the result.

    >>> batches = [Metric(1.0, weight=2), Metric(1.0, weight=2), Metric(0.0, weight=1)]
    >>> merge([{"validation/accuracy": batch} for batch in batches])["validation/accuracy"].value
    0.8
    """
    merged: Metrics = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        metrics = [part[name] for part in parts if name in part]
        kinds = {metric.reduce for metric in metrics}
        assert len(kinds) == 1, f"{name} is reduced as {sorted(kinds)}; parts must agree"
        counted = [metric for metric in metrics if metric.counts]
        if counted:
            merged[name] = _combine(counted)
    return merged


def divided_sums(metrics: Metrics, by: float) -> Metrics:
    """Divide sums, as if each part had been divided before."""
    if by == 1:
        return metrics
    return {
        name: replace(one, value=float(one.value) / by) if one.reduce is Reduce.sum else one
        for name, one in metrics.items()
    }


def values(metrics: Metrics) -> dict[str, float]:
    """Plain numbers to log, in order; what was measured over nothing is left out."""
    return {name: float(metric.value) for name, metric in metrics.items() if metric.counts}


def _combine(metrics: Sequence[Metric]) -> Metric:
    if len(metrics) == 1:
        return metrics[0]  # v * w / w may differ from v in the last bit
    reduce = metrics[0].reduce
    numbers = [float(metric.value) for metric in metrics]
    weight = _total(metric.weight for metric in metrics)
    match reduce:
        case Reduce.mean:
            products = (metric.value * metric.weight for metric in metrics)
            return Metric(_total(products) / weight, weight)
        case Reduce.sum:
            return Metric(_total(numbers), weight, reduce)
        case Reduce.max:
            # max() keeps or loses a NaN depending on where it stands.
            poisoned = any(math.isnan(number) for number in numbers)
            return Metric(math.nan if poisoned else max(numbers), weight, reduce)


def _total(terms: Iterable[float]) -> float:
    """Correctly rounded sum; ``fsum`` alone raises where infinities meet instead of showing NaN."""
    numbers = list(terms)
    plain = sum(numbers)
    return math.fsum(numbers) if math.isfinite(plain) else plain


class Spans:
    """Wall-clock seconds by phase, for one thread; an outer span contains its inner ones."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        ended: Callable[[str, float, float], None] = lambda *_: None,
    ) -> None:
        """``ended`` gets the name of each span, when it began by ``time.time``, and its seconds."""
        self._clock, self._ended = clock, ended
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the duration of the block to ``name``, also if the block raises."""
        assert name not in self._running, f"span {name!r} inside itself would count twice"
        self._running.append(name)
        began, start = time.time(), self._clock()
        try:
            yield
        finally:
            self._running.pop()
            seconds = self._clock() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._ended(name, began, seconds)

    def read(self) -> Metrics:
        """``time/<name>_s`` of the spans that ended since ``pop``; the slowest rank wins."""
        return {
            f"time/{name}_s": Metric(seconds, reduce=Reduce.max)
            for name, seconds in self._seconds.items()
        }

    def pop(self) -> Metrics:
        """``read``, and start anew."""
        found, self._seconds = self.read(), {}
        return found
