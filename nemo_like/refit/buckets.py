"""The content of a refit: flat buckets of tensors, checked against the model's architecture.

Sender and receiver each derive the tensors from the model's configuration, so a tensor that the
sender forgets is always noticed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.config.optimizer import LoraConfig
from nemo_like.errors import RunError
from nemo_like.models.build import TensorSpec, expected_tensors
from nemo_like.models.naming import is_adapter

ALIGNMENT_BYTES = 256
"""Tensors start at multiples of it: copies of several at once use wide loads."""
NUM_BUFFERS = 2
_LEAST_BUCKETS = 8
_SMALL_BYTES = 16 << 20
"""A bucket is not made smaller than this for the sake of their number."""
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Slot:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
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
    for slot in (slot for bucket in buckets for slot in bucket.slots):
        if slot.name in found:
            raise RunError(f"The refit holds {slot.name} twice.")
        found[slot.name] = (slot.shape, slot.dtype)
    return found


def total_bytes(buckets: Sequence[Bucket]) -> int:
    """Bytes of all tensors, without the gaps between them."""
    return sum(slot.num_bytes for bucket in buckets for slot in bucket.slots)


def check_buckets(
    buckets: Sequence[Bucket], model_path: str, dtype: torch.dtype, lora: LoraConfig | None
) -> None:
    """Raise RunError unless ``buckets`` hold exactly the tensors of model and adapters.

    ``lora``: adapters that are sent separately. None: there are none.
    """
    expected = expected_tensors(model_path, dtype)
    if lora is not None:
        expected = expected | _adapters(model_path, dtype, lora)
    check_tensors(announced_tensors(buckets), expected)


def check_tensors(found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> None:
    """Raise RunError naming the first missing, unexpected and misshapen tensors."""
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "wrong": [
            f"{name} is {_in_words(found[name])}, not {_in_words(spec)}"
            for name, spec in expected.items()
            if name in found and found[name] != spec
        ],
    }
    told = [f"{kind}: {_first_of(names)}" for kind, names in problems.items() if names]
    if told:
        raise RunError(f"The refit does not match the model's architecture; {'; '.join(told)}.")


def _in_words(spec: TensorSpec) -> str:
    return f"{str(spec[1]).removeprefix('torch.')}{list(spec[0])}"


def _first_of(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def check_refit(
    version: int, current: int | None, lora: LoraConfig | None, *, adapters_only: bool, running: int
) -> None:
    """Raise RunError for a refit that an engine must refuse before it touches a weight.

    ``current``: the version that it holds; ``lora``: what it was started with; ``running``:
    completions that it is sampling.
    """
    problem = ""
    if running:
        problem = f"came while {running} completions were being sampled; wait for them first"
    elif current is not None and version <= current:
        problem = f"is stale: the engine holds version {current}, and versions only grow"
    elif adapters_only and lora is None:
        problem = (
            "matches no adapter: it has adapters alone, and the engine was started without any"
        )
    elif adapters_only and current is None:
        problem = "has adapters alone, and the engine holds no model to which they could be applied"
    if problem:
        raise RunError(f"Refit {version} {problem}.")


def travels_apart(lora: LoraConfig) -> bool:
    """Whether engines get adapters separately instead of merged into the model."""
    return lora.refit == "adapters"  # which is refused for a rank of 0


def plan_refit(
    model_path: str, dtype: torch.dtype, lora: LoraConfig | None, bucket_bytes: int
) -> list[Bucket]:
    """All buckets that a new engine needs; none mixes adapters and other tensors.

    A small model too is split, into about eight buckets of 16 MiB or more, so that an engine loads
    one while the next is filled.
    """
    specs = expected_tensors(model_path, dtype)
    total = sum(math.prod(shape) * kind.itemsize for shape, kind in specs.values())
    buckets = plan_buckets(specs, min(bucket_bytes, max(total // _LEAST_BUCKETS, _SMALL_BYTES)))
    if lora is not None:
        buckets += plan_buckets(_adapters(model_path, dtype, lora), bucket_bytes)
    return buckets


def _adapters(model_path: str, dtype: torch.dtype, lora: LoraConfig) -> dict[str, TensorSpec]:
    from nemo_like.models.adapter_places import expected_adapters

    return expected_adapters(model_path, dtype, lora)


def numbered(buckets: Sequence[Bucket], *, adapters_only: bool) -> list[tuple[int, Bucket]]:
    """The buckets of a refit, with the positions that sender and receiver share."""
    every = enumerate(buckets)
    return [one for one in every if not adapters_only or is_adapter(one[1].slots[0].name)]
