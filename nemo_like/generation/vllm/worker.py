"""What runs inside vLLM's worker processes: the receiving end of refits, and cheap logprobs."""

import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import sampler

from nemo_like.config.optimizer import LoraConfig
from nemo_like.generation.vllm.loading import load_model
from nemo_like.refit.buckets import is_adapter

_LOGPROBS = "compute_topk_scores"
"""The function of vLLM's GPU sampler that computes logprobs."""


class RefitExtension:
    """Methods that vLLM mixes into each of its workers, one per tensor-parallel rank."""

    # The worker's own; bare annotations, because vLLM refuses an extension that redefines a name.
    vllm_config: VllmConfig
    model_runner: Any
    reload_weights: Callable[..., None]
    device: torch.device
    rank: int

    def connect_refit(self, pickled: bytes) -> None:
        """Connect this rank to its sender; ``pickled``: link, buckets, timeout and adapters."""
        # vLLM's own serialiser would not bring dataclasses over.
        link, buckets, timeout_s, self.refit_lora = pickle.loads(pickled)
        self.refit_receiver = link.receiver(self.rank, buckets, self.device, timeout_s)
        use_cheap_logprobs()

    def load_refit(self, version: int, adapters_only: bool) -> None:
        """Replace the weights of this rank by its shards of the tensors that arrive."""
        tensors = self.refit_receiver.tensors(version, adapters_only=adapters_only)
        lora: LoraConfig | None = self.refit_lora
        if lora is None:
            self._load_model(tensors)
            _exhaust(tensors)
            return
        from nemo_like.generation.vllm.lora import replace_adapters, without_adapters

        adapters: dict[str, Tensor] = {}
        if not adapters_only:
            with without_adapters(self.model_runner.get_model()):
                self._load_model(_keeping_adapters(tensors, adapters))
        _exhaust(_keeping_adapters(tensors, adapters))
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            replace_adapters(self.model_runner, adapters, lora)

    def _load_model(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        load_model(self.model_runner.get_model(), self.vllm_config, tensors, self.reload_weights)


def _keeping_adapters(
    tensors: Iterator[tuple[str, Tensor]], adapters: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """``tensors``, but those of adapters go to ``adapters`` as copies."""
    for name, tensor in tensors:
        if is_adapter(name):
            adapters[name] = tensor.clone()
        else:
            yield name, tensor


def _exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Let the sender know that the last bucket was read."""
    for name, _ in tensors:
        raise RuntimeError(f"vLLM did not load {name}.")


@functools.cache  # once a process, however often it connects
def use_cheap_logprobs() -> None:
    """Replace vLLM's kernels for logprobs where only sampled tokens need them.

    Its GPU sampler (0.26 to 0.33) walks the vocabulary with one program a sequence, twice, for a
    logprob and for a rank that nobody reads: 2 ms a step at 128 sequences and 152k tokens.
    """
    original = getattr(sampler, _LOGPROBS)

    def compute(
        logits: Tensor, num_logprobs: int, sampled_token_ids: Tensor, *args: Any, **kwargs: Any
    ) -> LogprobsTensors:
        cu_num_logits = args[0] if args else kwargs.get("cu_num_logits")
        if num_logprobs or cu_num_logits is not None or kwargs.get("max_per_req_token_ids"):
            return original(logits, num_logprobs, sampled_token_ids, *args, **kwargs)
        ids = sampled_token_ids.to(torch.int64).unsqueeze(-1)
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, ids)
        ranks = torch.zeros_like(ids[:, 0])
        return LogprobsTensors(ids, logprobs, ranks)

    setattr(sampler, _LOGPROBS, compute)
