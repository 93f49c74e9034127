"""Checks and measurements that a person switches on under ``policy.debug``.

Checks are collective over the default process group, and all ranks raise when any finds something,
so that none is left waiting. Legend: ``R`` ranks of a group, ``n`` tensors.
"""

import bisect
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.errors import RunError
from nemo_like.observe.metrics import Metric, Metrics, Reduce
from nemo_like.policy.parallel.full_tensors import local_part

_HASH_CHUNK = 1 << 20  # elements, whose products are 8 MiB
# Odd, so that multiplying by them modulo 2^64 loses no bit (from MurmurHash3's 64-bit finalizer).
_MIX = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16}

# In this order: NCCL's barrier is called all_reduce_barrier. Others are known by their own names.
_COLLECTIVES = ("barrier", "reduce_scatter", "all_reduce", "all_gather", "all_to_all", "broadcast")


@torch.no_grad()
def check_equal_over(
    named_tensors: Mapping[str, Tensor],
    groups: Sequence[tuple[str, dist.ProcessGroup]],
    rank: int,
    what: str,
) -> None:
    """Raise RunError, on all ranks, unless ranks that should hold equal local tensors do.

    A DTensor must be equal, bit for bit, along the mesh dimensions where it is replicated, and all
    tensors over each of ``groups`` (name of the axis, its ranks). ``what``: the tensors' kind in
    the message (``parameters``).
    """
    axes = _replicated_axes(named_tensors, groups)
    # Every axis, whatever was found before: its other ranks wait for this one.
    found = list(filter(None, [_find_difference(axis, rank, what) for axis in axes]))
    _raise_together(found[0] if found else None)


def check_data(
    row_fingerprints: Sequence[int],
    dp_group: dist.ProcessGroup | None,
    same_groups: Sequence[tuple[str, dist.ProcessGroup]],
    rank: int,
) -> None:
    """Raise RunError, on all ranks, unless each row is on one data-parallel rank alone.

    Ranks of each of ``same_groups`` (name of the axis, its ranks: those that share a row's work)
    must hold the same rows in the same order. ``dp_group`` is None where one rank has all rows.
    Fingerprints are those of ``fingerprint_rows``.
    """
    own, found = list(row_fingerprints), list[str]()
    for axis, group in same_groups:
        for other, rows in _gather_objects(own, group).items():
            if rows != own:
                found.append(
                    f"ranks {rank} and {other} along axis {axis} hold different rows ({len(own)} "
                    f"and {len(rows)}, {len(set(own) & set(rows))} in common), but share their work"
                )
    others = {} if dp_group is None else _gather_objects(own, dp_group)
    for other, rows in others.items():
        if other != rank and (shared := Counter(own) & Counter(rows)):
            first = next(iter(shared))
            found.append(
                f"data-parallel ranks {rank} and {other} both hold {shared.total()} rows, such as "
                f"rows {own.index(first)} and {rows.index(first)} of theirs, which would count "
                "twice in the gradient"
            )
    _raise_together(f"Rank {rank}: {found[0]}; check how rows are sharded." if found else None)


def fingerprint_rows(batch: TensorBatch) -> list[int]:
    """A hash of 63 bits of each row's ``group_ids`` and ``seeds``, where there, and token ids."""
    # Text does not identify a row: completions of one prompt, or given texts, may well be equal.
    known = [batch.rows[key].tolist() for key in (keys.GROUP_IDS, keys.SEEDS) if key in batch.rows]
    ids = batch.tokens[keys.INPUT_IDS].cpu().split(batch.lengths.tolist())
    return [
        _digest(repr([column[row] for column in known]).encode() + row_ids.numpy().tobytes())
        for row, row_ids in enumerate(ids)
    ]


