"""Logprobs of given tokens without a float32 tensor of [tokens, vocabulary].

Legend: ``M`` wanted tokens, ``H`` hidden width, ``V`` vocabulary, ``C`` tokens of a chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""Hidden states [C, H] -> logits [C, V]."""


def token_logprobs(
    hidden: Tensor,
    token_ids: Tensor,
    head: Head,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(token | hidden) at ``temperature``, and optionally the entropy of each distribution.

    ``hidden`` [M, H], ``token_ids`` int64 [M] -> float32 [M] each. Logits exist for
    ``chunk_tokens`` tokens at a time; the backward pass computes them again, it does not keep them.
    """
    if len(token_ids) == 0:
        empty = hidden.sum(-1).float() * 0  # keeps the graph, so that every rank has a backward
        return empty, empty.detach() if with_entropy else None

    def one(h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = head(h).float() / temperature
        normalizer = logits.logsumexp(-1)
        logprobs = logits.gather(-1, ids[:, None])[:, 0] - normalizer
        if not with_entropy:
            return logprobs, None
        logits = logits - normalizer[:, None]
        return logprobs, -(logits.exp() * logits).sum(-1).detach()

    chunks = []
    for h, ids in zip(hidden.split(chunk_tokens), token_ids.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            chunks.append(checkpoint(one, h, ids, use_reentrant=False))
        else:
            chunks.append(one(h, ids))
    logprobs = torch.cat([chunk[0] for chunk in chunks])
    return logprobs, torch.cat([chunk[1] for chunk in chunks]) if with_entropy else None
