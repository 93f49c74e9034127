"""The interface of sampling engines: requests in, completions out, weights in by version."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from nemo_like.config.optimizer import LoraConfig
from nemo_like.errors import RunError

if TYPE_CHECKING:
    import torch

    from nemo_like.refit.buckets import Bucket


MAX_TOKENS_PER_CHARACTER = 4
"""Byte-level tokenizers may spend one token on each byte of a UTF-8 character."""


class EngineMemory(StrEnum):
    """What an engine frees when it sleeps, in the order of waking."""

    weights = "weights"
    kv_cache = "kv_cache"


class FinishReason(StrEnum):
    """Why a completion ended."""

    stop = "stop"
    """An end-of-sequence id, a stop token id or a stop string."""
    length = "length"
    """``max_new_tokens`` or the end of the context; such a completion is *truncated*."""
    interrupted = "interrupted"
    """``Engine.interrupt``; the rest is sampled with other weights."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; ``temperature=0`` is greedy, ``top_k=0`` and ``top_p=1`` are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends a completion, the model's own end-of-sequence ids included."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One completion to sample. ``request_id`` is unique within a run, ``seed`` within a step."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int


def no_weights(request: GenerationRequest) -> RunError:
    """The refusal of an engine that would sample from noise."""
    return RunError(
        f"Request {request.request_id} is refused: the engine holds no usable weights (before its "
        "first refit, within one, or after one that failed)."
    )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Sampled tokens, the stop token included, and the logprob of each as it was sampled.

    ``logprobs[i]`` is log p(token_ids[i]) after temperature and filters (``processed_logprobs``).
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int
    """Version of the weights that sampled the first token."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed, because a sibling's were."""
    later_versions: tuple[tuple[int, int], ...] = ()
    """Weight changes on the way: first token of each newer version, and that version."""

    @property
    def versions(self) -> list[int]:
        """Version of the weights that sampled each token."""
        starts = [(0, self.weight_version), *self.later_versions, (len(self.token_ids), 0)]
        return [
            version for (start, version), (end, _) in pairwise(starts) for _ in range(start, end)
        ]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine needs to start, as plain values that travel to any process."""

    model_path: str
    dtype: str
    seed: int
    max_model_len: int
    """Most tokens of a prompt and its completion together."""
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    """Most completions that are sampled at one time."""
    device: str = "cpu"
    """``cpu`` or ``cuda``; the worker has set CUDA_VISIBLE_DEVICES before the engine starts."""
    gpu_memory_share: float = 0.85
    """Most of a GPU's memory that the engine takes (vLLM's ``gpu_memory_utilization``)."""
    weight_bytes: int = 0
    """The engine's weights on one GPU."""
    kv_cache_bytes: int | None = None
    """KV cache that the run can use at most. None: what the share holds; vLLM measures that, which
    goes wrong where others use the GPU at the same time."""
    eager_attention: bool = False
    """Whether the policy computes with ``policy.attention=eager``; for engines that have it."""
    lora: LoraConfig | None = None
    """Adapters that the engine applies separately from the model. None: they are merged into it, or
    there are none."""
    quantization: str | None = None
    """``generation.quantization``."""
    sleep: bool = False
    """Whether ``sleep`` and ``wake`` will be called."""
    engine_kwargs: dict[str, object]


class Receiver(Protocol):
    """An engine rank's end of refits; see ``refit``."""

    def tensors(
        self, version: int, *, adapters_only: bool = False
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """Every tensor of one refit by name; each is overwritten once the next bucket is drawn.

        Raises RunError if the sender fails, is gone, or sends another version.
        """
        ...


class Link(Protocol):
    """How a replica connects to the sender of its weights."""

    def receiver(
        self, rank: int, buckets: "Sequence[Bucket]", device: "torch.device", timeout_s: float
    ) -> Receiver:
        """Connect rank ``rank`` of the replica."""
        ...


class Engine(Protocol):
    """One replica of a sampling engine, living in the process (or child processes) of its worker.

    An engine starts without weights: ``generate`` before the first ``load_weights`` raises
    RunError, because it would sample from noise. A refit that is refused before a weight is touched
    leaves weights, version and generation as they were.
    """

    async def start(self) -> None:
        """Bring the engine up; raises UserError for what it refuses in its configuration."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; concurrent calls are batched continuously."""
        ...

    async def interrupt(self) -> None:
        """Stop sampling for a refit.

        Each running completion has returned the tokens it has so far when this returns, or goes on
        by itself after the refit, with nothing cached of before.
        """
        ...

    async def connect(self, link: Link, buckets: "Sequence[Bucket]", timeout_s: float) -> None:
        """Connect to the sender of weights; its refits come as ``buckets``.

        Raises RunError unless their names, shapes and dtypes together are exactly those of the
        model's own architecture (tied copies sent once) and of the adapters it was started with.
        """
        ...

    async def load_weights(self, version: int, *, adapters_only: bool = False) -> None:
        """Receive weights, all or those of adapters, then reset every cache.

        Raises RunError if ``version`` is not newer than that of the weights held, if adapters come
        alone to an engine that lacks weights of a model or was started without, or if the sender
        fails or sends another; in the latter cases the engine refuses to generate from then on.
        """
        ...

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache; without weights the engine won't generate."""
        ...

    async def wake(self, memory: EngineMemory) -> None:
        """Reclaim one kind of memory: weights, then a refit, then the KV cache."""
        ...

    async def shutdown(self) -> None:
        """End the engine and every process that it started."""
        ...


@runtime_checkable
class HasProcesses(Protocol):
    """An engine with processes of its own, which may end while its worker lives on."""

    async def watch(self) -> None:
        """Return when the engine is shut down; raises WorkerDiedError if it ends by itself."""
        ...
