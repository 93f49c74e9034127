"""Logprobs of given tokens without a float32 tensor of [tokens, vocabulary].

Legend: ``M`` wanted tokens, ``H`` hidden width, ``V`` rows of this rank's slice of the vocabulary,
``C`` tokens of a chunk.

With z = logits / temperature, p = softmax(z) and t the token: logprob = z_t - logsumexp(z), whose
gradient by z is onehot(t) - p. That of the entropy H = -sum p log p is -p (log p + H). So the
forward pass keeps one logsumexp a token, and H, and the backward pass multiplies each chunk again.
Over ranks that hold slices of the vocabulary (Megatron-LM, arXiv:1909.08053, section 3) only maxima
and sums of [M] travel, and the gradient of ``hidden``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nemo_like.policy.head import Head, HeadCall, Transform, multiply


def token_logprobs(
    hidden: Tensor,
    token_ids: Tensor,
    head: Head,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = False,
    entropy_trains: bool = False,
    compile: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(token | hidden) at ``temperature``, and optionally the entropy of each distribution.

    ``hidden`` [M, H], ``token_ids`` int64 [M] -> float32 [M] each, in nats; the entropy has a
    gradient if ``entropy_trains``. At most two float32 tensors of [chunk_tokens, V] exist at one
    time (three where a capped head's entropy trains). ``compile`` fuses what follows each matrix
    product (GPU). Logits are float32; factors, and the gradient by the logits, stay in 16 bits on a
    GPU where both have such a dtype and ``head.float32`` is off. Gradients by ``weight`` and
    ``bias`` are summed over chunks in float32.

    All ranks of ``head.group`` call this with the same ``hidden`` and ``token_ids`` and use the
    result alike: each gets the whole gradient of ``hidden`` and that of its own slice.
    """
    call = HeadCall.of(
        head,
        temperature,
        chunk_tokens,
        with_entropy=with_entropy or entropy_trains,
        entropy_trains=entropy_trains,
        compile=compile,
    )
    return _TokenLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden, head.weight, head.bias, token_ids, call
    )


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        call: HeadCall,
    ) -> tuple[Tensor, Tensor | None]:
        ids, here = call.own_rows(token_ids, len(weight))
        dtype = call.factor_dtype(hidden, weight)
        columns = weight.to(dtype).t()
        summarize = _compiled(_summarize) if call.compile else _summarize
        sums = hidden.new_empty(3 + call.with_entropy, len(hidden), dtype=torch.float32)
        for rows in call.chunks(len(hidden)):
            products = multiply(hidden[rows].to(dtype), columns)
            sums[:, rows] = summarize(products, bias, ids[rows], call.transform, call.with_entropy)
        if here is not None:
            _merge_(sums, here, call.group)
        peak, total, target = sums[:3]
        log_total = total.log()
        logprobs = (target - peak) - log_total
        entropy = log_total - sums[3] / total if call.with_entropy else None
        kept = [hidden, weight, bias, token_ids, target, logprobs, peak + log_total]
        if entropy is not None and not call.entropy_trains:
            ctx.mark_non_differentiable(entropy)
        ctx.call = call
        ctx.save_for_backward(*kept, entropy if call.entropy_trains else None)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        call: HeadCall = ctx.call
        hidden, weight, bias, token_ids, target, logprobs, normalizer, entropy = ctx.saved_tensors
        ids, here = call.own_rows(token_ids, len(weight))
        dtype = call.factor_dtype(hidden, weight)
        pull, spread = gradients[0] * call.transform.rate, None
        # Set, not added to -p: rounded to 16 bits, a p near 1 has lost the digits of 1 - p.
        at_target = -logprobs.expm1() * pull
        if entropy is not None:
            # -p (pull + spread * (log p + H)), of which log p alone differs between tokens.
            spread = gradients[1] * call.transform.rate
            at_target -= logprobs.exp() * spread * (logprobs + entropy)
            pull = pull + spread * entropy
        at_target *= call.transform.bend_(target.clone())
        differentiate = _compiled(_differentiate) if call.compile else _differentiate

        def of_products(rows: slice, products: Tensor) -> Tensor:
            d_products = differentiate(
                products,
                bias,
                normalizer[rows],
                pull[rows],
                None if spread is None else spread[rows],
                call.transform,
                dtype,
            )
            _set_(d_products, ids[rows], at_target[rows], None if here is None else here[rows])
            return d_products

        return *call.gradients(ctx, (hidden, weight, bias), of_products), None, None


def _summarize(
    products: Tensor, bias: Tensor | None, ids: Tensor, transform: Transform, with_entropy: bool
) -> Tensor:
    """[C, V] -> [3 or 4, C]: max z, sum e, z_t, sum e * (z - max z), with e = exp(z - max z)."""
    logits = transform.apply_(products, bias)
    target = logits.gather(1, ids[:, None])[:, 0]
    peak = logits.amax(-1)
    logits.sub_(peak[:, None])
    if not with_entropy:
        return torch.stack([peak, logits.exp_().sum(-1), target])
    exponentials = logits.exp()
    total = exponentials.sum(-1)
    return torch.stack([peak, total, target, exponentials.mul_(logits).sum(-1)])


def _merge_(sums: Tensor, here: Tensor, group: dist.ProcessGroup | None) -> None:
    """In place: sums of a slice of the vocabulary -> those of all of it."""
    peak = sums[0].clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shift = sums[0] - peak
    sums[0] = peak
    sums[2] = torch.where(here, sums[2], 0)
    if len(sums) > 3:
        sums[3] = (sums[3] + sums[1] * shift) * shift.exp()
    sums[1] *= shift.exp()
    dist.all_reduce(sums[1:], group=group)


def _differentiate(
    products: Tensor,
    bias: Tensor | None,
    normalizer: Tensor,
    pull: Tensor,
    spread: Tensor | None,
    transform: Transform,
    dtype: torch.dtype,
) -> Tensor:
    """-p * (pull + spread * log p) * bend [C, V], without the target's own term.

    ``spread`` is None where entropies don't train.
    """
    logits = transform.apply_(products, bias)
    bend = None
    if transform.limit is None:
        logs = logits.sub_(normalizer[:, None])
    else:
        logs, bend = logits - normalizer[:, None], transform.bend_(logits)
    if spread is None:
        shares = logs.exp_().mul_(-pull[:, None])
    else:
        factors = torch.addcmul(pull[:, None], spread[:, None], logs)
        shares = factors.mul_(logs.exp_()).neg_()
    return (shares if bend is None else shares.mul_(bend)).to(dtype)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)


def _set_(matrix: Tensor, columns: Tensor, values: Tensor, where: Tensor | None) -> None:
    """matrix[i, columns[i]] = values[i] for each i, or each i with ``where[i]``."""
    columns, values = columns[:, None], values[:, None].to(matrix.dtype)
    if where is not None:
        values = torch.where(where[:, None], values, matrix.gather(1, columns))
    matrix.scatter_(1, columns, values)
