"""Attention over rows that lie end to end: each row sees itself only, and no mask is ever built.

Registered with transformers under the name ``PACKED``; every model that takes its attention from
there can use it. Attention alone works on padded rows, which costs B * T^2 instead of N^2 and keeps
causal kernels; on a GPU a variable-length flash kernel takes over where rows are too unequal.

Under context parallelism each rank holds N / cp of the tokens. Around attention, ranks trade: all
heads of some tokens for some heads of all tokens (DeepSpeed-Ulysses, arXiv:2309.14509), so that any
kernel, and any packing, is exact.
"""

import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from nemo_like.policy.parallel.collectives import all_to_all

PACKED = "nemo_like_packed"

# Terms of attention that some architectures add and this one lacks: left out, they would go unseen.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
# The dense kernel is the faster one: on an H100 with rows of 4096 tokens, a training step of a 1.5B
# model took 1.43 s with it and 1.53 s with the variable-length one. It is worth this much padding.
_MOST_PADDING = 1.25
_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def row_index(lengths: Tensor, within: Tensor, row_of_token: Tensor) -> dict[str, Any]:
    """Keyword arguments for a packed forward, in the names that transformers' kernels share.

    ``lengths`` [B]; ``within`` [N] position in the row; ``row_of_token`` [N].
    """
    longest = int(lengths.max())
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "padded_index": row_of_token * longest + within,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    padded_index: Tensor,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    context_group: dist.ProcessGroup | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row.

    ``query`` [1, H, N, D], ``key`` and ``value`` [1, H_kv, N, D] -> [1, N, H, D]; N is this rank's
    share of the tokens under context parallelism. Raises AssertionError for a window shorter than a
    row or terms that it does not have: set ``policy.batching=padded`` for such models.
    """
    assert attention_mask is None
    assert dropout == 0.0
    assert sliding_window is None or sliding_window >= max_length_q, (
        "sliding windows shorter than a sequence need policy.batching=padded"
    )
    for name in _UNSUPPORTED:
        assert others.get(name) is None, f"attention with {name} needs policy.batching=padded"
    # [N, H, D] from here on.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if context_group is not None:
        q, k, v = _heads_for_tokens(q, k, v, context_group)
    shape = (len(cu_seq_lens_q) - 1, max_length_q)
    can_vary = q.is_cuda and q.dtype != torch.float32
    if can_vary and shape[0] * shape[1] > _MOST_PADDING * len(q):
        out = _flash(q, k, v, cu_seq_lens_q, max_length_q, scaling)
    else:
        out = _padded(q, k, v, padded_index, shape, scaling)
    if context_group is not None:
        out = _tokens_for_heads(out, context_group)
    return out[None], None


def _padded(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, shape: tuple[int, int], scale: float | None
) -> Tensor:
    out = scaled_dot_product_attention(
        _pad(q, index, shape),
        _pad(k, index, shape),
        _pad(v, index, shape),
        is_causal=True,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if len(flat) == len(index) else flat[index]


def _pad(x: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    """[N, H, D] -> [B, H, T, D] with zeros behind each row."""
    padded = x
    if len(x) < shape[0] * shape[1]:  # else rows are equally long, and lie where they should
        padded = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, index, x)
    return padded.view(*shape, *x.shape[1:]).transpose(1, 2)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float | None
) -> Tensor:
    options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
    if q.shape[1] != k.shape[1] and _HAS_GQA:
        options["enable_gqa"] = True
    return varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, **options)  # pyright: ignore


def _heads_for_tokens(
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


def _tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, H / cp, D] -> [N / cp, H, D]."""
    size = dist.get_world_size(group)
    n, heads, dim = x.shape
    by_rank = all_to_all(x.contiguous().view(size, n // size, heads, dim), group)
    return by_rank.transpose(0, 1).reshape(n // size, size * heads, dim)


AttentionInterface.register(PACKED, packed_attention)
