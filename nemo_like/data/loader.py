"""The order in which rows are used, as a position that can be saved.

Loaders live in the driver, which deals each batch's rows to ranks: no rank can repeat another's.
"""

import logging
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from nemo_like.observe.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class RowLoader(Protocol[T_co]):
    """What deals out rows without end."""

    @property
    def num_drawn(self) -> int:
        """Rows that were given out since the beginning."""
        ...

    def next_rows(self, count: int) -> Sequence[T_co]:
        """The next ``count`` rows."""
        ...

    def state(self) -> dict[str, Any]:
        """The position, and the data set that it belongs to."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        ...

    def pop_metrics(self) -> Metrics:
        """What was given out since the last call."""
        ...


class GroupFeed(Generic[T]):
    """Numbered rows that stay in use for some time; the saved state covers only used-up rows.

    A resumed run draws all others again, with the same numbers.
    """

    def __init__(self, loader: RowLoader[T]) -> None:
        self.loader = loader
        self._draws: deque[tuple[int, int, dict[str, Any]]] = deque()
        """First number and size of each draw with rows still in use, and the position before it."""
        self._used = set[int]()
        """Numbers of used-up rows in these draws."""
        self._next = 0
        """The number of the next row that is drawn for the first time."""
        self._again: deque[tuple[int, T]] = deque()

    def draw(self, count: int) -> list[tuple[int, T]]:
        """The next rows and their numbers."""
        rows = [self._again.popleft() for _ in range(min(count, len(self._again)))]
        return rows + self._draw(count - len(rows)) if len(rows) < count else rows

    def _draw(self, count: int) -> list[tuple[int, T]]:
        first, self._next = self._next, self._next + count
        self._draws.append((first, count, self._position()))
        return list(enumerate(self.loader.next_rows(count), start=first))

    def use_up(self, numbers: Iterable[int]) -> None:
        """Mark rows as used up."""
        self._used.update(numbers)
        while self._draws and self._used.issuperset(whole := range(*self._span())):
            self._draws.popleft()
            self._used.difference_update(whole)

    @property
    def first_open(self) -> int:
        """All rows before this one are used up."""
        return self._draws[0][0] if self._draws else self._next

    @property
    def used(self) -> tuple[int, ...]:
        """Later rows that are used up, too."""
        return tuple(self._used)

    def _span(self) -> tuple[int, int]:
        first, count, _ = self._draws[0]
        return first, first + count

    def state(self) -> dict[str, Any]:
        """The position of the oldest draw still in use, and the rows since then that are used up.

        It includes the sizes of draws, since a mixture's rows depend on them.
        """
        if not self._draws:
            return self._position() | {"first": self._next}
        sizes, used = [count for _, count, _ in self._draws], sorted(self._used)
        return self._draws[0][2] | {"first": self.first_open, "draws": sizes, "used": used}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Of other rows, which start over, numbers are new."""
        self.loader.load_state(state)
        at, sizes = self.loader.num_drawn, state.get("draws", ())
        self._next = state.get("first", at)  # older states have none
        if state.get("num_drawn", at) != at:
            self._next += sum(sizes)
            return
        drawn = [row for count in sizes for row in self._draw(count)]
        self._used = {number for number, _ in drawn}.intersection(state.get("used", ()))
        self._again = deque(row for row in drawn if row[0] not in self._used)

    def _position(self) -> dict[str, Any]:
        return self.loader.state() | {"num_drawn": self.loader.num_drawn}


class PromptLoader(Generic[T]):
    """Endless passes over rows, each in its own order; a batch may span two passes.

    The order of a pass depends on seed and pass number only, so a position is two integers.
    """

    def __init__(
        self, rows: Sequence[T], *, fingerprint: str, seed: int | str, shuffle: bool
    ) -> None:
        """``fingerprint`` tells whether a saved position belongs to these rows."""
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    @property
    def epoch(self) -> int:
        """Number of the current pass, from 0."""
        return self._epoch

    @property
    def num_drawn(self) -> int:
        """Rows that were given out since the beginning."""
        return self._epoch * len(self._rows) + self._position

    @property
    def rows_left(self) -> int:
        """Rows of the current pass that are still to come."""
        return len(self._rows) - self._position

    def start_next_epoch(self) -> None:
        """Leave out what is left of the current pass."""
        self._epoch += 1
        self._position = 0
        self._order = self._epoch_order()

    def next_rows(self, count: int) -> list[T]:
        """The next ``count`` rows."""
        taken: list[T] = []
        while len(taken) < count:
            if self.rows_left == 0:
                self.start_next_epoch()
            end = min(self._position + count - len(taken), len(self._rows))
            taken += [self._rows[i] for i in self._order[self._position : end]]
            self._position = end
        return taken

    def pop_metrics(self) -> Metrics:
        """None: steps and rows say it all."""
        return {}

    def state(self) -> dict[str, Any]:
        """The position, and the data set that it belongs to."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self._fingerprint,
            "seed": self._seed,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; with other rows or another seed, at their beginning."""
        if (state.get("fingerprint"), state.get("seed")) != (self._fingerprint, self._seed):
            logger.warning(
                "The checkpoint's data position belongs to other rows or another seed; this data "
                "starts at its beginning."
            )
            return
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order
