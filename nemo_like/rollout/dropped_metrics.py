"""Says once of each metric of an environment that it is left out where it is not a number."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_like.rollout.worker import RolloutResult

logger = logging.getLogger(__name__)


class DroppedMetrics:
    """Metrics that were warned of so far."""

    def __init__(self, reward: str) -> None:
        self._reward = reward
        self._known: set[str] = set()

    def warn(self, results: "Sequence[RolloutResult]") -> None:
        """Log metrics that are new here."""
        for result in results:
            for name, why in result.dropped_metrics.items():
                if name not in self._known:
                    self._known.add(name)
                    logger.warning(
                        "environment.reward=%s: metric %r is left out of rows where it is not a "
                        "finite number (%s); the reward counts.",
                        self._reward,
                        name,
                        why,
                    )
