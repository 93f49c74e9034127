"""vLLM behind the ``Engine`` protocol; the one file that imports it, for CPU and GPU.

Every check of vLLM's version and every work-around for it lives here, with its reason.
"""

import asyncio
import dataclasses
import difflib
import importlib.util
import logging
import multiprocessing
import os
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from nemo_like.errors import RunError, UserError
from nemo_like.generation.protocol import (
    Completion,
    EngineConfig,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.refit.manifest import check_refit, expected_tensors, read_tensors

logger = logging.getLogger(__name__)

OLDEST_VLLM = (0, 26)
"""Oldest minor version that the tests of this file passed with."""
FIRST_UNKNOWN_VLLM = (0, 34)

CPU_KV_CACHE_BYTES = 2**30
"""KV cache of an engine on the CPU; vLLM would take nearly all memory of the machine."""
CPU_BATCHED_TOKENS = 4096
"""Most tokens of one forward pass on the CPU, where the context does not ask for more."""
LIVENESS_POLL_S = 0.5
SHUTDOWN_GRACE_S = 10.0

OWNED_KEYS = frozenset(
    "model tokenizer dtype seed max_model_len tensor_parallel_size logprobs_mode load_format "
    "generation_config worker_extension_cls".split()
)
"""Engine arguments that follow from the rest of the configuration or that exactness needs."""


class RefitExtension:
    """Methods that vLLM mixes into each of its workers, one a tensor-parallel rank."""

    def load_refit(self, paths: list[str]) -> None:
        """Replace the weights of this rank by its shards of the tensors in ``paths``."""
        # It warns of layers without weights of their own (rotary embeddings, tied heads) each time.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        # vLLM 0.26 leaves it to the caller to set the configuration that layers look up.
        with set_current_vllm_config(self.vllm_config):
            # ``model.load_weights`` works at start only: afterwards weights are packed for the
            # kernels. ``reload_weights`` unpacks layer by layer and keeps every tensor's address,
            # which CUDA graphs rely on.
            self.reload_weights(weights_iterator=read_tensors(paths))
            if current_platform.is_cpu():
                self._pack_output_heads()

    def _pack_output_heads(self) -> None:
        # On the CPU the output head multiplies by a packed copy. When it is tied to the embedding
        # no tensor is loaded into the head itself, so that ``reload_weights`` (0.26 to 0.32)
        # leaves the old copy in place and logits silently stay those of the previous weights.
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


class VLLMEngine:
    """One vLLM replica in child processes of this one; see ``Engine`` for its contract.

    A refit is refused while completions are being sampled, and the other way round: the caller
    decides whether to wait for them. A refit that fails its checks leaves the weights, the version
    and generation as they were; one that fails later leaves an engine that refuses to generate.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._llm: AsyncLLM | None = None
        self._processes: list[psutil.Process] = []
        self._version: int | None = None
        self._num_running = 0

    async def start(self) -> None:
        """Bring the engine up; UserError for what vLLM refuses, RunError if its processes fail."""
        _check_version()
        if current_platform.device_type != self._config.device:
            raise UserError(
                f"The engine was to run on {self._config.device}, but the installed vLLM is built "
                f"for {current_platform.device_type}; install the other one, or use backend=hf."
            )
        engine_args = _engine_args(self._config)
        others = {child.pid for child in multiprocessing.active_children()}
        # A start takes seconds; in a thread it leaves the event loop of a Ray actor responsive.
        self._llm = await asyncio.to_thread(_launch, engine_args)
        for child in multiprocessing.active_children():
            if child.pid not in others:
                core = psutil.Process(child.pid)
                self._processes += [core, *core.children(recursive=True)]

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; RunError with vLLM's reason if the request or the engine fails."""
        llm, version = self._llm, self._version
        if llm is None or version is None:
            raise RunError(f"Request {request.request_id} came before the engine had weights.")
        room = self._config.max_model_len - len(request.prompt_ids)
        max_new_tokens = min(request.sampling.max_new_tokens, room)
        if max_new_tokens <= 0:
            return Completion(
                token_ids=[],
                logprobs=[],
                finish_reason=FinishReason.length,
                weight_version=version,
            )
        self._num_running += 1
        try:
            output = await self._sample(llm, request, max_new_tokens)
        finally:
            self._num_running -= 1
        return _completion(output, request.request_id, version)

    async def load_weights(self, paths: Sequence[str], version: int) -> None:
        """Replace all weights and reset every cache; RunError as the protocol says."""
        llm = self._llm
        if llm is None:
            raise RunError(f"Refit {version} came before the engine had started.")
        if self._num_running:
            raise RunError(
                f"Refit {version} came while {self._num_running} completions were being sampled; "
                "wait for them first."
            )
        expected = expected_tensors(self._config.model_path, getattr(torch, self._config.dtype))
        check_refit(paths, version, self._version, expected)
        # Until all is done the engine has no version, so that it refuses to generate if this fails.
        self._version = None
        await self._alive(llm.collective_rpc("load_refit", args=(list(paths),)))
        # The workers have reset their encoder and multimodal caches, the scheduler has not.
        await self._alive(llm.reset_mm_cache())
        await self._alive(llm.reset_encoder_cache())
        if not await self._alive(llm.reset_prefix_cache()):
            raise RunError(f"vLLM did not reset its prefix cache after refit {version}.")
        self._version = version

    async def shutdown(self) -> None:
        """End the engine and every process that it started, by force after a grace period."""
        if self._llm is None:
            return
        llm, self._llm, self._version = self._llm, None, None
        if not self._num_running and llm.output_handler is not None:
            llm.output_handler.cancel()  # It would report the end of its process as a failure.
        await asyncio.to_thread(llm.shutdown)
        # With several ranks vLLM (0.32) gives up on its engine process after 5 s, and the ranks
        # outlive it for a moment.
        _, stubborn = await asyncio.to_thread(
            psutil.wait_procs, self._processes, timeout=SHUTDOWN_GRACE_S
        )
        for process in stubborn:
            logger.warning("Process %d of the engine did not end; killing it.", process.pid)
            process.kill()
        self._processes = []

    async def _sample(
        self, llm: AsyncLLM, request: GenerationRequest, max_new_tokens: int
    ) -> CompletionOutput:
        outputs = llm.generate(
            # Rendered form: a raw prompt would pass through vLLM's tokenizer thread for nothing.
            {"type": "token", "prompt_token_ids": request.prompt_ids},
            _sampling_params(request.sampling, request.seed, max_new_tokens),
            request.request_id,
        )
        try:
            async for output in outputs:
                if output.finished:
                    return output.outputs[0]
        except Exception as error:  # The boundary to vLLM, whose error types change by version.
            raise RunError(
                f"vLLM failed request {request.request_id}: {self._reason(error)}"
            ) from error
        raise RunError(f"vLLM ended request {request.request_id} without a completion.")

    async def _alive(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a call to the engine process; RunError if it fails or the process ends."""
        task = asyncio.ensure_future(call)
        try:
            # vLLM (0.32) fails pending requests when its process ends, but no pending other call.
            while not task.done():
                await asyncio.wait({task}, timeout=LIVENESS_POLL_S)
                if self._llm is None or (self._llm.errored and not task.done()):
                    raise RunError(f"vLLM failed a refit: {self._reason(None)}")
            return task.result()
        except RunError:
            raise
        except Exception as error:  # The boundary to vLLM, as in ``_sample``.
            raise RunError(f"vLLM failed a refit: {self._reason(error)}") from error
        finally:
            task.cancel()

    def _reason(self, error: Exception | None) -> str:
        """Say which process ended, or else what vLLM said."""
        dead = [str(process.pid) for process in self._processes if not _is_running(process)]
        if dead:
            return f"its process {', '.join(dead)} ended; the cause is in the worker's log."
        return f"{type(error).__name__}: {error or error.__cause__}" if error else "it shut down."


def _engine_args(config: EngineConfig) -> dict[str, Any]:
    """Merge what we need with the user's ``engine_kwargs``; UserError for a key we cannot pass."""
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for key in config.engine_kwargs:
        if key in OWNED_KEYS:
            raise UserError(
                f"generation.engine_kwargs.{key} follows from the rest of the configuration; "
                "remove it."
            )
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "remove it."
            raise UserError(
                f"generation.engine_kwargs.{key} is no engine argument of vLLM "
                f"{vllm.__version__}; {hint}"
            )
    args: dict[str, Any] = {
        "model": config.model_path,
        "dtype": config.dtype,
        "seed": config.seed,
        "max_model_len": config.max_model_len,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": config.max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy",
        # The model folder's own sampling defaults and end-of-sequence ids stay out of it.
        "generation_config": "vllm",
        "worker_extension_cls": f"{__name__}.{RefitExtension.__qualname__}",
        "disable_log_stats": True,
    }
    if config.device == "cpu":
        # Compiling takes half a minute, and an explicit cache size spares the profiling pass.
        args |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
        # A prompt that is prefilled in parts makes vLLM (0.26 to 0.32) rewind its request's
        # generator, which ends the engine: "CPU Generator does not use offset".
        args |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_model_len, CPU_BATCHED_TOKENS),
        }
    else:
        args["gpu_memory_utilization"] = config.gpu_memory_utilization
    return args | config.engine_kwargs


