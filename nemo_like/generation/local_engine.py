"""What engines share that compute in the process of their worker."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nemo_like.data.tokenizer import load_tokenizer
from nemo_like.errors import RunError
from nemo_like.generation.protocol import (
    MAX_TOKENS_PER_CHARACTER,
    Completion,
    EngineConfig,
    EngineMemory,
    FinishReason,
    GenerationRequest,
    Link,
    Receiver,
    SamplingParams,
    no_weights,
)
from nemo_like.models.build import model_settings
from nemo_like.refit.buckets import Bucket, check_buckets, check_refit

Waiting = tuple[GenerationRequest, "asyncio.Future[Completion]"]
Ends = Callable[[SamplingParams, Sequence[int]], bool]
"""Whether sampled tokens end with a stop string."""


class GrowingRow:
    """A request, and the tokens of its completion so far."""

    num_cached_tokens = 0

    def __init__(self, request: GenerationRequest, max_model_len: int) -> None:
        room = max_model_len - len(request.prompt_ids)
        self.request, self.most = request, min(request.sampling.max_new_tokens, room)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason = FinishReason.length if self.most <= 0 else None
        self._stop_ids = frozenset(request.sampling.stop_token_ids)

    def extend(self, token_ids: list[int], logprobs: list[float], ends: Ends) -> None:
        """Take tokens up to the one that ends the completion."""
        sampling = self.request.sampling
        new = token_ids[: self.most - len(self.token_ids)]
        if not self._stop_ids.isdisjoint(new):
            new = new[: 1 + next(i for i, each in enumerate(new) if each in self._stop_ids)]
            self.finish_reason = FinishReason.stop
        for part in [[each] for each in new] if sampling.stop else [new]:
            self.token_ids += part
            if sampling.stop and ends(sampling, self.token_ids):
                self.finish_reason = FinishReason.stop
                break
        self.logprobs += logprobs[: len(self.token_ids) - len(self.logprobs)]
        if self.finish_reason is None and len(self.token_ids) == self.most:
            self.finish_reason = FinishReason.length

    def completion(self, version: int) -> Completion:
        """The finished or interrupted completion."""
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason or FinishReason.interrupted,
            weight_version=version,
            num_cached_tokens=self.num_cached_tokens,
        )


class LocalEngine:
    """All of ``Engine`` but ``start``, which builds a model and ends with ``_serve_requests``.

    A refit is refused while completions are being sampled.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._server: asyncio.Task[None] | None = None
        self._version: int | None = None
        self._num_running = 0
        self._receiver: Receiver | None = None
        self._model_in_use = asyncio.Lock()
        self._interrupted = threading.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def _serve(self) -> None:
        """Answer the requests of ``_queue``, until cancelled."""
        raise NotImplementedError

    def _copy_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Overwrite all weights in place."""
        raise NotImplementedError

    def _serve_requests(self) -> None:
        vocab_size = model_settings(self._config.model_path).get_text_config().vocab_size
        self._vocab_size = vocab_size
        self._server = asyncio.create_task(self._serve())

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; RunError if the model fails."""
        server = self._server
        if server is None or self._version is None:
            raise no_weights(request)
        self._check_prompt(request)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._num_running += 1
        self._idle.clear()
        try:
            self._queue.put_nowait((request, done))
            await asyncio.wait({done, server}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                broke = None if server.cancelled() else server.exception()
                told = f"failed: {broke!r}" if broke else "was shut down"
                raise RunError(f"The engine {told}.")
            return done.result()
        finally:
            done.cancel()
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def interrupt(self) -> None:
        """Stop what runs after its current token or burst; waiting requests return no tokens."""
        self._interrupted.set()
        await self._idle.wait()
        self._interrupted.clear()

    async def connect(self, link: Link, buckets: Sequence[Bucket], timeout_s: float) -> None:
        """Connect to the sender of weights."""
        dtype = getattr(torch, self._config.dtype)
        check_buckets(buckets, self._config.model_path, dtype, self._config.lora)
        device = torch.device(self._config.device)
        self._receiver = await asyncio.to_thread(link.receiver, 0, buckets, device, timeout_s)

    async def load_weights(self, version: int, *, adapters_only: bool = False) -> None:
        """Replace weights; RunError as the protocol says. There is no cache to reset."""
        if self._receiver is None:
            raise RunError(f"Refit {version} came before the engine had started.")
        check_refit(
            version,
            self._version,
            self._config.lora,
            adapters_only=adapters_only,
            running=self._num_running,
        )
        # Without a version the engine refuses to generate until every tensor is in place.
        self._version = None
        async with self._model_in_use:  # By a batch whose callers have all given up.
            tensors = self._receiver.tensors(version, adapters_only=adapters_only)
            await asyncio.to_thread(self._copy_weights, tensors)
        self._version = version

    async def sleep(self) -> None:
        """Nothing: this engine keeps its memory."""

    async def wake(self, memory: EngineMemory) -> None:
        """Nothing: this engine keeps its memory."""

    async def shutdown(self) -> None:
        """Stop serving; completions that are under way or wait fail."""
        if self._server is not None:
            self._server.cancel()
            await asyncio.wait({self._server})
        self._server = self._version = self._receiver = None

    def ends_with_string(self, sampling: SamplingParams, token_ids: Sequence[int]) -> bool:
        """Whether the last token completed a stop string; special tokens count as text."""
        if not sampling.stop:
            return False
        tokenizer = self._tokenizer or load_tokenizer(self._config.model_path)
        self._tokenizer = tokenizer
        num_tokens = MAX_TOKENS_PER_CHARACTER * max(map(len, sampling.stop))
        tail = tokenizer.decode(list(token_ids[-num_tokens:]), skip_special_tokens=False)
        return any(text in tail for text in sampling.stop)

    def _check_prompt(self, request: GenerationRequest) -> None:
        bad = [each for each in request.prompt_ids if not 0 <= each < self._vocab_size]
        if bad or not request.prompt_ids:
            reason = f"holds token id {bad[0]}, not below {self._vocab_size}" if bad else "is empty"
            raise RunError(f"The prompt of request {request.request_id} {reason}.")


def fail(done: "asyncio.Future[Completion]", error: RunError) -> None:
    """Answer a request with an error."""
    if not done.done():  # Its caller may have given up.
        done.set_exception(error)
