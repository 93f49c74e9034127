"""Attention over rows that lie end to end: each row sees itself only, and no mask is ever built.

Registered with transformers under the name ``PACKED``; every model that takes its attention from
there can use it. The linear layers see packed tokens; attention alone works on padded rows, which
costs B * T^2 instead of N^2 and lets the fused causal kernel run.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "nemo_like_packed"


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
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row.

    ``query`` [1, H, N, D], ``key`` and ``value`` [1, H_kv, N, D] -> [1, N, H, D]. Raises
    AssertionError for a window shorter than a row: set ``policy.batching=padded`` for such models.
    """
    assert attention_mask is None
    assert dropout == 0.0
    assert sliding_window is None or sliding_window >= max_length_q, (
        "sliding windows shorter than a sequence need policy.batching=padded"
    )
    shape = (len(cu_seq_lens_q) - 1, max_length_q)
    out = scaled_dot_product_attention(
        _pad(query, padded_index, shape),
        _pad(key, padded_index, shape),
        _pad(value, padded_index, shape),
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)[padded_index][None], None


def _pad(x: Tensor, padded_index: Tensor, shape: tuple[int, int]) -> Tensor:
    """[1, H, N, D] -> [B, H, T, D] with zeros behind each row."""
    flat = x[0].transpose(0, 1)
    padded = flat.new_zeros(shape[0] * shape[1], *flat.shape[1:])
    padded = padded.index_copy(0, padded_index, flat)
    return padded.view(*shape, *flat.shape[1:]).transpose(1, 2)


AttentionInterface.register(PACKED, packed_attention)
