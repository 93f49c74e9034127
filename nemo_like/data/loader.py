"""The order in which rows are used, as a position that can be saved.

Loaders live in the driver, which deals each batch's rows to ranks: no rank can repeat another's.
"""

import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

from nemo_like.data.datasets import Row, fingerprint
from nemo_like.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PromptLoader:
    """Endless passes over rows, each in its own order; a batch may span two passes.

    The order of a pass depends on seed and pass number only, so a position is two integers.
    """

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint(rows)
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    @property
    def epoch(self) -> int:
        """Number of the current pass, from 0."""
        return self._epoch

    @property
    def rows_left(self) -> int:
        """Rows of the current pass that are still to come."""
        return len(self._rows) - self._position

    def start_next_epoch(self) -> None:
        """Leave out what is left of the current pass."""
        self._epoch += 1
        self._position = 0
        self._order = self._epoch_order()

    def next_rows(self, count: int) -> list[Row]:
        """The next ``count`` rows."""
        taken: list[Row] = []
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


class EpochLoader:
    """Batches of ``batch_size`` rows, pass by pass for ``num_epochs`` passes; none spans two.

    The last batch of a pass has the rows that are left, and no other, unless ``drop_last`` leaves
    it out. A position is one of rows, so it can be continued with another batch size.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        batch_size: int,
        num_epochs: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        """Raises UserError if no pass has a batch."""
        self._batch_size = batch_size
        self._num_epochs = num_epochs
        self._smallest = batch_size if drop_last else 1
        self._passes = PromptLoader(rows, seed=seed, shuffle=shuffle)
        whole, left = divmod(len(rows), batch_size)
        self.steps_per_epoch: int = whole + (left >= self._smallest)
        """Batches of one whole pass."""
        if self.steps_per_epoch == 0:
            raise UserError(
                f"The batch size of {batch_size} leaves no batch of the {len(rows)} rows, because "
                "an incomplete one is dropped; use a smaller batch, or keep the last one."
            )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Row]:
        if self._passes.rows_left < self._smallest:
            self._passes.start_next_epoch()
        if self._passes.epoch >= self._num_epochs:
            raise StopIteration
        return self._passes.next_rows(min(self._batch_size, self._passes.rows_left))

    def state(self) -> dict[str, Any]:
        """See ``PromptLoader.state``."""
        return self._passes.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """See ``PromptLoader.load_state``."""
        self._passes.load_state(state)


class Prefetcher(Generic[T]):
    """``prepare(rows)`` of a loader's batches, the next one made in a thread during this one's use.

    ``state`` is the position after the batches handed out, not after those prepared: a run that is
    continued from it sees the prepared one. An error of the thread is raised where its batch would
    have been handed out, and again at each further call, because going on would leave out rows.
    """

    def __init__(self, loader: EpochLoader, prepare: Callable[[list[Row]], T]) -> None:
        self._loader = loader
        self._state = loader.state()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._batches = ((prepare(rows), loader.state()) for rows in loader)
        self._ahead: Future[tuple[T, dict[str, Any]] | None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        prepared = (self._ahead or self._start()).result()
        if prepared is None:
            raise StopIteration
        batch, self._state = prepared
        self._start()
        return batch

    def state(self) -> dict[str, Any]:
        """See ``PromptLoader.state``."""
        return self._state

    def load_state(self, state: dict[str, Any]) -> None:
        """See ``PromptLoader.load_state``. Before the first batch only."""
        assert self._ahead is None, "batches of the old position are prepared already"
        self._loader.load_state(state)
        self._state = self._loader.state()

    def close(self) -> None:
        """End the thread, after the batch it is at."""
        self._thread.shutdown()

    def _start(self) -> Future[tuple[T, dict[str, Any]] | None]:
        self._ahead = self._thread.submit(next, self._batches, None)
        return self._ahead