def _launch(engine_args: dict[str, Any]) -> AsyncLLM:
    with _environment(engine_args):
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))
        except (TypeError, ValueError) as error:
            raise UserError(f"vLLM refuses the engine's configuration: {error}") from error
        except RuntimeError as error:
            raise RunError(f"The vLLM engine did not start: {error}") from error


@contextmanager
def _environment(engine_args: dict[str, Any]) -> Iterator[None]:
    """Set what vLLM's child processes inherit where the user has not; undo it, and vLLM's own."""
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("vllm").setLevel(logging.WARNING)  # This process; children inherit below.
    variables = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # Forking a process that has threads (Ray's, torch's) can hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if importlib.util.find_spec("flashinfer") is None:
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if current_platform.is_cpu():
        cores = len(os.sched_getaffinity(0))
        variables |= {
            # One process less: the model runs in the engine's process, which stays apart from
            # ours. (AsyncLLM ignores this variable; only vLLM's choice of executor reads it.)
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # vLLM would bind every replica to the same cores and want one NUMA node per rank.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, cores // engine_args["tensor_parallel_size"])),
        }
        if engine_args["enforce_eager"]:
            # Not all of vLLM heeds ``enforce_eager``: the embedding of several ranks is compiled.
            variables["TORCHDYNAMO_DISABLE"] = "1"
    saved = dict(os.environ)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in set(os.environ) - set(saved):
            del os.environ[name]
        os.environ.update(saved)


