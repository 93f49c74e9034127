"""The order in which rows are used, as a position that can be saved.

Loaders live in the driver, which deals each batch's rows to ranks: no rank can repeat another's.
"""

import logging
import math
import random
from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PromptLoader(Generic[T]):
    """Endless passes over rows, each in its own order; a batch may span two passes.

    The order of a pass depends on seed and pass number only, so a position is two integers.
    """

    def __init__(self, rows: Sequence[T], *, fingerprint: str, seed: int, shuffle: bool) -> None:
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
        if (state["fingerprint"], state["seed"]) != (self._fingerprint, self._seed):
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
