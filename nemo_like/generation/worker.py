"""The process that hosts one replica of a sampling engine, and the driver's handle of them all."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence, Set
from typing import Any, Generic, TypeVar

from nemo_like.config.generation import engine_kind
from nemo_like.distributed.worker import Worker, WorkerContext
from nemo_like.distributed.worker_group import Pending, WorkerGroup, wait_together
from nemo_like.doors import import_path
from nemo_like.errors import RunError, WaitTimeoutError
from nemo_like.generation.protocol import (
    Completion,
    Engine,
    EngineConfig,
    EngineMemory,
    FinishReason,
    GenerationRequest,
    HasProcesses,
    Link,
)
from nemo_like.refit.buckets import Bucket

logger = logging.getLogger(__name__)

_SHUTDOWN_TIMEOUT_S = 20.0


def engine_class(backend: str) -> Callable[[EngineConfig], Engine]:
    """The engine of a backend, imported."""
    engine = engine_kind(backend).engine
    return import_path(engine) if isinstance(engine, str) else engine


class GenerationWorker(Worker):
    """One replica. Its methods are coroutines: completions of many requests overlap."""

    _engine: Engine | None = None

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._may_sample = asyncio.Event()
        self._may_sample.set()

    async def start_engine(self, backend: str, config: EngineConfig) -> None:
        """Bring the engine up, without weights."""
        begin = time.monotonic()
        # In a thread: importing vLLM takes seconds, in which the event loop would answer nobody.
        make = await asyncio.to_thread(engine_class, backend)
        imported = time.monotonic()
        self._engine = make(config)
        await self.engine.start()
        up = time.monotonic()
        logger.info("Engine: import %.1f s, start %.1f s", imported - begin, up - imported)

    async def connect(self, link: Link, buckets: Sequence[Bucket], timeout_s: float) -> None:
        """Connect to this replica's sender of weights; see ``Engine.connect``."""
        await self.engine.connect(link, buckets, timeout_s)

    async def load_weights(self, version: int, adapters_only: bool) -> float:
        """Replace weights, see ``Engine.load_weights``; returns the seconds it took.

        Completions in progress continue with the new weights; their cache is recomputed.
        """
        start = time.monotonic()
        self._may_sample.clear()
        try:
            await self.engine.interrupt()
            await self.engine.load_weights(version, adapters_only=adapters_only)
        finally:
            self._may_sample.set()
        return time.monotonic() - start

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion, across refits; see ``Engine.generate``."""
        await self._may_sample.wait()
        parts = [await self.engine.generate(request)]
        if parts[0].finish_reason is not FinishReason.interrupted:
            return parts[0]
        from nemo_like.generation.interrupted import continued, joined

        while parts[-1].finish_reason is FinishReason.interrupted:
            request = continued(request, parts[-1])
            await self._may_sample.wait()
            parts.append(await self.engine.generate(request))
        return joined(parts)

    async def sleep(self) -> None:
        """See ``Engine.sleep``."""
        await self.engine.sleep()

    async def wake(self, memory: EngineMemory) -> None:
        """See ``Engine.wake``."""
        await self.engine.wake(memory)

    async def watch_engine(self) -> None:
        """See ``HasProcesses``; an engine without any ends with this process."""
        if isinstance(self.engine, HasProcesses):
            await self.engine.watch()

    async def shutdown_engine(self) -> None:
        """End the engine and its processes, if it has any."""
        if self._engine is not None:
            await self._engine.shutdown()

    @property
    def engine(self) -> Engine:
        """The engine, once it is made."""
        assert self._engine is not None
        return self._engine


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
        """Free the memory of weights and KV cache; vLLM's CUDA graphs stay."""
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
