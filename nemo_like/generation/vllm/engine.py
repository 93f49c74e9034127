"""vLLM behind the ``Engine`` protocol, for CPU and GPU.

Every check of vLLM's version and every work-around for it is in this file or its neighbours:
``settings`` (what it is started with), ``completions`` (what it samples), ``environment``
and ``processes`` (how its processes start), ``worker``, ``loading``, ``lora`` and ``scheduler``
(what runs in them). Nothing else imports it.
"""

import asyncio
import dataclasses
import logging
import os
import pickle
from collections.abc import Coroutine, Sequence
from typing import Any

import psutil
import torch
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from nemo_like.errors import RunError, UserError, WorkerDiedError
from nemo_like.generation.protocol import (
    Completion,
    EngineConfig,
    EngineMemory,
    FinishReason,
    GenerationRequest,
    Link,
    no_weights,
)
from nemo_like.generation.vllm.completions import completion, sampling_params
from nemo_like.generation.vllm.environment import (
    EngineDevices,
    start_environment,
    start_fork_server,
)
from nemo_like.generation.vllm.processes import engine_processes
from nemo_like.generation.vllm.settings import ADAPTER_ID, engine_args
from nemo_like.refit.buckets import Bucket, check_buckets, check_refit

logger = logging.getLogger(__name__)

OLDEST_VLLM = (0, 26)
"""Oldest minor version that this file is written for."""
FIRST_UNKNOWN_VLLM = (0, 34)

LIVENESS_POLL_S = 0.5
SHUTDOWN_GRACE_S = 8.0
"""An engine ends in 3 to 5 s; killed before, ranks on the CPU leave 8 MB in /dev/shm."""


