"""The driver's handle of all generation replicas."""

import logging
from collections.abc import Callable, Sequence, Set
from typing import Any, Generic, TypeVar

from nemo_like.distributed.worker_group import Pending, WorkerGroup, wait_together
from nemo_like.errors import RunError, WaitTimeoutError
from nemo_like.generation.protocol import EngineMemory, Link
from nemo_like.generation.worker import GenerationWorker
from nemo_like.refit.buckets import Bucket

logger = logging.getLogger(__name__)

_SHUTDOWN_TIMEOUT_S = 20.0


R = TypeVar("R")
W = TypeVar("W", bound=GenerationWorker)


class Generation(Generic[W]):
    """Replicas of one engine; their weights change version together."""

    def __init__(self, group: WorkerGroup[W]) -> None:
        self.group = group
        self.weight_version: int | None = None
        """Version of the weights that every replica holds; None before the first refit, and after
        their memory was given away."""
        self._asleep = False

    def submit_connect(self, links: Sequence[Link], buckets: Sequence[Bucket]) -> Pending[None]:
        """Start connecting each replica to its sender of weights."""
        return self.group.submit_each(
            GenerationWorker.connect, links, buckets, self.group.timeout_s
        )

    def submit_load(self, version: int, *, adapters_only: bool) -> Pending[float]:
        """Start receiving weights; the result is each replica's time in seconds."""
        self.weight_version = None
        return self.group.submit(GenerationWorker.load_weights, version, adapters_only)

    def results(
        self, calls: Sequence[Pending[R]], enough: Callable[[Set[Any]], bool]
    ) -> list[list[R]]:
        """Wait until ``enough`` of the calls have finished; see ``wait_together``."""
        return wait_together(*calls, enough=enough)

    def sleep(self) -> None:
        """Free the memory of weights and KV cache; CUDA graphs stay."""
        self.group.call(GenerationWorker.sleep)
        self.weight_version = None
        self._asleep = True

    def wake(self, memory: EngineMemory) -> None:
        """Reclaim one kind of memory, weights first; no effect if generation is awake."""
        if not self._asleep:
            return
        self.group.call(GenerationWorker.wake, memory)
        self._asleep = memory is not EngineMemory.kv_cache

    def watch(self) -> None:
        """Notice an engine that dies while nobody calls it; once all have started."""
        self.group.watch(GenerationWorker.watch_engine)

    def shutdown(self) -> None:
        """End engines, then workers; a replica that does not answer is killed."""
        self.group.watches.clear()  # they end with their engines
        try:
            wait_together(
                self.group.ending(_SHUTDOWN_TIMEOUT_S).submit(GenerationWorker.shutdown_engine)
            )
        except (RunError, WaitTimeoutError) as error:
            logger.debug("Engine shutdown: %s", error)
        self.group.shutdown()
