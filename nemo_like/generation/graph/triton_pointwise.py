# ruff: noqa: N803 (in Triton, what is constant for the compiler has capitals)
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Kernels before and after a layer's matrices, in 16 and in 8 bits, as ``torch_ops`` says in torch.

As in ``triton_ops``, functions check nothing and wait for nothing.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_like.generation.graph.fp8 import FP8, LARGEST, SMALLEST, Product, Rounded

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


def multiply(x: Rounded, weight: Rounded) -> Product:
    """See ``torch_ops``. Scales come later, as products with a scale for each row are slower."""
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
    # Where there are no scales, weight and out stand in for them, and are not read as such.
    source = x if isinstance(x, Product) else (residual if x is None else x, weight, weight)
    target = out if isinstance(out, Rounded) else (out, out)
    _add_norm[(rows,)](
        *source,
        residual,
        weight,
        *target,
        width,
        eps,
        HAS_X=x is not None,
        IS_PRODUCT=isinstance(x, Product),
        ROUNDS=rounds,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width < 2048 else 8,
    )
    return out


def silu_mul(gate_up: Tensor | Product) -> Tensor | Rounded:
    """See ``torch_ops``."""
    if isinstance(gate_up, Product):
        rows, width = len(gate_up.numbers), gate_up.numbers.shape[1] // 2
        target = _empty_rounded(gate_up.numbers, width)
        block = min(4096, triton.next_power_of_2(width))
        _silu_mul_round[(rows,)](*gate_up, *target, width, block, num_warps=16)
        return target
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _silu_mul[(rows, triton.cdiv(width, 1024))](gate_up, out, width, 1024)
    return out


def _empty_rounded(like: Tensor, width: int) -> Rounded:
    numbers = like.new_empty(len(like), width, dtype=FP8)
    return Rounded(numbers, like.new_empty(len(like), 1, dtype=torch.float32))


@cache
def _one(device: torch.device) -> Tensor:
    """The scale that products insist on. Made before the first capture: no graph may own it."""
    return torch.ones((), device=device)


@triton.jit
def _add_norm(
    x, row_scale, column_scales, residual, weight, out, out_scale, width, eps,
    HAS_X: tl.constexpr, IS_PRODUCT: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ok = at < width
    r = tl.load(residual + row * width + at, mask=ok, other=0.0)
    if HAS_X:
        added = tl.load(x + row * width + at, mask=ok, other=0.0).to(tl.float32)
        if IS_PRODUCT:
            columns = tl.load(column_scales + at, mask=ok, other=0.0)
            added = added * tl.load(row_scale + row) * columns
        r = (r.to(tl.float32) + added).to(r.dtype)
        tl.store(residual + row * width + at, r, mask=ok)
    wide = r.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)).to(r.dtype).to(tl.float32)
    result = (normed * tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)).to(r.dtype)
    if ROUNDS:
        wide = result.to(tl.float32)
        peak = _with_scale(tl.max(tl.abs(wide)), out_scale + row)
        tl.store(out + row * width + at, (wide * (_LARGEST / peak)).to(tl.float8e4nv), mask=ok)
    else:
        tl.store(out + row * width + at, result, mask=ok)


@triton.jit
def _with_scale(peak, scale):
    """A row's largest number, above zero; stores the scale that follows from it."""
    peak = tl.maximum(peak, _SMALLEST)
    tl.store(scale, peak / _LARGEST)
    return peak


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
    gate_up, row_scale, column_scales, out, out_scale, width, BLOCK: tl.constexpr
):  # fmt: skip
    """A whole row, which is computed twice: for its scale, and for its numbers."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(row_scale + row)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        result = _scaled_silu_mul(gate_up + row * 2 * width, scale, column_scales, at, width)
        largest = tl.maximum(largest, tl.abs(result))
    peak = _with_scale(tl.max(largest), out_scale + row)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        result = _scaled_silu_mul(gate_up + row * 2 * width, scale, column_scales, at, width)
        numbers = (result * (_LARGEST / peak)).to(tl.float8e4nv)
        tl.store(out + row * width + at, numbers, mask=at < width)


@triton.jit
def _scaled_silu_mul(gate_up, row_scale, column_scales, at, width):
    ok = at < width
    gate = tl.load(gate_up + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + at, mask=ok, other=0.0).to(tl.float32)
    gate = gate * row_scale * tl.load(column_scales + at, mask=ok, other=0.0)
    up = up * row_scale * tl.load(column_scales + width + at, mask=ok, other=0.0)
    return gate / (1 + tl.exp(-gate)) * up
