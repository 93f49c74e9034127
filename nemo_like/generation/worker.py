"""The process that hosts one replica of a sampling engine."""

import asyncio

from nemo_like.config.choices import Backend
from nemo_like.distributed.worker import Worker
from nemo_like.generation.protocol import Engine, EngineConfig


def make_engine(backend: Backend, config: EngineConfig) -> Engine:
    """The engine of a backend; only the one that is asked for is imported."""
    if backend is Backend.vllm:
        from nemo_like.generation.vllm_engine import VLLMEngine

        return VLLMEngine(config)
    from nemo_like.generation.hf_engine import HFEngine

    return HFEngine(config)


class GenerationWorker(Worker):
    """One replica. Its methods are coroutines: completions of many requests overlap."""

    _engine: Engine | None = None

    async def start_engine(self, backend: Backend, config: EngineConfig) -> None:
        """Bring the engine up, without weights."""
        # In a thread: importing vLLM takes seconds, in which the event loop would answer nobody.
        self._engine = await asyncio.to_thread(make_engine, backend, config)
        await self.engine.start()

    async def load_weights(self, paths_by_node: dict[str, list[str]], version: int) -> None:
        """Replace all weights; see ``Engine.load_weights``."""
        await self.engine.load_weights(paths_by_node[self.context.node_id], version)

    async def shutdown_engine(self) -> None:
        """End the engine and its processes, if it got as far as having any."""
        if self._engine is not None:
            await self._engine.shutdown()

    @property
    def engine(self) -> Engine:
        """The engine, once it is made."""
        assert self._engine is not None
        return self._engine
