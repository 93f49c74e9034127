"""Collectives with a gradient, each with the one backward that its use here needs.

Under context parallelism each rank holds N / cp of the tokens. Around attention, ranks trade: all
heads of some tokens for some heads of all tokens (DeepSpeed-Ulysses, arXiv:2309.14509), so that any
kernel, and any packing, is exact.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Chunk i of the first dimension goes to rank i; the backward sends gradients back."""
    return _AllToAll.apply(x, group)  # pyright: ignore[reportReturnType]


def join_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of parts that do not overlap; every rank goes on with it *in the same way*.

    Each rank then has the gradient of the sum, hence of its part: no collective.
    """
    return _JoinParts.apply(x, group)  # pyright: ignore[reportReturnType]


def split_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of dimension 1 of a tensor that all ranks hold; gradients are gathered."""
    return _SplitPositions.apply(x, group)  # pyright: ignore[reportReturnType]


def gather_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Slices of dimension 1 joined, for ranks that go on in the same way; see join_parts."""
    return _GatherPositions.apply(x, group)  # pyright: ignore[reportReturnType]


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, gradients[0].contiguous(), group=ctx.group)
        return out, None


class _JoinParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SplitPositions(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_slice(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather_columns(gradients[0], ctx.group), None


class _GatherPositions(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_columns(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _own_slice(gradients[0], ctx.group), None


def _own_slice(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return x.chunk(size, dim=1)[rank].contiguous()


def gather_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank's ``x``, side by side in dimension 1; without a gradient."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def heads_for_tokens(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """[N / cp, H, D] -> [N, H / cp, D]; key-value heads are repeated until they divide."""
    size = dist.get_world_size(group)
    repeat = size // math.gcd(k.shape[1], size)
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    traded = []
    for x in (q, k, v):
        n, heads, dim = x.shape
        by_rank = x.view(n, size, heads // size, dim).transpose(0, 1).contiguous()
        traded.append(all_to_all(by_rank, group).view(size * n, heads // size, dim))
    return traded[0], traded[1], traded[2]


def tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, H / cp, D] -> [N / cp, H, D]."""
    size = dist.get_world_size(group)
    n, heads, dim = x.shape
    by_rank = all_to_all(x.contiguous().view(size, n // size, heads, dim), group)
    return by_rank.transpose(0, 1).reshape(n // size, size * heads, dim)
