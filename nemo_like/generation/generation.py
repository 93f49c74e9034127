"""The driver's handle of all generation replicas."""

import logging
from collections.abc import Sequence
from typing import Generic, TypeVar

from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.errors import RunError, WaitTimeoutError
from nemo_like.generation.worker import GenerationWorker

logger = logging.getLogger(__name__)

_SHUTDOWN_TIMEOUT_S = 20.0


W = TypeVar("W", bound=GenerationWorker)


class Generation(Generic[W]):
    """Replicas of one engine, whose weights move together from version to version."""

    def __init__(self, group: WorkerGroup[W]) -> None:
        self.group = group
        self.nodes: Sequence[str] = [of_rank[0].node_id for of_rank in group.bundles]
        """Node id of each replica."""
        self.weight_version: int | None = None
        """Version of the weights that every replica holds; None before the first refit."""

    def load_weights(self, paths_by_node: dict[str, list[str]], version: int) -> None:
        """Load weights from files into every replica."""
        self.group.call(GenerationWorker.load_weights, paths_by_node, version)
        self.weight_version = version

    def shutdown(self) -> None:
        """End engines, then workers; a replica that does not answer is killed."""
        try:
            self.group.waiting(_SHUTDOWN_TIMEOUT_S).call(GenerationWorker.shutdown_engine)
        except (RunError, WaitTimeoutError) as error:
            logger.debug("Engine shutdown: %s", error)
        self.group.shutdown()
