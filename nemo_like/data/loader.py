"""The order in which prompts are used, as a position that can be saved."""

import logging
import random
from collections.abc import Sequence
from typing import Any

from nemo_like.data.datasets import Row, fingerprint

logger = logging.getLogger(__name__)


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

    def next_rows(self, count: int) -> list[Row]:
        """The next ``count`` rows."""
        taken: list[Row] = []
        while len(taken) < count:
            if self._position == len(self._rows):
                self._epoch += 1
                self._position = 0
                self._order = self._epoch_order()
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
