"""How AdamW's two moments are stored: as float32, as bfloat16, or as int8 with scales.

AdamW itself computes in float32; the formats are only where moments wait between steps. Legend:
``R`` rows and ``C`` columns of a parameter's shard, ``B`` blocks of a row.

Rounding to the nearest would stop the second moment: with beta2 = 0.999 it moves by less than half
a bfloat16 step, so that it would never fall. It is rounded at random instead, up or down with the
probability that makes the mean exact. The noise depends on the step and the place in a shard alone,
so runs repeat, and copies of a parameter on other ranks stay equal.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from nemo_like.planning.parameters import BLOCK

FIRST, SECOND = "exp_avg", "exp_avg_sq"
_SCALES = {FIRST: "exp_avg_scale", SECOND: "exp_avg_sq_scale"}
_LARGEST = {FIRST: 127, SECOND: 255}
_LOW_BITS = 0xFFFF
_NO_ZERO = 1e-30

Stored = dict[str, Tensor]


class Float32:
    """As torch has them."""

    dtypes: ClassVar = {FIRST: torch.float32, SECOND: torch.float32}

    def width(self, name: str, columns: int) -> int:
        """Numbers of a stored row of section ``name``."""
        return columns

    def unpack(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """Both moments in float32 [R, C]."""
        return stored[FIRST], stored[SECOND]

    def pack(self, first: Tensor, second: Tensor, stored: Stored, noise: torch.Generator) -> None:
        """The reverse; in place already."""


class BFloat16(Float32):
    """The upper half of a float32 number."""

    dtypes: ClassVar = {FIRST: torch.bfloat16, SECOND: torch.bfloat16}

    def unpack(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """See ``Float32``."""
        return stored[FIRST].float(), stored[SECOND].float()

    def pack(self, first: Tensor, second: Tensor, stored: Stored, noise: torch.Generator) -> None:
        """See ``Float32``; ``second`` is overwritten."""
        stored[FIRST].copy_(first)
        bits = second.view(torch.int32)
        bits += torch.randint(
            _LOW_BITS + 1, bits.shape, dtype=torch.int32, device=bits.device, generator=noise
        )
        bits &= ~_LOW_BITS
        stored[SECOND].copy_(second)


class Int8(Float32):
    """Whole numbers with a scale for each block of a row; of the second moment its root.

    A root is never stored as 0 unless it is: dividing by it would make a step of any size.
    """

    dtypes: ClassVar = {
        FIRST: torch.int8,
        SECOND: torch.uint8,
        _SCALES[FIRST]: torch.float32,
        _SCALES[SECOND]: torch.float32,
    }

    def width(self, name: str, columns: int) -> int:
        """See ``Float32``."""
        return columns if name in _SCALES else math.ceil(columns / BLOCK)

    def unpack(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """See ``Float32``."""
        columns = stored[FIRST].shape[1]
        first, second = (
            stored[name].float().mul_(_spread(stored[_SCALES[name]], columns)) for name in _SCALES
        )
        return first, second.square_()

    def pack(self, first: Tensor, second: Tensor, stored: Stored, noise: torch.Generator) -> None:
        """See ``Float32``; both moments are overwritten."""
        for name, values in ((FIRST, first), (SECOND, second.sqrt_())):
            scale = _block_maxima(values).div_(_LARGEST[name]).clamp_(min=_NO_ZERO)
            stored[_SCALES[name]].copy_(scale)
            is_zero = values == 0 if name == SECOND else None
            values.div_(_spread(scale, values.shape[1]))
            values += torch.rand(values.shape, device=values.device, generator=noise)
            values.floor_().clamp_(-_LARGEST[name], _LARGEST[name])
            if is_zero is not None:
                values.clamp_(min=1).masked_fill_(is_zero, 0)
            stored[name].copy_(values)


FORMATS = {"float32": Float32(), "bfloat16": BFloat16(), "int8": Int8()}


def _spread(scales: Tensor, columns: int) -> Tensor:
    """[R, B] -> [R, C]."""
    return scales.repeat_interleave(BLOCK, dim=1)[:, :columns]


def _block_maxima(values: Tensor) -> Tensor:
    """Of absolute values: [R, C] -> [R, B]."""
    rows, columns = values.shape
    whole = columns // BLOCK * BLOCK
    parts = [values[:, :whole].reshape(rows, -1, BLOCK).abs().amax(-1)] if whole else []
    if whole < columns:
        parts.append(values[:, whole:].abs().amax(1, keepdim=True))
    return torch.cat(parts, 1)
