# ruff: noqa: N803, N806 (in Triton, what is constant for the compiler has capitals)
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Kernels of a decoding step, for GPUs; ``torch_ops`` says the same in torch.

Each function checks nothing and waits for nothing, so that a CUDA graph can hold it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_like.generation.graph.state import PAGE, State
from nemo_like.generation.graph.triton_pointwise import add_norm, multiply, silu_mul

__all__ = ["add_norm", "attend", "multiply", "sample", "silu_mul"]

_VOCAB_BLOCK = 4096
_FEW_PROGRAMS = 200
"""Below it attention to one sequence is split over several."""
_MOST_SPLITS = 16


def attend(qkv: Tensor, layer: int, state: State) -> Tensor:
    """See ``torch_ops``."""
    keys, values = state.keys[layer], state.values[layer]
    rows, (_, num_keys, _, dim) = len(qkv), keys.shape
    heads = qkv.shape[1] // dim - 2 * num_keys
    splits = _num_splits(rows * num_keys, len(state.cos))
    out = qkv.new_empty(rows, heads * dim)
    parts = state.logprobs  # of no meaning without splits
    if splits > 1:
        parts = torch.empty(rows * heads * splits * (dim + 2), device=qkv.device)
    _attend[(rows, num_keys, splits)](
        *(qkv, keys, values, out, parts, state.table, state.slot, state.position),
        *(state.cos, state.sin, dim**-0.5, state.table.shape[1], heads, num_keys, dim),
        *(heads // num_keys, max(16, triton.next_power_of_2(heads // num_keys)), PAGE),
        *(64 if dim * num_keys < 512 else 32, splits),
        num_warps=2 if dim == 64 else 4,
        num_stages=3,
    )
    if splits > 1:
        _join[(rows * heads,)](parts, out, dim, splits, num_warps=1)
    return out


def sample(logits: Tensor, state: State) -> None:
    """See ``torch_ops``."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _VOCAB_BLOCK)
    best, best_logit, peak, total = torch.empty(4, rows, blocks, device=logits.device)
    best_id = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _sample_blocks[(rows, blocks)](
        *(logits, state.seed, state.position, state.temperature),
        *(best, best_id, best_logit, peak, total, vocab, blocks, _VOCAB_BLOCK),
        num_warps=8,
    )
    _advance[(rows,)](
        *(best, best_id, best_logit, peak, total, blocks, state.token, state.position),
        *(state.last, state.step, state.tokens, state.logprobs, state.tokens.shape[1]),
        triton.next_power_of_2(blocks),
        num_warps=1,
    )


def _num_splits(programs: int, most_positions: int) -> int:
    splits = 1
    while splits < _MOST_SPLITS and programs * splits < _FEW_PROGRAMS:
        if most_positions // (2 * splits) < 128:
            break
        splits *= 2
    return splits


@triton.jit
def _rotated(at, mask, cos, sin, HALF: tl.constexpr):
    """Both halves of the heads at ``at``, after rotation."""
    a = tl.load(at, mask=mask, other=0.0)
    b = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = a.dtype
    a = a.to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def _attend(
    qkv, keys, values, out, parts, table, slot_of, position_of, cos, sin, scale, table_width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One row's queries that share a key head (G, padded to GP), over a part of its positions."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pages = table + tl.load(slot_of + row) * table_width
    position = tl.load(position_of + row)
    HALF: tl.constexpr = D // 2
    half, whole, g = tl.arange(0, HALF), tl.arange(0, D), tl.arange(0, GP)
    c = tl.load(cos + position * HALF + half)[None, :]
    s = tl.load(sin + position * HALF + half)[None, :]
    base = qkv + row.to(tl.int64) * (H + 2 * K) * D
    real = (g < G)[:, None]
    q1, q2 = _rotated(base + (head * G + g)[:, None] * D + half[None, :], real, c, s, HALF)
    k1, k2 = _rotated(base + (H + head) * D + half[None, :], half[None, :] < HALF, c, s, HALF)
    value = tl.load(base + (H + K + head) * D + whole)[None, :]
    # The first split attends to the new position, which no program reads from the cache.
    first = split == 0
    products = q1.to(tl.float32) * k1.to(tl.float32) + q2.to(tl.float32) * k2.to(tl.float32)
    peak = tl.where(first, tl.sum(products, 1) * scale, -1e30)
    total = tl.where(first, 1.0, 0.0) + tl.zeros([GP], tl.float32)
    sums = tl.where(first, 1.0, 0.0) * (tl.zeros([GP, D], tl.float32) + value.to(tl.float32))
    share = tl.cdiv(tl.cdiv(position, SPLITS), BLOCK) * BLOCK
    start, n = split * share, tl.arange(0, BLOCK)
    end = tl.minimum(start + share, position)
    page = tl.load(pages + tl.minimum(start, position) // PAGE)
    for j in range(start, end, BLOCK):
        ok = j + n < end
        at = ((page.to(tl.int64) * K + head) * PAGE + j % PAGE + n) * D
        page = tl.load(pages + tl.minimum(j + BLOCK, position) // PAGE)  # before it is needed
        old = keys + at[None, :] + half[:, None]
        c1 = tl.load(old, mask=ok[None, :], other=0.0)
        c2 = tl.load(old + HALF, mask=ok[None, :], other=0.0)
        x = tl.dot(q1, c1, input_precision="ieee") + tl.dot(q2, c2, input_precision="ieee")
        x = tl.where(ok[None, :], x * scale, -1e30)
        higher = tl.maximum(peak, tl.max(x, 1))
        p = tl.where(ok[None, :], tl.exp(x - higher[:, None]), 0.0)
        kept = tl.exp(peak - higher)
        v = tl.load(values + at[:, None] + whole[None, :], mask=ok[:, None], other=0.0)
        sums = sums * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(p, 1)
        peak = higher
    if first:
        new_page = tl.load(pages + position // PAGE).to(tl.int64)
        new = ((new_page * K + head) * PAGE + position % PAGE) * D
        tl.store(keys + new + half[None, :], k1)
        tl.store(keys + new + HALF + half[None, :], k2)
        tl.store(values + new + whole[None, :], value)
    query = row.to(tl.int64) * H + head * G + g
    if SPLITS == 1:
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + query[:, None] * D + whole[None, :], result, mask=real)
    else:
        part = parts + (query * SPLITS + split) * (D + 2)
        tl.store(part[:, None] + whole[None, :], sums, mask=real)
        tl.store(part + D, peak, mask=g < G)
        tl.store(part + D + 1, total, mask=g < G)


@triton.jit
def _join(parts, out, D: tl.constexpr, SPLITS: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    split, whole = tl.arange(0, SPLITS), tl.arange(0, D)
    part = parts + (query * SPLITS + split) * (D + 2)
    peak, total = tl.load(part + D), tl.load(part + D + 1)
    share = tl.exp(peak - tl.max(peak))
    sums = tl.load(part[:, None] + whole[None, :])
    result = tl.sum(sums * share[:, None], 0) / tl.sum(total * share)
    tl.store(out + query * D + whole, result.to(out.dtype.element_ty))


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _sample_blocks(
    logits, seed, position, temperature, best, best_id, best_logit, peak, total, vocab, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a part of a row's vocabulary: the winner, and peak and sum of the softmax."""
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    nothing = -float("inf")
    z = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=nothing)
    z = z / tl.where(heat == 0, 1.0, heat)
    top = tl.max(z)
    key = _mixed(tl.load(seed + row).to(tl.uint32))
    key = _mixed(key + tl.load(position + row).to(tl.uint32))
    bits = _mixed(key ^ (ids.to(tl.uint32) * 0x9E3779B9))
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log(1 - u), also where 1 - u rounds to 1.
    exponential = tl.where(u < 0.01, u + u * u / 2 + u * u * u / 3, -tl.log(1 - u))
    drawn = tl.where(heat == 0, z, z - tl.log(exponential))
    winner, at = tl.max(drawn, 0, return_indices=True)
    out = row * num_blocks + block
    tl.store(best + out, winner)
    tl.store(best_id + out, block * BLOCK + at)
    tl.store(best_logit + out, tl.sum(tl.where(tl.arange(0, BLOCK) == at, z, 0.0)))
    tl.store(peak + out, top)
    tl.store(total + out, tl.sum(tl.where(z > nothing, tl.exp(z - top), 0.0)))


@triton.jit
def _advance(
    best, best_id, best_logit, peak, total, num_blocks, token, position, last, step, tokens,
    logprobs, width, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The winner of all parts and its logprob; it is the input of the next step."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    ok = block < num_blocks
    at, nothing = row * num_blocks, -float("inf")
    _, i = tl.max(tl.load(best + at + block, mask=ok, other=nothing), 0, return_indices=True)
    peaks = tl.load(peak + at + block, mask=ok, other=nothing)
    top = tl.max(peaks)
    sums = tl.load(total + at + block, mask=ok, other=0.0) * tl.exp(peaks - top)
    drawn = tl.load(best_id + at + i)
    out = tl.load(step) * width + row
    tl.store(tokens + out, drawn)
    tl.store(logprobs + out, tl.load(best_logit + at + i) - top - tl.log(tl.sum(sums)))
    tl.store(token + row, drawn)
    tl.store(position + row, tl.minimum(tl.load(position + row) + 1, tl.load(last + row)))
