# ruff: noqa: N803 (in Triton, what is constant for the compiler has capitals)
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Kernels around a layer's matrices, in 16 and in 8 bits; ``torch_ops`` says the same in torch."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_like.generation.graph.torch_ops import FP8, LARGEST, SMALLEST, Product, Rounded


def multiply(x: Rounded, weight: Rounded) -> Product:
    """See ``torch_ops``. Kernels that apply scales themselves are slower."""
    one = _one(x.numbers.device)
    numbers = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x.numbers, weight.numbers.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
    )
    return Product(numbers, x.scale, weight.scale)


def add_norm(
    x: Tensor | Product | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    rounds: bool = False,
) -> Tensor | Rounded:
    """See ``torch_ops``."""
    rows, width = residual.shape
    out = _empty_rounded(residual, width) if rounds else torch.empty_like(residual)
    given = x if isinstance(x, Product) else Product(residual if x is None else x, weight, weight)
    block, warps = triton.next_power_of_2(width), 4 if width < 2048 else 8
    _add_norm[(rows,)](
        *(*given, residual, weight, *(out if isinstance(out, Rounded) else (out, out))),
        *(width, eps, x is not None, isinstance(x, Product), rounds, block, LARGEST, SMALLEST),
        num_warps=warps,
    )
    return out


def silu_mul(gate_up: Tensor | Product) -> Tensor | Rounded:
    """See ``torch_ops``."""
    if isinstance(gate_up, Product):
        rows, width = len(gate_up.numbers), gate_up.numbers.shape[1] // 2
        rounded = _empty_rounded(gate_up.numbers, width)
        block = min(4096, triton.next_power_of_2(width))
        _silu_mul_round[(rows,)](*gate_up, *rounded, width, block, LARGEST, SMALLEST, num_warps=16)
        return rounded
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _silu_mul[(rows, triton.cdiv(width, 1024))](gate_up, out, width, 1024)
    return out


def _empty_rounded(like: Tensor, width: int) -> Rounded:
    numbers = like.new_empty(len(like), width, dtype=FP8)
    return Rounded(numbers, like.new_empty(len(like), 1, dtype=torch.float32))


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


@triton.jit
def _add_norm(
    x, row_scale, column_scale, residual, weight, out, out_scale, width, eps,
    HAS_X: tl.constexpr, SCALED: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ok = at < width
    r = tl.load(residual + row * width + at, mask=ok, other=0.0)
    if HAS_X:
        added = tl.load(x + row * width + at, mask=ok, other=0.0).to(tl.float32)
        if SCALED:
            columns = tl.load(column_scale + at, mask=ok, other=0.0)
            added = added * tl.load(row_scale + row) * columns
        r = (r.to(tl.float32) + added).to(r.dtype)
        tl.store(residual + row * width + at, r, mask=ok)
    wide = r.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)).to(r.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)
    scaled = scaled.to(r.dtype)
    if ROUNDS:
        peak = tl.maximum(tl.max(tl.abs(scaled.to(tl.float32))), SMALLEST)
        tl.store(out_scale + row, peak / LARGEST)
        scaled = (scaled.to(tl.float32) * (LARGEST / peak)).to(tl.float8e4nv)
    tl.store(out + row * width + at, scaled, mask=ok)


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=ok, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=ok, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + at, product.to(gate.dtype), mask=ok)


@triton.jit
def _silu_mul_round(
    gate_up, row_scale, column_scale, out, out_scale, width, BLOCK: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """A whole row, which is read twice: for its scale, and for its numbers."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.load(row_scale + row)
    peak = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        product = _scaled_silu_mul(gate_up + row * 2 * width, rows, column_scale, at, width)
        peak = tl.maximum(peak, tl.abs(product))
    peak = tl.maximum(tl.max(peak), SMALLEST)
    tl.store(out_scale + row, peak / LARGEST)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        product = _scaled_silu_mul(gate_up + row * 2 * width, rows, column_scale, at, width)
        numbers = (product * (LARGEST / peak)).to(tl.float8e4nv)
        tl.store(out + row * width + at, numbers, mask=at < width)


@triton.jit
def _scaled_silu_mul(gate_up, rows, columns, at, width):
    ok = at < width
    gate = tl.load(gate_up + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + at, mask=ok, other=0.0).to(tl.float32)
    gate = gate * rows * tl.load(columns + at, mask=ok, other=0.0)
    up = up * rows * tl.load(columns + width + at, mask=ok, other=0.0)
    return gate / (1 + tl.exp(-gate)) * up
