"""The ``Engine`` protocol over bursts of decoding steps that need nothing from the host.

Read ``state`` first (what is on the device), then ``sampler`` (what the host decides between two
bursts), ``decoder`` (a burst), ``model``, ``fp8``, and the two implementations of what depends on
the device: ``torch_ops``, and ``triton_ops`` with ``triton_pointwise``.
"""

import asyncio
import gc
import importlib
import logging
from collections.abc import Iterator

import psutil
import torch
from torch import Tensor

from nemo_like.errors import RunError, UserError
from nemo_like.generation.graph.decoder import Decoder
from nemo_like.generation.graph.model import Model
from nemo_like.generation.graph.sampler import Row, Sampler
from nemo_like.generation.graph.state import BURST, PAGE, State
from nemo_like.generation.local_engine import LocalEngine, Waiting, fail
from nemo_like.generation.protocol import (
    EngineConfig,
    EngineMemory,
    GenerationRequest,
    SamplingParams,
)

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 2**31
"""What a GPU needs next to weights and cache: logits, prompts under way, graphs, rounding."""


HOST_SHARE = 0.5
"""Most of a host's free memory that one engine's cache takes as it fills, without a GPU."""


class GraphEngine(LocalEngine):
    """One dense model on one GPU (or, without graphs, on the CPU); see ``Engine``.

    Requests are admitted between bursts. A request's tokens follow from weights, seed and prompt:
    its companions in a batch make no difference but that of rounding.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        on_gpu = config.device == "cuda"
        self._ops = importlib.import_module(
            f"nemo_like.generation.graph.{'triton' if on_gpu else 'torch'}_ops"
        )
        self._model: Model | None = None
        self._sampler: Sampler | None = None
        self._rows: list[Row] = []
        """Requests without an answer."""

    async def start(self) -> None:
        """Allocate weights and cache; UserError for models that this engine does not compute."""
        for memory in EngineMemory:
            await self.wake(memory)
        if self._config.device == "cuda":
            await self.warm_up()
        self._serve_requests()

    async def warm_up(self) -> None:
        """Compile kernels, and capture the graph of a full batch, on weights of zero."""
        assert self._model is not None
        assert self._sampler is not None
        self._model.zero()
        sampling = SamplingParams(max_new_tokens=BURST)
        loop, most = asyncio.get_running_loop(), self._config.max_model_len
        for seed in range(self._config.max_num_seqs):
            request = GenerationRequest(
                request_id="", prompt_ids=[0] * min(PAGE, most - 1), sampling=sampling, seed=seed
            )
            self._sampler.waiting.append(Row(request, loop.create_future(), most))
        await asyncio.to_thread(self._sampler.burst)
        self._sampler.clear()

    async def sleep(self) -> None:
        """Free weights, cache and graphs; completions that are under way fail."""
        async with self._model_in_use:  # A burst may run for callers that gave up.
            self._free("the engine was put to sleep")

    async def wake(self, memory: EngineMemory) -> None:
        """Allocate what ``sleep`` has freed; graphs are captured again as they are used."""
        if memory is EngineMemory.weights and self._model is None:
            self._model = await asyncio.to_thread(Model, self._config, self._ops)
        if memory is EngineMemory.kv_cache and self._sampler is None:
            self._sampler = self._make_sampler()

    async def shutdown(self) -> None:
        """Stop serving and free memory; completions that are under way fail."""
        await super().shutdown()
        self._free("the engine was shut down")

    def _copy_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        assert self._model is not None
        self._model.load(tensors)

    def _make_sampler(self) -> Sampler:
        assert self._model is not None
        config, shape = self._config, self._model.shape
        dtype = getattr(torch, config.dtype)
        page_bytes = 2 * shape.layers * shape.key_width * PAGE * dtype.itemsize
        most = -(-config.max_model_len // PAGE)
        num_pages = most * config.max_num_seqs
        if config.kv_cache_bytes is not None:
            num_pages = min(num_pages, config.kv_cache_bytes // page_bytes)
        if config.device == "cuda":
            share = torch.cuda.get_device_properties(0).total_memory * config.gpu_memory_share
            room = max(0.0, share - self._model.num_bytes - WORKSPACE_BYTES)
        else:
            room = psutil.virtual_memory().available * HOST_SHARE
        num_pages = min(num_pages, int(room) // page_bytes)
        if num_pages < most:
            raise UserError(
                f"generation.backend=graph: there is memory for {num_pages * PAGE} tokens of KV "
                f"cache and one completion may take {config.max_model_len}; set "
                "generation.max_new_tokens to less, or generation.backend=vllm."
            )
        state = State(shape, self._model.angles, config.max_num_seqs, 1 + num_pages, dtype)
        return Sampler(Decoder(self._model, self._ops, state), self.ends_with_string)

    async def _serve(self) -> None:
        while True:
            if not self._rows:
                self._take(await self._queue.get())
            # Callers that became ready together all get to enqueue before the burst begins.
            await asyncio.sleep(0)
            while not self._queue.empty():
                self._take(self._queue.get_nowait())
            await self._answer()

    def _take(self, waiting: Waiting) -> None:
        self._rows.append(Row(*waiting, self._config.max_model_len))
        if self._sampler is None:
            self._fail("the engine is asleep")
        else:
            self._sampler.waiting.append(self._rows[-1])

    async def _answer(self) -> None:
        """Sample a burst and answer the requests that end with it."""
        async with self._model_in_use:
            ended = await self._burst()
        for row in ended:
            if not row.done.done():  # Its caller may have given up.
                assert self._version is not None
                row.done.set_result(row.completion(self._version))
        self._rows = [row for row in self._rows if not row.done.done()]

    async def _burst(self) -> list[Row]:
        sampler = self._sampler
        if sampler is None:  # Its rows have failed.
            return []
        if self._interrupted.is_set():
            return sampler.clear()
        try:
            return await asyncio.to_thread(sampler.burst)
        except Exception as error:  # The boundary to kernels and drivers, which may raise anything.
            logger.exception("A burst failed.")
            sampler.clear()
            self._fail(f"the model raised {error!r}")
            return []

    def _free(self, reason: str) -> None:
        self._version = self._sampler = self._model = None
        self._fail(reason)
        if self._config.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _fail(self, reason: str) -> None:
        """Answer all requests with an error."""
        for row in self._rows:
            fail(row.done, RunError(f"Request {row.request.request_id} failed: {reason}."))
        self._rows = []
