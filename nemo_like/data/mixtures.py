"""The order of rows that are given by passes, and of rows of several parts by weight."""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Generic, Self, TypeVar

from nemo_like.data.loader import PromptLoader
from nemo_like.errors import UserError
from nemo_like.observe.metrics import Metric, Metrics, Reduce

T = TypeVar("T")


class EpochLoader(PromptLoader[T]):
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
        super().__init__(rows, fingerprint=fingerprint, seed=seed, shuffle=shuffle)
        self._batch_size = batch_size
        self._num_epochs = num_epochs
        self.steps_per_epoch: int = math.ceil(len(rows) / batch_size)
        """Batches of one whole pass."""

    @property
    def epochs_done(self) -> float:
        """Passes made so far, the current one by its share of rows."""
        return self.epoch + 1 - self.rows_left / len(self._rows)

    @property
    def steps_left(self) -> int | None:
        """Batches from here to the end of the last pass; None: endless."""
        if self._num_epochs is None:
            return None
        later = self._num_epochs - 1 - self.epoch
        here = math.ceil(self.rows_left / self._batch_size)
        return max(0, here + later * self.steps_per_epoch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[T]:
        if self.rows_left == 0:
            self.start_next_epoch()
        if self._num_epochs is not None and self.epoch >= self._num_epochs:
            raise StopIteration
        return self.next_rows(min(self._batch_size, self.rows_left))


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
