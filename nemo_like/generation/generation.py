"""The driver's handle of all generation replicas."""

import logging
from collections.abc import Sequence

from nemo_like.config.schema import Backend, ClusterConfig
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.errors import RunError, WaitTimeoutError
from nemo_like.generation.protocol import EngineConfig
from nemo_like.generation.worker import GenerationWorker

logger = logging.getLogger(__name__)

_SHUTDOWN_TIMEOUT_S = 20.0


class Generation:
    """Replicas of one engine, whose weights move together from version to version."""

    def __init__(self, group: WorkerGroup[GenerationWorker], cluster: ClusterConfig) -> None:
        self.group = group
        self.nodes: Sequence[str] = [of_rank[0].node_id for of_rank in group.bundles]
        """Node id of each replica."""
        self.weight_version: int | None = None
        """Version of the weights that every replica holds; None before the first refit."""
        self._timeout_s = cluster.call_timeout_s
        self._start_timeout_s = cluster.start_timeout_s

    @property
    def num_replicas(self) -> int:
        """Engines."""
        return self.group.world_size

    def start(self, backend: Backend, config: EngineConfig) -> None:
        """Bring every replica up, without weights."""
        self.group.call(
            GenerationWorker.start_engine, backend, config, timeout_s=self._start_timeout_s
        )

    def load_weights(self, paths_by_node: dict[str, list[str]], version: int) -> None:
        """Load weights from files into every replica."""
        self.group.call(
            GenerationWorker.load_weights, paths_by_node, version, timeout_s=self._timeout_s
        )
        self.weight_version = version

    def shutdown(self) -> None:
        """End engines, then workers; a replica that does not answer is killed."""
        try:
            self.group.call(GenerationWorker.shutdown_engine, timeout_s=_SHUTDOWN_TIMEOUT_S)
        except (RunError, WaitTimeoutError, AttributeError) as error:
            logger.debug("Engine shutdown: %s", error)
        self.group.shutdown()
