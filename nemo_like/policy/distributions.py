"""Several logprobs of each next-token distribution: at given ids, or of the most likely tokens.

Legend: ``M`` wanted tokens, ``H`` hidden width, ``V`` rows of this rank's slice of the vocabulary,
``K`` ids a token.

With z = logits / temperature and p = softmax(z), the sum of g_k * logprob_k has the gradient
sum_k g_k (onehot(id_k) - p) by z. Chunks, and ranks that hold slices of the vocabulary, are those
of ``logprobs.py``; only maxima, sums and the K logprobs travel.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from nemo_like.policy.head import Head, HeadCall, multiply
from nemo_like.policy.parallel.collectives import gather_columns

if TYPE_CHECKING:
    from nemo_like.policy.model import ForwardRequest


def logprobs_at(
    hidden: Tensor,
    ids: Tensor,
    head: Head,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(id | hidden) at ``temperature`` of K ids for each token, each of the whole vocabulary.

    ``hidden`` [M, H], ``ids`` int64 [M, K] -> float32 [M, K] with gradient; and the entropies [M],
    without gradient, if they are wanted. Precision and ranks are as in ``token_logprobs``.
    """
    call = HeadCall.of(head, temperature, chunk_tokens, with_entropy=with_entropy)
    return _LogprobsAt.apply(  # pyright: ignore[reportReturnType]
        hidden, head.weight, head.bias, ids, call
    )


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, head: Head, k: int, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Logprobs float32 [M, K] of the ``k`` most likely tokens, and their ids int64 [M, K].

    In falling order; if the vocabulary has no more than ``k``, all are, in order of id.
    """
    call = HeadCall.of(head, temperature, chunk_tokens)
    columns = head.weight.to(call.factor_dtype(hidden, head.weight)).t()
    chunks = list(call.chunks(len(hidden))) or [slice(0, 0)]
    found = [_top_of_chunk(hidden[rows], columns, head, call, k) for rows in chunks]
    logprobs, ids = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(ids)


def _top_of_chunk(
    hidden: Tensor, columns: Tensor, head: Head, call: HeadCall, k: int
) -> tuple[Tensor, Tensor]:
    logits = _logits(hidden, columns, head.bias, call)
    normalizer = _normalizer(logits, call)
    own = logits.shape[1]
    if k >= own:
        best, ids = logits, torch.arange(own, device=logits.device).expand_as(logits)
    else:
        best, ids = logits.topk(k)
    ids = ids + call.first_token_id
    if call.group is not None:
        missing = min(k, head.widest or own) - best.shape[1]
        if missing > 0:  # ranks exchange equally many; k is at most what all have together
            best, ids = pad(best, (0, missing), value=-torch.inf), pad(ids, (0, missing))
        best, ids = gather_columns(best, call.group), gather_columns(ids, call.group)
        if k < best.shape[1]:
            best, at = best.topk(k)
            ids = ids.gather(1, at)
    return best - normalizer[:, None], ids


def several(at: Tensor, head: Head, request: "ForwardRequest", chunk_tokens: int) -> Tensor:
    """Float32 [2 K or 2 + K, M]: of the most likely tokens, or of each token and given ids."""
    options: dict[str, Any] = {"temperature": request.temperature, "chunk_tokens": chunk_tokens}
    if request.top_k:
        common = head if request.vocabulary is None else head.below(request.vocabulary)
        logprobs, ids = top_logprobs(at, common, request.top_k, **options)
        return torch.cat([logprobs.t(), ids.t().to(logprobs.dtype)])
    assert request.ids is not None
    own_ids, with_entropy = request.inputs.target_ids[:, None], request.with_entropy
    if request.vocabulary is None:
        ids = torch.cat([own_ids, request.ids], dim=1)
        logprobs, entropy = logprobs_at(at, ids, head, with_entropy=with_entropy, **options)
        own, others = logprobs[:, :1], logprobs[:, 1:]
    else:  # the token itself was sampled from all of the vocabulary
        detached = at.detach()
        own, entropy = logprobs_at(detached, own_ids, head, with_entropy=with_entropy, **options)
        others, _ = logprobs_at(at, request.ids, head.below(request.vocabulary), **options)
    entropies = own.detach().t() * 0 if entropy is None else entropy[None]
    return torch.cat([own.t(), entropies, others.t()])


class _LogprobsAt(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, call: HeadCall
    ) -> tuple[Tensor, Tensor | None]:
        rows_of, here = call.own_rows(ids, len(weight))
        columns = weight.to(call.factor_dtype(hidden, weight)).t()
        logprobs = hidden.new_empty(ids.shape, dtype=torch.float32)
        normalizer = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(normalizer) if call.with_entropy else None
        for rows in call.chunks(len(hidden)):
            logits = _logits(hidden[rows], columns, bias, call)
            normalizer[rows] = _normalizer(logits, call)
            logprobs[rows] = logits.gather(1, rows_of[rows])
            if entropy is not None:
                logs = logits.sub_(normalizer[rows, None])
                entropy[rows] = -(logs.exp() * logs).sum(-1)
        if call.group is not None:
            assert here is not None
            logprobs.masked_fill_(~here, 0)
            dist.all_reduce(logprobs, group=call.group)
            if entropy is not None:
                dist.all_reduce(entropy, group=call.group)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        ctx.call = call
        ctx.save_for_backward(hidden, weight, bias, ids, normalizer)
        return logprobs.sub_(normalizer[:, None]), entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        call: HeadCall = ctx.call
        hidden, weight, bias, ids, normalizer = ctx.saved_tensors
        rows_of, here = call.own_rows(ids, len(weight))
        dtype = call.factor_dtype(hidden, weight)
        pulls = gradients[0] * call.transform.rate
        totals = pulls.sum(-1, keepdim=True)
        if here is not None:
            pulls = pulls.masked_fill(~here, 0)

        def of_products(rows: slice, products: Tensor) -> Tensor:
            logits = call.transform.apply_(products, bias)
            shares = (logits - normalizer[rows, None]).exp_().mul_(-totals[rows])
            shares.scatter_add_(1, rows_of[rows], pulls[rows])
            if call.transform.limit is not None:
                shares.mul_(call.transform.bend_(logits))
            return shares.to(dtype)

        return *call.gradients(ctx, (hidden, weight, bias), of_products), None, None


def _logits(hidden: Tensor, columns: Tensor, bias: Tensor | None, call: HeadCall) -> Tensor:
    """[C, V]: logits / temperature of this rank's slice."""
    return call.transform.apply_(multiply(hidden.to(columns.dtype), columns), bias)


def _normalizer(logits: Tensor, call: HeadCall) -> Tensor:
    """[C]: logsumexp over the whole vocabulary."""
    if call.group is None:
        return logits.logsumexp(-1)
    peak = logits.amax(-1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=call.group)
    total = (logits - peak[:, None]).exp_().sum(-1)
    dist.all_reduce(total, group=call.group)
    return peak + total.log()
