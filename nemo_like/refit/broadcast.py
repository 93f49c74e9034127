"""Weights from one process to many, on any node: packed broadcasts over NCCL (gloo on the CPU).

Policy rank 0 and every rank of every engine form a process group of their own. Two buffers take
turns: while one bucket is loaded, the next is on its way. Each bucket is led by its version and
number: sides that have fallen out of step notice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from nemo_like.errors import RunError
from nemo_like.refit.buckets import ALIGNMENT_BYTES, NUM_BUFFERS, Bucket, numbered

_HEADER_BYTES = ALIGNMENT_BYTES
_SENDER = 0


@dataclass(frozen=True)
class BroadcastLink:
    """One replica's place in the group: its tensor-parallel rank i is ``first_rank`` + i."""

    host: str
    port: int
    first_rank: int
    world_size: int

    def receiver(
        self, rank: int, buckets: Sequence[Bucket], device: torch.device, timeout_s: float
    ) -> "BroadcastReceiver":
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(self.host, self.port, None, False, timeout, wait_for_workers=False)
        group = _join(store, self.first_rank + rank, self.world_size, device, timeout)
        return BroadcastReceiver(group, buckets, device)


class BroadcastSender:
    def __init__(
        self,
        store: TCPStore,
        buckets: Sequence[Bucket],
        device: torch.device,
        num_receivers: int,
        timeout_s: float,
    ) -> None:
        """``store``: where the group meets; see ``distributed.worker.listening_store``."""
        self._timeout = timedelta(seconds=timeout_s)
        self._store = store
        self.port: int = store.port
        self.world_size = 1 + num_receivers
        self._buckets = buckets
        self._device = device

    def accept(self) -> None:
        """Form the group; returns once all have joined (gloo), or at once (NCCL joins later)."""
        self._group = _join(self._store, _SENDER, self.world_size, self._device, self._timeout)

    def send(
        self, tensors: Iterator[tuple[str, Tensor]], version: int, *, adapters_only: bool = False
    ) -> None:
        """Broadcast all ``tensors`` in the order of the buckets; RunError if a peer is gone.

        Peers learn of a failure here by the end of this process only.
        """
        buckets = numbered(self._buckets, adapters_only=adapters_only)
        buffers = _new_buffers(buckets, self._device)
        pending: list[Any] = []
        for i, (number, bucket) in enumerate(buckets):
            if i >= NUM_BUFFERS:
                _wait(pending[i - NUM_BUFFERS])
            buffer = buffers[i % NUM_BUFFERS]
            header = torch.tensor([version, number], dtype=torch.int64)
            buffer[: header.nbytes].view(torch.int64).copy_(header)
            bucket.fill(buffer[_HEADER_BYTES:], tensors)
            pending.append(_broadcast(self._group, buffer[: _HEADER_BYTES + bucket.num_bytes]))
        for work in pending[-NUM_BUFFERS:]:
            _wait(work)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class BroadcastReceiver:
    def __init__(self, group: Any, buckets: Sequence[Bucket], device: torch.device) -> None:
        self._group = group
        self._buckets = buckets
        self._device = device

    def tensors(self, version: int, *, adapters_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of one refit by name; each is overwritten once the next bucket is drawn.

        Raises RunError if the sender is gone or sends another version.
        """
        buckets = numbered(self._buckets, adapters_only=adapters_only)
        buffers = _new_buffers(buckets, self._device)
        arriving = self._receive(buckets[0][1], buffers[0])
        for i, (number, bucket) in enumerate(buckets):
            _wait(arriving)
            if i + 1 < len(buckets):
                # The other buffer was read to its end in the turn before, on this same stream.
                arriving = self._receive(buckets[i + 1][1], buffers[(i + 1) % NUM_BUFFERS])
            buffer = buffers[i % NUM_BUFFERS]
            found = tuple(buffer[:16].view(torch.int64).tolist())
            if found != (version, number):
                raise RunError(
                    f"Refit {version} was announced, and bucket {number} is number {found[1]} of "
                    f"refit {found[0]}."
                )
            yield from bucket.views(buffer[_HEADER_BYTES:])

    def _receive(self, bucket: Bucket, buffer: Tensor) -> Any:
        return _broadcast(self._group, buffer[: _HEADER_BYTES + bucket.num_bytes])


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:  # gloo's and NCCL's word for a broken connection or a timeout
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"The other side of the refit is gone: {reason}") from error


def _new_buffers(buckets: Sequence[tuple[int, Bucket]], device: torch.device) -> list[Tensor]:
    size = _HEADER_BYTES + max(bucket.num_bytes for _, bucket in buckets)
    return [torch.empty(size, dtype=torch.uint8, device=device) for _ in buckets[:NUM_BUFFERS]]


def _broadcast(group: Any, tensor: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = _SENDER
    return group.broadcast([tensor], options)


def _join(
    store: TCPStore, rank: int, world_size: int, device: torch.device, timeout: timedelta
) -> Any:
    """A group independent of the process's default group, which may differ or not exist."""
    prefixed = PrefixStore("nemo-like-refit", store)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(prefixed, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