def memory_metrics(phase: str, device: torch.device) -> Metrics:
    """Memory of this process after ``phase``, in GiB; the highest rank is shown.

    GPU: ``memory/<phase>_allocated_gib``, ``_reserved_gib`` (held by PyTorch's allocator) and
    ``_peak_gib`` (most allocated since the last call). CPU: ``memory/<phase>_resident_gib``.
    """
    if device.type == "cuda":
        sizes = {
            "allocated": torch.cuda.memory_allocated(device),
            "peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
        torch.cuda.reset_peak_memory_stats(device)
    else:
        sizes = {"resident": psutil.Process().memory_info().rss}
    return {
        f"memory/{phase}_{kind}_gib": Metric(size / 2**30, reduce=Reduce.max)
        for kind, size in sizes.items()
    }


class CollectiveTimer:
    """Counts and times the collectives of the blocks it is entered for, by torch's profiler.

    Seconds are, on a GPU, those of NCCL's kernels; with gloo, from the call to its completion. Both
    contain the wait for slower ranks, and overlapping ones add up.
    """

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None
        self._calls: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def __enter__(self) -> None:
        assert self._profile is None, "collectives inside nested blocks would count twice"
        # acc_events changes nothing without a schedule, but keeps torch 2.11 from a warning.
        self._profile = profile(activities=self._activities, acc_events=True)
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        assert self._profile is not None
        ended, self._profile = self._profile, None
        ended.__exit__(*error)
        events = list(ended.events() or [])
        # Calls of every backend, and FSDP's and DDP's own, pass through operators of this name.
        calls = [event for event in events if event.name.startswith("c10d::")]
        calls.sort(key=lambda call: call.time_range.start)
        self._calls.update(_collective(call.name) for call in calls)
        for name, seconds in _durations(events, calls):
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def pop(self) -> Metrics:
        """``collective/<op>_count`` and ``_s`` since the last call; the highest rank is shown."""
        calls, self._calls = self._calls, Counter()
        seconds, self._seconds = self._seconds, {}
        return {
            f"collective/{op}_{unit}": Metric(float(value), reduce=Reduce.max)
            for unit, values in (("count", calls), ("s", seconds))
            for op, value in sorted(values.items())
        }


@dataclass
class _Axis:
    name: str
    group: dist.ProcessGroup
    tensors: dict[str, Tensor] = field(default_factory=dict)


def _replicated_axes(
    named_tensors: Mapping[str, Tensor], groups: Sequence[tuple[str, dist.ProcessGroup]]
) -> list[_Axis]:
    """Every group of two or more with its tensors, in the same order on all of its ranks."""
    # Those given are there on a rank without tensors too: the others would wait for it.
    axes = {group.group_name: _Axis(axis, group) for axis, group in groups}
    for name, tensor in named_tensors.items():
        local = local_part(tensor).detach()
        for axis, group in [*_mesh_axes(tensor), *groups]:
            axes.setdefault(group.group_name, _Axis(axis, group)).tensors[name] = local
    return [axis for axis in axes.values() if axis.group.size() > 1]


def _mesh_axes(tensor: Tensor) -> Iterator[tuple[str, dist.ProcessGroup]]:
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or [f"mesh dimension {i}" for i in range(mesh.ndim)]
        for i, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                yield names[i], mesh.get_group(i)


def _find_difference(axis: _Axis, rank: int, what: str) -> str | None:
    """What differs over the axis, in words, or None; the same verdict on all of its ranks."""
    names = list(axis.tensors)
    forms = [(name, str(t.dtype), tuple(t.shape)) for name, t in axis.tensors.items()]
    digests = _gather(torch.tensor([_digest(repr(forms).encode())]), axis.group)
    if (digests != digests[0]).any():
        return (
            f"Rank {rank}: ranks along axis {axis.name} hold {what} of other names, dtypes or "
            f"shapes ({len(forms)} of them here); all must build the same model."
        )
    hashes = [_bit_hash(tensor) for tensor in axis.tensors.values()]
    gathered = _gather(torch.tensor(hashes, dtype=torch.int64), axis.group)
    differs = gathered != gathered[0]
    differing = differs.any(dim=0).nonzero()[:, 0].tolist()
    if not differing:
        return None
    other = int(differs[:, differing[0]].nonzero()[0])
    ranks = dist.get_process_group_ranks(axis.group)
    diff = _largest_difference(axis.tensors[names[differing[0]]], axis.group, other)
    listed = ", ".join(repr(names[i]) for i in differing[:3])
    return (
        f"Rank {rank}: {len(differing)} of {len(names)} {what} differ between ranks {ranks[0]} and "
        f"{ranks[other]} along axis {axis.name}: {listed}{', ...' if len(differing) > 3 else ''} "
        f"(largest absolute difference of the first: {diff:.3g}); they must be equal bit for bit, "
        "so look for an update, a reduction or a seed that differs between these ranks."
    )


def _largest_difference(tensor: Tensor, group: dist.ProcessGroup, other: int) -> float:
    """Largest absolute difference between the group's ranks 0 and ``other``; 0: signs of zeros."""
    # Bytes, because no backend moves every dtype.
    sent = tensor.contiguous().reshape(-1).view(torch.uint8).to(_device_of(group), copy=True)
    dist.broadcast(sent, group=group, group_src=0)
    first = sent.view(tensor.dtype).reshape(tensor.shape).to(tensor.device)
    diff = (tensor.double() - first.double()).abs().max().cpu()
    return _gather(diff[None], group)[other, 0].item()


def _bit_hash(tensor: Tensor) -> int:
    """A hash of the tensor's bits: equal for equal bits, on any device.

    Elements, as integers, are multiplied by weights of their positions and added modulo 2^64. The
    weights are odd: no change of one element is lost; and mixed: hardly any other is.
    """
    integers = tensor.contiguous().reshape(-1)
    integers = integers.view(_INTEGER_OF_SIZE.get(tensor.element_size(), torch.int32))
    weights = _hash_weights(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in integers.split(_HASH_CHUNK):
        total = total * _MIX[0] + (chunk * weights[: len(chunk)]).sum()
    return int(total)


@cache
def _hash_weights(device: torch.device) -> Tensor:
    weights = torch.arange(1, _HASH_CHUNK + 1, device=device)
    for factor in _MIX:
        weights = weights * factor
        weights = weights ^ (weights >> 32)
    return weights | 1


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors the group can move."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")


def _gather(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, n] on the CPU: ``row`` [n] of every rank of the group."""
    sent = row.to(_device_of(group))
    rows = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(rows, sent, group=group)
    return torch.stack(rows).cpu()


def _gather_objects(value: Any, group: dist.ProcessGroup | None) -> dict[int, Any]:
    """Rank (of the default group) -> its ``value``, for all ranks of the group."""
    ranks = dist.get_process_group_ranks(group)
    gathered = [value] * len(ranks)
    dist.all_gather_object(gathered, value, group=group)
    return dict(zip(ranks, gathered, strict=True))


def _raise_together(message: str | None) -> None:
    """Raise RunError on all ranks if any has a message: its own, or that of the first that has."""
    messages = _gather_objects(message, None).values()
    first = next((other for other in messages if other), None)
    if first is not None:
        raise RunError(message or first)


def _collective(event_name: str) -> str:
    """``c10d::_allgather_base_`` and ``nccl:_all_gather_base`` are both ``all_gather``."""
    plain = event_name.replace("_", "")
    own_name = event_name.rpartition(":")[2].split()[0].strip("_")
    return next((op for op in _COLLECTIVES if op.replace("_", "") in plain), own_name)


def _durations(
    events: Sequence[FunctionEvent], calls: Sequence[FunctionEvent]
) -> Iterator[tuple[str, float]]:
    """Collective and seconds of each event that a backend recorded; ``calls`` are in order."""
    starts = [call.time_range.start for call in calls]
    for event in events:
        seconds = event.time_range.elapsed_us() / 1e6
        if event.name.startswith("gloo:"):
            # Gloo names what it does, not what it was asked for (its reduce_scatter is an
            # all_reduce); but its event begins within the call.
            call = bisect.bisect_right(starts, event.time_range.start) - 1
            yield _collective(calls[call].name if call >= 0 else event.name), seconds
        elif event.name.startswith("nccl:") and event.device_type == DeviceType.CUDA:
            yield _collective(event.name), seconds
