"""The ``Engine`` protocol over a plain transformers model, for odd models and exact tests.

Shapes: B requests of one batch, T tokens so far, V vocabulary.
"""

import asyncio
import inspect
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nemo_like.errors import RunError, UserError
from nemo_like.generation.local_engine import GrowingRow, LocalEngine, Waiting, fail
from nemo_like.generation.protocol import (
    Completion,
    EngineConfig,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.models.adapter_places import inject_adapters
from nemo_like.models.build import architecture, new_model
from nemo_like.models.naming import plain_name

logger = logging.getLogger(__name__)


class HFEngine(LocalEngine):
    """One transformers model in this process; see ``Engine`` for its contract.

    Requests that arrive in the same turn of the event loop form one batch, in order of arrival,
    which runs to its end in a thread; so the same requests in the same order give the same bits.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._model: PreTrainedModel | None = None
        self._last_logits_only: dict[str, int] = {}

    async def start(self) -> None:
        """Build the model without weights; UserError for settings this engine lacks."""
        if self._config.engine_kwargs:
            raise UserError(
                f"generation.engine_kwargs.{next(iter(self._config.engine_kwargs))} has no effect "
                "with generation.backend=hf; remove it."
            )
        if self._config.tensor_parallel_size != 1:
            raise UserError(
                f"generation.tensor_parallel_size={self._config.tensor_parallel_size} has no "
                "effect with generation.backend=hf; use 1."
            )
        self._model = await asyncio.to_thread(build_model, self._config)
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            self._last_logits_only = {"logits_to_keep": 1}
        self._serve_requests()

    async def shutdown(self) -> None:
        """Stop serving and drop the model; completions that are under way fail."""
        await super().shutdown()
        self._model = None

    @torch.no_grad()
    def _copy_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Overwrite the model's tensors in place; tied copies share storage and follow."""
        assert self._model is not None
        dtype = getattr(torch, self._config.dtype)
        naming = architecture(self._config.model_path, dtype).naming
        own = {plain_name(name): one for name, one in self._model.state_dict().items()}
        for name, tensor in naming.in_memory(tensors):
            own[name].copy_(tensor)
        self._model.tie_weights()

    async def _serve(self) -> None:
        """Batch what arrived and sample it, until cancelled."""
        while True:
            batch = [await self._queue.get()]
            # Callers that became ready together all get to enqueue before the batch closes.
            await asyncio.sleep(0)
            while len(batch) < self._config.max_num_seqs and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            await self._answer(batch)

    async def _answer(self, batch: list[Waiting]) -> None:
        requests = [request for request, _ in batch]
        assert self._version is not None
        try:
            async with self._model_in_use:
                completions = await asyncio.to_thread(self._sample, requests, self._version)
        except Exception as error:  # The boundary to a model's code, which may raise anything.
            logger.exception("A batch of %d requests failed.", len(batch))
            for request, done in batch:
                reason = f"Request {request.request_id} failed: the model raised {error!r}."
                fail(done, RunError(reason))
            return
        for (_, done), completion in zip(batch, completions, strict=True):
            if not done.done():  # Its caller may have given up.
                done.set_result(completion)

    @torch.inference_mode()
    def _sample(self, requests: Sequence[GenerationRequest], version: int) -> list[Completion]:
        """Sample one batch to its end."""
        config = self._config
        rows = [_Row(request, config.max_model_len, config.device) for request in requests]
        unfinished = [row for row in rows if row.finish_reason is None]
        if unfinished and not self._interrupted.is_set():
            self._decode(unfinished)
        return [row.completion(version) for row in rows]

    def _decode(self, rows: Sequence["_Row"]) -> None:
        """Extend every row until it finishes; finished rows idle in their place."""
        assert self._model is not None
        ids, mask = _pad_left([row.request.prompt_ids for row in rows], self._config.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        samplings = [row.request.sampling for row in rows]
        cache = None
        while True:
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                **self._last_logits_only,
            )
            logprobs = processed_logprobs(output.logits[:, -1], samplings)
            ids = torch.stack([row.draw(dist) for row, dist in zip(rows, logprobs, strict=True)])
            chosen = logprobs.gather(1, ids).flatten().tolist()
            for row, token_id, logprob in zip(rows, ids.flatten().tolist(), chosen, strict=True):
                if row.finish_reason is None:
                    row.extend([token_id], [logprob], self.ends_with_string)
            if all(row.finish_reason for row in rows):
                return
            if self._interrupted.is_set():
                return
            cache = output.past_key_values
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            # Idle rows must not run past the last position that the model knows.
            positions = (positions[:, -1:] + 1).clamp(max=self._config.max_model_len - 1)


def build_model(config: EngineConfig) -> PreTrainedModel:
    """The architecture with random weights, which the first refit replaces."""
    with torch.device(config.device):
        model = new_model(
            config.model_path,
            dtype=getattr(torch, config.dtype),
            # None: sdpa, or eager for models that lack it.
            attn_implementation="eager" if config.eager_attention else None,
        )
        if config.lora is not None:
            inject_adapters(model, config.lora)
    return model.eval().requires_grad_(False)


class _Row(GrowingRow):
    def __init__(self, request: GenerationRequest, max_model_len: int, device: str) -> None:
        super().__init__(request, max_model_len)
        self._generator = torch.Generator(device).manual_seed(request.seed)

    def draw(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Draw a token id [1] from ``logprobs`` [V]."""
        if self.request.sampling.temperature == 0:
            return logprobs.argmax(keepdim=True)
        return torch.multinomial(logprobs.exp(), 1, generator=self._generator)


def processed_logprobs(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Float32 logprobs [B, V] that each row is drawn from, of its logits [B, V].

    Greedy rows keep the plain softmax, as with vLLM: temperature 1 and no filters.
    """
    temperatures = torch.tensor([each.temperature or 1.0 for each in samplings])
    logits = logits.float() / temperatures.to(logits.device)[:, None]
    for row, sampling in zip(logits, samplings, strict=True):
        if sampling.temperature > 0:
            _mask_unlikely(row, sampling.top_k, sampling.top_p)
    return logits.log_softmax(-1)


def _mask_unlikely(logits: torch.Tensor, top_k: int, top_p: float) -> None:
    """Set to -inf, in place, the logits [V] that top-k and then top-p leave out."""
    if 0 < top_k < len(logits):
        logits.masked_fill_(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        likelier = probs.cumsum(-1) - probs  # Mass before each token; 0 for the first, which stays.
        logits[order[likelier >= top_p]] = -torch.inf


def _pad_left(prompts: Sequence[list[int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, both [B, T], with the prompts' ends aligned."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