def _sampling_params(
    sampling: SamplingParams, seed: int, max_new_tokens: int
) -> vllm.SamplingParams:
    return vllm.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        seed=seed,
        max_tokens=max_new_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        # The ids above are all that ends a completion, whatever the model folder says.
        ignore_eos=True,
        logprobs=0,  # Of the sampled token alone.
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: CompletionOutput, request_id: str, version: int) -> Completion:
    """Translate vLLM's output; RunError if it was aborted or failed."""
    if output.finish_reason not in FinishReason.__members__:
        raise RunError(
            f"vLLM ended request {request_id} for the reason {output.finish_reason!r} "
            f"({output.stop_reason!r})."
        )
    token_ids = list(output.token_ids)
    assert output.logprobs is not None and len(output.logprobs) == len(token_ids)
    return Completion(
        token_ids=token_ids,
        # An entry may hold more probable tokens first, so look the sampled one up by its id.
        logprobs=[
            entry[token_id].logprob
            for token_id, entry in zip(token_ids, output.logprobs, strict=True)
        ],
        finish_reason=FinishReason(output.finish_reason),
        weight_version=version,
    )


def _is_running(process: psutil.Process) -> bool:
    """Tell whether a process is there and more than an exit code that nobody has read."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _check_version() -> None:
    major, minor = vllm.__version_tuple__[:2]
    if not OLDEST_VLLM <= (major, minor) < FIRST_UNKNOWN_VLLM:
        raise UserError(
            f"vLLM {vllm.__version__} is not supported; install a version from "
            f"{OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} to before "
            f"{FIRST_UNKNOWN_VLLM[0]}.{FIRST_UNKNOWN_VLLM[1]}."
        )
