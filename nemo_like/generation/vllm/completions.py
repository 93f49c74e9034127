"""Translate requests and completions to and from vLLM's types."""

import copy
import functools
from collections.abc import Sequence

from vllm import SamplingParams as VLLMSamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from nemo_like.errors import RunError
from nemo_like.generation.protocol import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.generation.vllm.scheduler import LOGPROBS, STARTS


def sampling_params(sampling: SamplingParams, seed: int, max_new_tokens: int) -> VLLMSamplingParams:
    """Parameters of a request."""
    params = copy.copy(_checked(sampling, max_new_tokens))
    params.seed = seed
    return params


@functools.lru_cache(maxsize=64)
def _checked(sampling: SamplingParams, max_new_tokens: int) -> VLLMSamplingParams:
    """Parameters without a seed; vLLM's checks of them take as long as sending a request."""
    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        max_tokens=max_new_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        # The ids above are all that ends a completion, whatever the model folder says.
        ignore_eos=True,
        logprobs=0,  # Of the sampled token only.
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # Nobody else holds it, and a deep copy is a third of a request's work.
    )


def completion(
    request: GenerationRequest, found: RequestOutput, versions: Sequence[int]
) -> Completion:
    """Translate vLLM's output; RunError if it failed. ``versions`` of the weights, by refit."""
    (sampled,) = found.outputs
    reason = FinishReason.__members__.get(str(sampled.finish_reason))
    if reason is None:
        raise RunError(
            f"vLLM ended request {request.request_id} for the reason {sampled.finish_reason!r} "
            f"({sampled.stop_reason!r})."
        )
    token_ids = list(sampled.token_ids)
    assert found.kv_transfer_params is not None
    logprobs = found.kv_transfer_params.get(LOGPROBS)
    if logprobs is None:
        # One entry a token: of any more, the first would be the sampled one, and not the likeliest.
        assert isinstance(sampled.logprobs, FlatLogprobs)
        assert sampled.logprobs.token_ids == token_ids
        logprobs = sampled.logprobs.logprobs
    assert len(logprobs) == len(token_ids)
    # Of refits before the same token, the last one counts.
    starts = {start: versions[refit] for refit, start in found.kv_transfer_params[STARTS]}
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        weight_version=starts.pop(0),
        num_cached_tokens=found.num_cached_tokens or 0,
        later_versions=tuple(one for one in starts.items() if one[0] < len(token_ids)),
    )
