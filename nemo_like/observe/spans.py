"""Wall-clock seconds by phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nemo_like.observe.metrics import Metric, Metrics, Reduce


class Spans:
    """Stopwatch with names, for one thread.

    Spans may nest; each counts its whole duration, so an outer span contains its inner ones.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the duration of the block to ``name``, also if the block raises."""
        assert name not in self._running, f"span {name!r} inside itself would count twice"
        self._running.append(name)
        start = self._clock()
        try:
            yield
        finally:
            self._running.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def pop(self) -> Metrics:
        """``time/<name>_s`` of the spans that ended since the last call; the slowest rank wins."""
        finished, self._seconds = self._seconds, {}
        return {
            f"time/{name}_s": Metric(seconds, reduce=Reduce.max)
            for name, seconds in finished.items()
        }
