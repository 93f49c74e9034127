"""When a run is saved, and what a checkpoint holds besides models."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from nemo_like.config.run import RunConfig
from nemo_like.run.checkpoint import Checkpoints, DriverState

logger = logging.getLogger(__name__)


class Loader(Protocol):
    """What deals out rows: a position that can be saved."""

    def state(self) -> dict[str, Any]:
        """The position after the rows handed out."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        ...


class Model(Protocol):
    """What trains: its state can be saved."""

    weight_version: int

    def save(self, folder: str) -> None:
        """Write all of it into ``folder``."""
        ...

    def load(self, folder: str, weight_version: int) -> None:
        """Restore what ``save`` wrote after ``weight_version`` steps."""
        ...


class Saves:
    """Checkpoints by steps and by time; one per step, however many reasons coincide."""

    def __init__(self, config: RunConfig, run_dir: Path, began: float) -> None:
        """``began``: start of the first interval, by the monotonic clock."""
        self.checkpoints = Checkpoints(run_dir, config.checkpoint)
        self._config = config.checkpoint
        usual = "validation/reward" if config.samples else "validation/loss"
        self._metric = config.checkpoint.metric or usual
        self._smallest_is_best = self._metric.endswith("loss")
        self._saved_at = began

    def is_due(self, step: int) -> bool:
        """Whether the configuration wants ``step`` saved, by its number or the time."""
        every_steps, every_s = self._config.every_steps, self._config.every_minutes * 60
        if every_s > 0 and time.monotonic() - self._saved_at >= every_s:
            return True
        return every_steps > 0 and step % every_steps == 0

    def save(
        self,
        step: int,
        models: Mapping[str, Model],
        loader: Loader,
        numbers: Mapping[str, float],
        totals: dict[str, float],
        unlogged: dict[str, float] | None,
    ) -> None:
        """Write a checkpoint of ``step``, which measured ``numbers``; see ``DriverState``."""
        metric = numbers.get(self._metric)
        if metric is None and unlogged is None and self._config.metric is not None:
            measured = ", ".join(sorted(numbers))
            logger.warning("checkpoint.metric=%s is not measured, only %s.", self._metric, measured)
        if metric is not None and self._smallest_is_best:
            metric = -metric
        state = DriverState(
            step=step,
            loader=loader.state(),
            metric=metric,
            totals=totals,
            weight_versions={name: model.weight_version for name, model in models.items()},
            metric_name=f"{'-' if self._smallest_is_best else ''}{self._metric}",
            unlogged=unlogged,
        )

        def write(folder: Path) -> None:
            for name, model in models.items():
                model.save(str(folder / name))

        path = self.checkpoints.save(state, write)
        self._saved_at = time.monotonic()
        logger.info("Saved %s", path)
