"""Attention over rows that lie end to end: each row sees itself only, and no mask is ever built.

Registered with transformers under the name ``PACKED``; every model that takes its attention from
there can use it. On a GPU in 16 bits it is a variable-length flash kernel; elsewhere, and for long
rows of equal length, it works on padded rows, which costs B * T^2 instead of N^2.

Under context parallelism each rank holds N / cp of the tokens. Around attention, ranks trade: all
heads of some tokens for some heads of all tokens (DeepSpeed-Ulysses, arXiv:2309.14509), so that any
kernel, and any packing, is exact.

If rows share a prompt (``policy.batching=shared``), its queries, keys and values exist once. Each
row's keys are gathered, including the prompt's, but its queries begin after the prompt: causal
attention in which the last query sees the last key.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "nemo_like_packed"

# Terms of attention that some architectures add and this one lacks: left out, they would go unseen.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
# Equal rows of this length and more use PyTorch's dense kernel, cuDNN's on new GPUs: on an H100, a
# training step of a 1.5B model on rows of 4096 tokens took 1.43 s with it, and 1.53 s with the
# variable-length one. cuDNN plans each new number or length of rows, for 0.1 s (attention-h200),
# which costs more than short rows gain; a single row would be "equal" at any length.
_DENSE_FROM = 2048
_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def row_index(
    lengths: Tensor, key_lengths: Tensor | None = None, key_index: Tensor | None = None
) -> dict[str, Any]:
    """Keyword arguments for a packed forward, in the names that transformers' kernels share.

    ``lengths`` [B]: queries of each row. Where rows share prompts, ``key_lengths`` [B] counts
    these, too, and ``key_index`` [N] has the positions of each row's tokens, row after row.
    """
    ends, longest, index = _of_rows(lengths)
    key_ends, longest_keys, padded_keys = ends, longest, None
    if key_lengths is not None:
        key_ends, longest_keys, padded_keys = _of_rows(key_lengths)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": key_ends,
        "max_length_q": longest,
        "max_length_k": longest_keys,
        "padded_index": index,
        "padded_key_index": padded_keys,
        "key_index": key_index,
        "equal_rows": key_lengths is None
        and len(lengths) > 1
        and longest >= _DENSE_FROM
        and len(index) == len(lengths) * longest,
    }


def _of_rows(lengths: Tensor) -> tuple[Tensor, int, Tensor]:
    """Row ends, longest row, and positions of tokens among rows padded to that length."""
    longest = int(lengths.max())
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0))
    row_of_token = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    shift = torch.arange(len(lengths), device=lengths.device) * longest - ends[:-1]
    index = torch.arange(len(row_of_token), device=lengths.device) + shift[row_of_token]
    return ends.to(torch.int32), longest, index


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    padded_index: Tensor,
    padded_key_index: Tensor | None,
    key_index: Tensor | None,
    equal_rows: bool,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
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
    assert sliding_window is None or sliding_window >= max_length_k, (
        "sliding windows shorter than a sequence need policy.batching=padded"
    )
    for name in _UNSUPPORTED:
        assert others.get(name) is None, f"attention with {name} needs policy.batching=padded"
    # [N, H, D] from here on.
    q, k, v = (_as_autocast(x[0].transpose(0, 1)) for x in (query, key, value))
    if context_group is not None:
        from nemo_like.policy.parallel.collectives import heads_for_tokens

        q, k, v = heads_for_tokens(q, k, v, context_group)
    if key_index is not None:
        k, v = k[key_index], v[key_index]
    rows = len(cu_seq_lens_q) - 1
    if q.is_cuda and q.dtype != torch.float32 and not equal_rows:
        ends = (cu_seq_lens_q, cu_seq_lens_k)
        out = _flash(q, k, v, ends, (max_length_q, max_length_k), scaling)
    else:
        q = _pad(q, padded_index, (rows, max_length_q))
        of_keys = padded_index if padded_key_index is None else padded_key_index
        k, v = (_pad(x, of_keys, (rows, max_length_k)) for x in (k, v))
        skipped = None if key_index is None else (cu_seq_lens_k - cu_seq_lens_q).diff()
        out = _padded(q, k, v, skipped, scaling).transpose(1, 2).flatten(0, 1)
        out = out[padded_index] if _may_pad(padded_index, len(out)) else out
    if context_group is not None:
        from nemo_like.policy.parallel.collectives import tokens_for_heads

        out = tokens_for_heads(out, context_group)
    return out[None], None


def _as_autocast(x: Tensor) -> Tensor:
    """Cast as autocast would: angles in float32 leave queries and keys in float32."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _padded(q: Tensor, k: Tensor, v: Tensor, skipped: Tensor | None, scale: float | None) -> Tensor:
    """[B, H, T, D] of each; ``skipped`` [B]: keys of each row before that of its first query."""
    has_gqa = q.shape[1] != k.shape[1]
    if skipped is None:
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=has_gqa
        )
    last_key = torch.arange(q.shape[2], device=q.device) + skipped[:, None]
    mask = torch.arange(k.shape[2], device=q.device) <= last_key[:, None, :, None]
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=has_gqa)


def _may_pad(index: Tensor, num_places: int) -> bool:
    """False if rows are equally long, and so lie where they should.

    Compiled code always pads: each kind of rows that it treats in another way takes seconds more to
    compile.
    """
    return torch.compiler.is_compiling() or len(index) < num_places


def _pad(x: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    """[N, H, D] -> [B, H, T, D] with zeros behind each row."""
    padded = x
    if _may_pad(index, shape[0] * shape[1]):
        padded = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, index, x)
    return padded.view(*shape, *x.shape[1:]).transpose(1, 2)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """[N, H, D] of each; ``ends`` and ``longest`` of queries and keys. The last query of each row
    sees its last key."""
    options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
    if q.shape[1] != k.shape[1] and _HAS_GQA:
        options["enable_gqa"] = True
    return varlen_attn(q, k, v, *ends, *longest, scale=scale, **options)  # pyright: ignore


AttentionInterface.register(PACKED, packed_attention)
