"""The order in which rows are used, as a position that can be saved.

Loaders live in the driver, which deals each batch's rows to ranks: no rank can repeat another's.
"""

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Generic, Protocol, Self, TypeVar

from nemo_like.errors import UserError
from nemo_like.observe.metrics import Metric, Metrics, Reduce

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


class GroupFeed(Generic[T]):
    """Numbered rows that stay in use for some time; the saved state covers only used-up rows.

    A resumed run draws all others again, with the same numbers.
    """

    def __init__(self, loader: "PromptLoader[T] | MixtureLoader[T]") -> None:
        self.loader = loader
        self._draws: deque[tuple[int, int, dict[str, Any]]] = deque()
        """First number and size of each draw with rows still in use, and the position before it."""
        self._used = set[int]()
        """Numbers of used-up rows in these draws."""
        self._again: deque[tuple[int, T]] = deque()

    def draw(self, count: int) -> list[tuple[int, T]]:
        """The next rows and their numbers."""
        rows = [self._again.popleft() for _ in range(min(count, len(self._again)))]
        return rows + self._draw(count - len(rows)) if len(rows) < count else rows

    def _draw(self, count: int) -> list[tuple[int, T]]:
        first = self.loader.num_drawn
        self._draws.append((first, count, self.loader.state()))
        return list(enumerate(self.loader.next_rows(count), start=first))

    def use_up(self, numbers: Iterable[int]) -> None:
        """Mark rows as used up."""
        self._used.update(numbers)
        while self._draws and self._used.issuperset(whole := range(*self._span())):
            self._draws.popleft()
            self._used.difference_update(whole)

    @property
    def used(self) -> tuple[int, ...]:
        """Rows used up while older ones are still in use."""
        return tuple(self._used)

    @property
    def again(self) -> tuple[int, ...]:
        """Rows that a resumed run draws again."""
        return tuple(number for number, _ in self._again)

    def _span(self) -> tuple[int, int]:
        first, count, _ = self._draws[0]
        return first, first + count

    def state(self) -> dict[str, Any]:
        """The position of the oldest draw still in use, and the rows since then that are used up.

        It includes the sizes of draws, since a mixture's rows depend on them.
        """
        if not self._draws:
            return self.loader.state()
        sizes = [count for _, count, _ in self._draws]
        return self._draws[0][2] | {"draws": sizes, "used": sorted(self._used)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self.loader.load_state(state)
        drawn = [row for count in state.get("draws", ()) for row in self._draw(count)]
        self._used = {number for number, _ in drawn}.intersection(state.get("used", ()))
        self._again = deque(row for row in drawn if row[0] not in self._used)


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


class EpochLoader(Generic[T]):
    """Batches of ``batch_size`` rows, pass by pass for ``num_epochs`` passes; none spans two.

    The last batch of a pass has the rows that are left, and no other. A position is one of rows, so
    it can be continued with another batch size.
    """

    def __init__(
        self,
        rows: Sequence[T],
        *,
        fingerprint: str,
        batch_size: int,
        num_epochs: int | None,
        seed: int,
        shuffle: bool,
    ) -> None:
        """``num_epochs`` None: endless passes."""
        self._batch_size = batch_size
        self._num_epochs = num_epochs
        self._passes = PromptLoader(rows, fingerprint=fingerprint, seed=seed, shuffle=shuffle)
        self._num_rows = len(rows)
        self.steps_per_epoch: int = math.ceil(len(rows) / batch_size)
        """Batches of one whole pass."""

    @property
    def epochs_done(self) -> float:
        """Passes made so far, the current one by its share of rows."""
        return self._passes.epoch + 1 - self._passes.rows_left / self._num_rows

    @property
    def steps_left(self) -> int | None:
        """Batches from here to the end of the last pass; None: endless."""
        if self._num_epochs is None:
            return None
        later = self._num_epochs - 1 - self._passes.epoch
        here = math.ceil(self._passes.rows_left / self._batch_size)
        return max(0, here + later * self.steps_per_epoch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[T]:
        if self._passes.rows_left == 0:
            self._passes.start_next_epoch()
        if self._num_epochs is not None and self._passes.epoch >= self._num_epochs:
            raise StopIteration
        return self._passes.next_rows(min(self._batch_size, self._passes.rows_left))

    def state(self) -> dict[str, Any]:
        """See ``PromptLoader.state``."""
        return self._passes.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """See ``PromptLoader.load_state``."""
        self._passes.load_state(state)


class MixtureLoader(Generic[T]):
    """Endless rows of several parts by weight, each part pass by pass in orders of its own.

    After every batch each part has had its exact share of all rows so far, rounded: weights of .6
    and .4 give 6 and 4 of every 10.
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[T]],
        weights: Mapping[str, float],
        *,
        fingerprint: Callable[[Sequence[T]], str],
        batch_size: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        """``weights`` above 0. Raises UserError for a part without rows."""
        for name, rows in parts.items():
            if not rows:
                raise UserError(f"data.train.{name}: no row is left; take this part out.")
        self._parts = {
            name: PromptLoader(
                rows, fingerprint=fingerprint(rows), seed=f"{seed}/{name}", shuffle=shuffle
            )
            for name, rows in parts.items()
        }
        self._sizes = {name: len(rows) for name, rows in parts.items()}
        exact = {name: Fraction(str(weights[name])) for name in parts}
        self._shares = {name: one / sum(exact.values()) for name, one in exact.items()}
        self._taken = dict.fromkeys(parts, 0)
        self._unlogged = dict.fromkeys(parts, 0)
        self._batch_size = batch_size
        self.steps_per_epoch: int = math.ceil(sum(self._sizes.values()) / batch_size)
        """Batches with as many rows as all parts have."""
        self.steps_left: int | None = None

    @property
    def num_drawn(self) -> int:
        """See ``RowLoader``."""
        return sum(part.num_drawn for part in self._parts.values())

    @property
    def epochs_done(self) -> float:
        """Rows so far, by the number that all parts have."""
        return sum(self._taken.values()) / sum(self._sizes.values())

    def __next__(self) -> list[T]:
        return self.next_rows(self._batch_size)

    def next_rows(self, count: int) -> list[T]:
        """The next ``count`` rows: the part that lacks most of its share comes first."""
        total = sum(self._taken.values()) + count
        missing = {name: one * total - self._taken[name] for name, one in self._shares.items()}
        rows: list[T] = []
        for _ in range(count):
            name = max(missing, key=missing.__getitem__)
            missing[name] -= 1
            self._taken[name] += 1
            self._unlogged[name] += 1
            rows += self._parts[name].next_rows(1)
        return rows

    def pop_metrics(self) -> Metrics:
        """Rows of each part since the last call, and its passes so far."""
        found: Metrics = {}
        for name, part in self._parts.items():
            found[f"data/{name}/num_rows"] = Metric(self._unlogged[name], reduce=Reduce.sum)
            found[f"data/{name}/epoch"] = Metric(
                part.epoch + 1 - part.rows_left / self._sizes[name]
            )
        self._unlogged = dict.fromkeys(self._parts, 0)
        return found

    def state(self) -> dict[str, Any]:
        """The position in each part, and how much of its share it has had."""
        parts = {name: part.state() for name, part in self._parts.items()}
        shares = {name: str(share) for name, share in self._shares.items()}
        return {"parts": parts, "taken": dict(self._taken), "shares": shares}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue each part at its position; new weights count from here on."""
        for name, part in self._parts.items():
            part.load_state(state.get("parts", {}).get(name, {}))
        if state.get("shares") == {name: str(share) for name, share in self._shares.items()}:
            self._taken = dict(state["taken"])
