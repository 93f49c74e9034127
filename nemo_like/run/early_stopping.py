"""A callback that ends a run when validations stop improving."""

import json
import math
from pathlib import Path

from nemo_like.config.run import RunConfig
from nemo_like.errors import UserError
from nemo_like.run.checkpoint import watched_metric


class EarlyStopping:
    """Ends the run after ``patience`` validations without a ``metric`` better by ``min_delta``.

    ``metric`` None: that of the best checkpoint.
    """

    def __init__(self, patience: int = 3, metric: str | None = None, min_delta: float = 0.0):
        if patience < 1 or min_delta < 0:
            raise ValueError("patience must be at least 1, and min_delta at least 0")
        self._patience, self._metric, self._min_delta = patience, metric, min_delta
        self._best, self._best_step, self._num_since = -math.inf, 0, 0

    def on_start(self, folder: Path, config: RunConfig, step: int) -> str | None:
        """Replay the validations made before a resume; the last may have ended the run."""
        if not config.validates:
            raise UserError("early_stopping needs validations; set validation.every_steps.")
        self._metric, self._sign = watched_metric(config, self._metric)
        why = None
        if step:
            for line in (folder / "metrics.jsonl").read_text().splitlines():
                record = json.loads(line)
                if record["step"] <= step and any(key.startswith("validation/") for key in record):
                    why = self.on_validation(record["step"], record)
        return why

    def on_validation(self, step: int, metrics: dict[str, float]) -> str | None:
        assert self._metric is not None
        if self._metric not in metrics:
            known = ", ".join(key for key in metrics if key.startswith("validation/"))
            raise UserError(f"early_stopping: {self._metric} is not measured; use one of {known}.")
        value = self._sign * metrics[self._metric]
        if value > self._best + self._min_delta or (self._best == -math.inf < value):
            self._best, self._best_step, self._num_since = value, step, 0
            return None
        self._num_since += 1  # also for NaN
        if self._num_since < self._patience:
            return None
        return (
            f"{self._metric} has not improved on {self._sign * self._best:g} of step "
            f"{self._best_step} in {self._num_since} validations"
        )
