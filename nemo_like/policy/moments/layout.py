"""Where each parameter's moments lie in a few flat arrays, and in which buckets they travel.

A *section* is one flat array: first moments, say, of all matrices of a parameter group, one
parameter after the other. A bucket is the same stretch of each section of its group and format.
AdamW itself computes in float32; formats are only how moments wait between steps. Legend: ``R``
rows and ``C`` columns of a parameter's shard, ``B`` blocks of a row.

Rounding to the nearest would stop the second moment: with beta2 = 0.999 it moves by less than half
a bfloat16 step. It is rounded at random instead, which keeps the mean exact; the noise depends on
the step and the place in a shard alone, so runs repeat, and copies on other ranks stay equal.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn import Parameter

from nemo_like.config.optimizer import Moments
from nemo_like.planning.parameters import BLOCK
from nemo_like.policy.parallel.full_tensors import local_part

_ALIGNED = 512


FIRST, SECOND = "exp_avg", "exp_avg_sq"
_SCALES = {FIRST: "exp_avg_scale", SECOND: "exp_avg_sq_scale"}
_LARGEST = {FIRST: 127, SECOND: 255}
_LOW_BITS = 0xFFFF
_NO_ZERO = 1e-30

Stored = dict[str, Tensor]


class Float32:
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
        return columns if name in _SCALES else math.ceil(columns / BLOCK)

    def unpack(self, stored: Stored) -> tuple[Tensor, Tensor]:
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


@dataclass(frozen=True)
class Shard:
    """A parameter's local part as a matrix of ``rows`` x ``columns``, and its start in sections."""

    parameter: Parameter
    rows: int
    columns: int
    format: Float32
    starts: Mapping[str, int]

    def place(self, name: str, first: int, last: int) -> slice:
        """Rows from ``first`` to ``last`` in section ``name``."""
        width = self.format.width(name, self.columns)
        return slice(self.starts[name] + first * width, self.starts[name] + last * width)


@dataclass(frozen=True)
class Piece:
    """Rows of a shard: all of it, or what a bucket holds of a large one."""

    shard: Shard
    first: int
    last: int

    @property
    def is_last(self) -> bool:
        """Whether the shard ends here."""
        return self.last == self.shard.rows

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of the parameter or its gradient."""
        whole = local_part(tensor).reshape(self.shard.rows, self.shard.columns)
        return whole[self.first : self.last]


@dataclass(frozen=True)
class Bucket:
    group: dict[str, Any]
    """Of the optimizer's: learning rate, weight decay."""
    pieces: Sequence[Piece]
    sections: Stored

    @property
    def kept(self) -> Stored:
        return {
            name: flat[self._place(name, 0).start : self._place(name, -1).stop]
            for name, flat in self.sections.items()
        }

    def split(self, flat: Stored) -> Iterator[tuple[Piece, Stored]]:
        """Each piece with its moments [R, C]; ``flat`` is ``kept``, or a copy of it."""
        for i, piece in enumerate(self.pieces):
            own = {}
            for name, values in flat.items():
                place, base = self._place(name, i), self._place(name, 0).start
                rows = piece.last - piece.first
                width = piece.shard.format.width(name, piece.shard.columns)
                own[name] = values[place.start - base : place.stop - base].view(rows, width)
            yield piece, own

    def _place(self, name: str, i: int) -> slice:
        piece = self.pieces[i]
        return piece.shard.place(name, piece.first, piece.last)


class MomentLayout:
    """All of an optimizer's parameters, laid out before there is memory for their moments."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], moments: Moments, bucket_numbers: int
    ) -> None:
        self._most = bucket_numbers
        self._parts: list[tuple[dict[str, Any], Float32, list[Shard], dict[str, int]]] = []
        for group in groups:
            matrices = [one for one in group["params"] if one.ndim > 1]
            vectors = [one for one in group["params"] if one.ndim < 2]
            # A vector's shard has no rows to share scales.
            of_vectors = "float32" if moments == "int8" else moments
            for parameters, kind in ((matrices, moments), (vectors, of_vectors)):
                if parameters:
                    layout = FORMATS[kind]
                    self._parts.append((group, layout, *_shards(parameters, layout)))

    @property
    def num_bytes(self) -> int:
        return sum(
            _aligned(length * layout.dtypes[name].itemsize)
            for _, layout, _, lengths in self._parts
            for name, length in lengths.items()
        )

    def place(self, memory: Tensor) -> tuple[list[Bucket], dict[Parameter, Stored]]:
        """Buckets over ``memory``, bytes, and each parameter's own moments by name."""
        buckets: list[Bucket] = []
        own: dict[Parameter, Stored] = {}
        offset = 0
        for group, layout, shards, lengths in self._parts:
            sections = {}
            for name, length in lengths.items():
                size = length * layout.dtypes[name].itemsize
                sections[name] = memory[offset : offset + size].view(layout.dtypes[name])
                offset += _aligned(size)
            buckets += [Bucket(group, pieces, sections) for pieces in self._buckets_of(shards)]
            for shard in shards:
                own[shard.parameter] = {
                    name: _as_parameter(shard, name, flat[shard.place(name, 0, shard.rows)])
                    for name, flat in sections.items()
                }
        return buckets, own

    def _buckets_of(self, shards: Sequence[Shard]) -> Iterator[list[Piece]]:
        taken: list[Piece] = []
        size = 0
        for shard in shards:
            rows = max(self._most // max(shard.columns, 1), 1)
            # An empty shard is one empty piece: its steps are counted, too.
            for first in range(0, max(shard.rows, 1), rows):
                piece = Piece(shard, first, min(first + rows, shard.rows))
                more = (piece.last - piece.first) * shard.columns
                if taken and size + more > self._most:
                    yield taken
                    taken, size = [], 0
                taken.append(piece)
                size += more
        yield taken


def _shards(parameters: Sequence[Parameter], layout: Float32) -> tuple[list[Shard], dict[str, int]]:
    """One after the other, and how long each section becomes."""
    found: list[Shard] = []
    lengths = dict.fromkeys(layout.dtypes, 0)
    for parameter in parameters:
        local = local_part(parameter)
        columns = local.shape[-1] if local.ndim > 1 else 1
        rows = local.numel() // max(columns, 1)
        found.append(Shard(parameter, rows, columns, layout, dict(lengths)))
        for name in lengths:
            lengths[name] += rows * layout.width(name, columns)
    return found, lengths


def _as_parameter(shard: Shard, name: str, flat: Tensor) -> Tensor:
    """Shaped as the parameter, and sharded like it if it is: what a checkpoint takes."""
    parameter, width = shard.parameter, shard.format.width
    local = local_part(parameter)
    if local.ndim < 2:
        view, shape = flat.view(local.shape), parameter.shape
    else:
        view = flat.view(*local.shape[:-1], width(name, local.shape[-1]))
        shape = torch.Size((*parameter.shape[:-1], width(name, parameter.shape[-1])))
    if not isinstance(parameter, DTensor):
        return view
    # ``DTensor.from_local`` would move it to the mesh's device.
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(
        parameter.device_mesh, parameter.placements, TensorMeta(shape, stride, flat.dtype)
    )
    return DTensor(view, spec, requires_grad=False)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
