"""Matrices in 8 bits: numbers of the format e4m3, and a float32 scale for each row."""

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST = 1e-30
"""Least peak of a row: rows of zeros have a scale, too."""


class Rounded(NamedTuple):
    """A matrix: numbers times scale. Each row's largest number is ``LARGEST``."""

    numbers: Tensor
    """[N, E]"""
    scale: Tensor
    """[N, 1]"""


class Product(NamedTuple):
    """The product of two rounded matrices without their scales, which the next step applies."""

    numbers: Tensor
    """[N, O]. On GPUs bfloat16, as numbers may reach 448 x 448 E, beyond float16."""
    row_scale: Tensor
    """[N, 1]"""
    column_scale: Tensor
    """[O, 1]"""

    def whole(self) -> Tensor:
        """With its scales, in float32."""
        return self.numbers.float() * self.row_scale * self.column_scale.t()


def rounded(rows: Tensor) -> Rounded:
    """Round ``rows`` [N, E], each with its own scale; takes another 5 bytes for each number."""
    peak = rows.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST)
    return Rounded((rows * (LARGEST / peak)).to(FP8), peak / LARGEST)
