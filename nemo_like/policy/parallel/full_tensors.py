"""Sharded tensors gathered, many to a collective: one by one, the host limits a refit."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

_BATCH_BYTES = 128 * 2**20
"""Most of one collective, which holds them twice; a larger tensor is gathered by itself, once."""


def local_part(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that is here; a plain tensor is full on every rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return next(full_tensors([(tensor, dtype)], device))


def full_tensors(
    tensors: Iterable[tuple[Tensor, torch.dtype]], device: torch.device
) -> Iterator[Tensor]:
    """Parameters and buffers as every rank is to see them, each in its dtype.

    Collective: all ranks must draw at the same pace. Shards are rounded first, and put on
    ``device``: NCCL does not reach those of CPU offload.
    """
    for batch in _batches(tensors):
        tensor, dtype = batch[0]
        group = _shard_group(tensor)
        if group is not None and len(batch) > 1:
            yield from _gathered([each for each, _ in batch], dtype, device, group)
        elif not isinstance(tensor, DTensor):
            yield tensor.to(device, dtype)
        elif tensor.device_mesh.size() == 1:
            yield tensor.to_local().to(device, dtype)  # without the cost of DTensor's dispatch
        else:
            rounded = tensor.to(device, dtype)
            assert isinstance(rounded, DTensor)
            yield rounded.full_tensor()


def _batches(
    tensors: Iterable[tuple[Tensor, torch.dtype]],
) -> Iterator[list[tuple[Tensor, torch.dtype]]]:
    """Neighbours that one collective can gather, and all others alone."""
    batch: list[tuple[Tensor, torch.dtype]] = []
    kind, num_bytes = None, 0
    for tensor, dtype in tensors:
        group, size = _shard_group(tensor), tensor.numel() * dtype.itemsize
        if batch and (group is None or (group, dtype) != kind or num_bytes + size > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append((tensor, dtype))
        kind, num_bytes = (group, dtype), num_bytes + size
    if batch:
        yield batch


def _shard_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks that have rows of ``tensor`` each, if it is divided in no other way."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
        return None
    divided = [(i, p) for i, p in enumerate(tensor.placements) if not isinstance(p, Replicate)]
    if len(divided) != 1:
        return None
    [(axis, placed)] = divided
    # By type: a strided shard, of rows that are in another order, may say that it equals this one.
    by_rows = type(placed) is Shard and placed.dim == 0
    return tensor.device_mesh.get_group(axis) if by_rows else None


def _gathered(
    tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> Iterator[Tensor]:
    """Each full tensor, from one collective of every rank's rows."""
    num_ranks = dist.get_world_size(group)
    # All ranks but the last that have any have as many rows, ``torch.chunk``'s; these are padded.
    widths = [-(-each.shape[0] // num_ranks) * prod(each.shape[1:]) for each in tensors]
    mine = torch.empty(sum(widths), dtype=dtype, device=device)
    for tensor, room in zip(tensors, mine.split(widths), strict=True):
        assert isinstance(tensor, DTensor)
        rows = tensor.to_local()
        room[: rows.numel()].view_as(rows).copy_(rows)
    everyone = mine.new_empty(num_ranks, sum(widths))
    dist.all_gather(list(everyone), mine, group=group)
    for tensor, columns in zip(tensors, everyone.split(widths, dim=1), strict=True):
        yield columns.reshape(-1, *tensor.shape[1:])[: tensor.shape[0]]