class VLLMEngine:
    """One vLLM replica in child processes of this one; see ``Engine`` for its contract.

    A refit is refused while completions are being sampled, unless they were interrupted.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._llm: AsyncLLM | None = None
        self._processes: list[psutil.Process] = []
        self._version: int | None = None
        self._versions: list[int] = []
        """Of all refits."""
        self._running = set[str]()
        """Ids of running requests."""
        self._is_paused = False
        # vLLM looks at the path of an adapter only if it does not hold it.
        self._adapter = (
            None if config.lora is None else LoRARequest("adapter", ADAPTER_ID, "none, from refits")
        )

    async def start(self) -> None:
        """Bring the engine up; UserError for what vLLM refuses, RunError if its processes fail."""
        _check_version()
        if current_platform.device_type != self._config.device:
            raise UserError(
                f"The engine was to run on {self._config.device}, but the installed vLLM is built "
                f"for {current_platform.device_type}; install the other one, or use backend=hf."
            )
        others = engine_processes()
        # A start takes seconds; in a thread it leaves the event loop of a Ray actor responsive.
        self._llm = await asyncio.to_thread(_launch, self._config)
        self._processes = [one for one in engine_processes() if one not in others]

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; RunError with vLLM's reason if the request or the engine fails."""
        llm, version = self._llm, self._version
        if llm is None or version is None:
            raise no_weights(request)
        room = self._config.max_model_len - len(request.prompt_ids)
        max_new_tokens = min(request.sampling.max_new_tokens, room)
        if max_new_tokens <= 0:
            return Completion(
                token_ids=[],
                logprobs=[],
                finish_reason=FinishReason.length,
                weight_version=version,
            )
        self._running.add(request.request_id)
        try:
            found = await self._sample(llm, request, max_new_tokens)
        finally:
            self._running.remove(request.request_id)
        if found.outputs[0].finish_reason == "abort":
            raise self._failure(f"request {request.request_id}", None)
        return completion(request, found, self._versions)

    async def interrupt(self) -> None:
        """See ``Engine``: requests go on by themselves, and what they had cached is dropped."""
        if self._running:
            assert self._llm is not None
            self._is_paused = True
            # What ``pause_generation`` does, without its sleep.
            pause = self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
            await self._alive(pause)

    async def connect(self, link: Link, buckets: Sequence[Bucket], timeout_s: float) -> None:
        """Check the manifest, then connect every rank to its sender."""
        dtype, lora = getattr(torch, self._config.dtype), self._config.lora
        check_buckets(buckets, self._config.model_path, dtype, lora)
        pickled = pickle.dumps((link, buckets, timeout_s, lora))
        await self._call("connect_refit", "to connect to its sender", pickled)

    async def load_weights(self, version: int, *, adapters_only: bool = False) -> None:
        """Replace weights and reset every cache; RunError as the protocol says."""
        llm = self._llm
        if llm is None:
            raise RunError(f"Refit {version} came before the engine had started.")
        running = 0 if self._is_paused else len(self._running)
        try:
            check_refit(
                version,
                self._version,
                self._config.lora,
                adapters_only=adapters_only,
                running=running,
            )
            # Without a version the engine refuses to generate, also if this fails half-way.
            self._version = None
            await self._call("load_refit", "a refit", version, adapters_only)
            # The workers have reset their encoder and multimodal caches, the scheduler has not.
            await self._alive(llm.reset_mm_cache())
            await self._alive(llm.reset_encoder_cache())
            if not await self._alive(llm.reset_prefix_cache()):
                raise RunError(f"vLLM did not reset its prefix cache after refit {version}.")
            self._version = version
            self._versions.append(version)
        finally:
            await self._resume()

    async def _resume(self) -> None:
        """Let interrupted requests go on, or fail without weights."""
        if not self._is_paused:
            return
        self._is_paused = False
        if self._llm is None or self._llm.errored:
            return
        if self._version is None:
            await self._llm.abort(list(self._running))
        await self._alive(self._llm.resume_generation())

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache."""
        assert self._llm is not None
        self._version = None
        # Level 2 drops the weights, which the next refit brings again; level 1 would copy them to
        # the host first, which takes a hundred times as long.
        await self._alive(self._llm.sleep(level=2), "to sleep")

    async def wake(self, memory: EngineMemory) -> None:
        """Reclaim one kind of memory."""
        assert self._llm is not None
        await self._alive(self._llm.wake_up(tags=[memory.value]), "to wake up")

    async def watch(self) -> None:
        """See ``HasProcesses``."""
        while self._llm is not None:
            if self._llm.errored:
                raise self._failure("to stay up", None)
            await asyncio.sleep(LIVENESS_POLL_S)

    async def shutdown(self) -> None:
        """End the engine and every process that it started, by force after a grace period."""
        if self._llm is None:
            return
        llm, self._llm, self._version = self._llm, None, None
        if not self._running and llm.output_handler is not None:
            llm.output_handler.cancel()  # It would report the end of its process as a failure.
        await asyncio.to_thread(llm.shutdown, SHUTDOWN_GRACE_S)
        # Ranks outlive an engine process that vLLM has lost patience with.
        _, stubborn = await asyncio.to_thread(
            psutil.wait_procs, self._processes, timeout=SHUTDOWN_GRACE_S
        )
        for process in stubborn:
            logger.warning("Process %d of the engine did not end; killing it.", process.pid)
            process.kill()
        await asyncio.to_thread(psutil.wait_procs, stubborn, timeout=SHUTDOWN_GRACE_S)
        self._processes = []

    async def _sample(
        self, llm: AsyncLLM, request: GenerationRequest, max_new_tokens: int
    ) -> RequestOutput:
        outputs = llm.generate(
            # Rendered form: a raw prompt would pass through vLLM's tokenizer thread for nothing.
            {"type": "token", "prompt_token_ids": request.prompt_ids},
            sampling_params(request.sampling, request.seed, max_new_tokens),
            request.request_id,
            lora_request=self._adapter,
        )
        try:
            async for output in outputs:
                if output.finished:
                    return output
        except Exception as error:  # The boundary to vLLM, whose error types change by version.
            raise self._failure(f"request {request.request_id}", error) from None
        raise RunError(f"vLLM ended request {request.request_id} without a completion.")

    async def _call(self, method: str, what: str, *arguments: Any) -> None:
        """Call a method of ``RefitExtension`` on every rank."""
        assert self._llm is not None
        await self._alive(self._llm.collective_rpc(method, args=arguments), what)

    async def _alive(self, call: Coroutine[Any, Any, Any], what: str = "a refit") -> Any:
        """Await a call to the engine's process; RunError if it fails or that process ends."""
        task = asyncio.ensure_future(call)
        try:
            # vLLM (0.32) fails pending requests when its process ends, but no pending other call.
            while not (await asyncio.wait({task}, timeout=LIVENESS_POLL_S))[0]:
                if self._llm is None or self._llm.errored:
                    raise self._failure(what, None)
        finally:
            task.cancel()
        if (error := task.exception()) is not None:
            raise self._failure(what, error) from None
        return task.result()

    def _failure(self, what: str, error: BaseException | None) -> RunError:
        """Say why vLLM failed, without its traceback: all requests share one once it is dead."""
        if self._llm is None:
            return RunError(f"vLLM failed {what}: the engine was shut down.")
        if self._llm.errored:
            pids = ", ".join(str(process.pid) for process in self._processes)
            return WorkerDiedError(f"vLLM failed {what}: its process died (of {pids}).")
        why = "it was aborted" if error is None else f"{type(error).__name__}: {error}"
        return RunError(f"vLLM failed {what}: {why}")


def _launch(config: EngineConfig) -> AsyncLLM:
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    memory = current_platform.get_device_total_memory() if config.device != "cpu" else 0
    args = engine_args(config, known, memory)
    devices = EngineDevices(
        device=config.device,
        tensor_parallel_size=config.tensor_parallel_size,
        engine_kwargs=config.engine_kwargs,
    )
    start_fork_server(devices)
    with start_environment(devices):
        # Our own process has imported vLLM already; its children read the variable themselves.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
        except (TypeError, ValueError) as error:
            raise UserError(f"vLLM refuses the engine's configuration: {error}") from error
        except RuntimeError as error:
            raise WorkerDiedError(f"The vLLM engine did not start: {error}") from error


def _check_version() -> None:
    major, minor = vllm.__version_tuple__[:2]
    if not OLDEST_VLLM <= (major, minor) < FIRST_UNKNOWN_VLLM:
        raise UserError(
            f"vLLM {vllm.__version__} is not supported; install a version from "
            f"{OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} to before "
            f"{FIRST_UNKNOWN_VLLM[0]}.{FIRST_UNKNOWN_VLLM[1]}."
        )
