"""Translate requests and completions to and from vLLM's types."""

import dataclasses
from collections.abc import Sequence

import vllm
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from nemo_like.errors import RunError
from nemo_like.generation.protocol import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)


def sampling_params(
    sampling: SamplingParams, seed: int, max_new_tokens: int, *, in_flight: bool
) -> vllm.SamplingParams:
    """Parameters of a request; ``in_flight``: also return tokens before it is finished."""
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
        logprobs=0,  # Of the sampled token only.
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        # An aborted request returns nothing more, so its tokens must arrive as they are sampled.
        output_kind=RequestOutputKind.DELTA if in_flight else RequestOutputKind.FINAL_ONLY,
    )


def whole(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    """Join the parts of a streamed output."""
    ids: list[int] = []
    logprobs = FlatLogprobs()
    for one in parts:
        ids += one.token_ids
        if one.logprobs:
            assert isinstance(one.logprobs, FlatLogprobs)
            # Before 0.32, a part that ends an aborted request repeats the logprobs of all parts.
            count = len(one.token_ids)
            logprobs.token_ids += one.logprobs.token_ids[:count]
            logprobs.logprobs += one.logprobs.logprobs[:count]
    return dataclasses.replace(parts[-1], token_ids=ids, logprobs=logprobs)


def completion(
    request: GenerationRequest, sampled: CompletionOutput, num_cached: int, version: int
) -> Completion:
    """Translate vLLM's output; RunError if it failed."""
    reasons = {**FinishReason.__members__, "abort": FinishReason.interrupted}
    reason = reasons.get(str(sampled.finish_reason))
    if reason is None:
        raise RunError(
            f"vLLM ended request {request.request_id} for the reason {sampled.finish_reason!r} "
            f"({sampled.stop_reason!r})."
        )
    token_ids = list(sampled.token_ids)
    logprobs = sampled.logprobs
    if not token_ids:  # aborted before its first one
        return Completion(token_ids=[], logprobs=[], finish_reason=reason, weight_version=version)
    # One entry a token: with any more, the first would be the sampled one's, and not the likeliest.
    assert isinstance(logprobs, FlatLogprobs)
    assert logprobs.token_ids == token_ids
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs.logprobs,
        finish_reason=reason,
        weight_version=version,
        num_cached_tokens=num_cached,
    )
