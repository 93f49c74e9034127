"""Completions that a refit interrupts: the rest is sampled with other weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from nemo_like.generation.protocol import (
    MAX_TOKENS_PER_CHARACTER,
    Completion,
    FinishReason,
    GenerationRequest,
)


def continued(request: GenerationRequest, sampled: Completion) -> GenerationRequest:
    """The request for the rest of an interrupted completion."""
    count = len(sampled.token_ids)
    most = request.sampling.max_new_tokens - count
    return replace(
        request,
        request_id=f"{request.request_id}+{count}",
        prompt_ids=request.prompt_ids + sampled.token_ids,
        sampling=replace(request.sampling, max_new_tokens=most),
        # Later positions must not draw the same random numbers again.
        seed=(request.seed + count * 0x9E3779B97F4A7C15) % 2**63,
    )


def joined(parts: Sequence[Completion]) -> Completion:
    """Join parts that continue each other into one completion."""
    parts = [one for one in parts[:-1] if one.token_ids] + [parts[-1]]
    starts = [0, *accumulate(len(one.token_ids) for one in parts)]
    versions = [one.weight_version for one in parts]
    return Completion(
        token_ids=[token for one in parts for token in one.token_ids],
        logprobs=[logprob for one in parts for logprob in one.logprobs],
        finish_reason=parts[-1].finish_reason,
        weight_version=versions[0],
        num_cached_tokens=parts[0].num_cached_tokens,
        later_versions=tuple(zip(starts[1:], versions[1:], strict=False)),
    )


def stopped(
    whole: Completion, stop: Sequence[str], decode: Callable[[list[int]], str]
) -> Completion:
    """End a joined completion at a stop string that began in an earlier part.

    Engines look for stop strings in what they sample, and a part begins with nothing.
    """
    most = MAX_TOKENS_PER_CHARACTER * max(map(len, stop), default=0)
    for start, _ in whole.later_versions:
        for end in range(start + 1, min(start + most, len(whole.token_ids)) + 1):
            text = decode(whole.token_ids[max(0, start - most) : end])
            if any(one in text for one in stop):
                return replace(
                    whole,
                    token_ids=whole.token_ids[:end],
                    logprobs=whole.logprobs[:end],
                    finish_reason=FinishReason.stop,
                    later_versions=tuple(one for one in whole.later_versions if one[0] < end),
                )
    return whole
