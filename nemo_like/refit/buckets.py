"""Which tensors travel together, and where each lies in the flat bytes of its bucket."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.errors import RunError
from nemo_like.refit.manifest import TensorSpec

ALIGNMENT_BYTES = 256
"""Tensors start at multiples of it: copies of several at once use wide loads."""

NUM_BUFFERS = 2
"""Buckets on their way at a time."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together."""

    slots: tuple[Slot, ...]

    @property
    def num_bytes(self) -> int:
        """From the first tensor's start to the last one's end."""
        return self.slots[-1].offset_bytes + self.slots[-1].num_bytes

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each name with its tensor, a view of ``buffer`` (uint8, at least ``num_bytes``)."""
        for slot in self.slots:
            flat = buffer[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]
            yield slot.name, flat.view(slot.dtype).view(slot.shape)

    def fill(self, buffer: Tensor, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Copy the next tensors into ``buffer``; RunError if they are not those of the slots."""
        targets, sources = [], []
        for slot, (name, target) in zip(self.slots, self.views(buffer), strict=True):
            found, source = next(tensors, ("nothing", target))
            if found != name or source.shape != target.shape:
                raise RunError(
                    f"The refit announced {name} {list(slot.shape)} and its sender came with "
                    f"{found} {list(source.shape)}."
                )
            targets.append(target)
            sources.append(source)
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def plan_buckets(specs: Mapping[str, TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Split tensors, in order, into buckets of at most ``bucket_bytes``.

    Each tensor is in exactly one bucket; one that is larger than a bucket gets one of its own.

    >>> half = torch.float16
    >>> specs = {"a": ((200,), half), "b": ((300,), half), "c": ((9000,), half), "d": ((1,), half)}
    >>> [[(s.name, s.offset_bytes) for s in b.slots] for b in plan_buckets(specs, 1200)]
    [[('a', 0), ('b', 512)], [('c', 0)], [('d', 0)]]
    """
    buckets: list[list[Slot]] = []
    end = 0
    for name, (shape, dtype) in specs.items():
        size = math.prod(shape) * dtype.itemsize
        start = math.ceil(end / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not buckets or start + size > bucket_bytes:
            buckets.append([])
            start = 0
        buckets[-1].append(Slot(name, shape, dtype, start))
        end = start + size
    return [Bucket(tuple(slots)) for slots in buckets]


def announced_tensors(buckets: Sequence[Bucket]) -> dict[str, TensorSpec]:
    """What the buckets hold, by name; RunError if a name comes twice."""
    found: dict[str, TensorSpec] = {}
    for bucket in buckets:
        for slot in bucket.slots:
            if slot.name in found:
                raise RunError(f"The refit holds {slot.name} twice.")
            found[slot.name] = (slot.shape, slot.dtype)
    return found


def total_bytes(buckets: Sequence[Bucket]) -> int:
    """Bytes of all tensors, without the gaps between them."""
    return sum(slot.num_bytes for bucket in buckets for slot in bucket.slots)
