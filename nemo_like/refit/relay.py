"""Weights for several engines of one GPU: the first receives them, and passes them on.

NCCL refuses two members of a group on one GPU, so that only the first is one. The others map its
buffers, as they would map those of a policy rank on their GPU.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_like.errors import RunError
from nemo_like.refit.broadcast import BroadcastLink, BroadcastReceiver
from nemo_like.refit.buckets import Bucket
from nemo_like.refit.ipc import IpcAddress, IpcReceiver, IpcSender, Tensors

_RETRY_S = 0.1


@dataclass(frozen=True)
class FirstLink:
    """The place of the first engine, which ``num_others`` more find at ``address``."""

    source: BroadcastLink
    address: IpcAddress
    num_others: int

    def receiver(
        self, rank: int, buckets: Sequence[Bucket], device: torch.device, timeout_s: float
    ) -> "FirstReceiver":
        """Connect to both sides; returns once all others have connected."""
        relay = IpcSender(buckets, device, self.num_others, timeout_s, self.address)
        receiver = self.source.receiver(rank, buckets, device, timeout_s)
        relay.accept()
        return FirstReceiver(receiver, relay)


@dataclass(frozen=True)
class OtherLink:
    """The place of another engine."""

    first: IpcAddress

    def receiver(
        self, rank: int, buckets: Sequence[Bucket], device: torch.device, timeout_s: float
    ) -> IpcReceiver:
        """Connect to the first engine, which may not listen yet."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                return IpcReceiver(self.first, buckets, device, timeout_s)
            except ConnectionRefusedError as error:
                if time.monotonic() > end:
                    raise RunError(
                        f"The first engine of this GPU did not listen within {timeout_s:g} s."
                    ) from error
                time.sleep(_RETRY_S)


def links_of_gpu(
    source: BroadcastLink, num_engines: int
) -> Sequence[BroadcastLink | FirstLink | OtherLink]:
    """Links of the engines on one GPU."""
    if num_engines == 1:
        return [source]
    address, others = IpcAddress.new(), num_engines - 1
    return [FirstLink(source, address, others), *[OtherLink(address)] * others]


class FirstReceiver:
    """The first engine's side."""

    def __init__(self, receiver: BroadcastReceiver, relay: IpcSender) -> None:
        self._receiver = receiver
        self._relay = relay

    def tensors(self, version: int, *, adapters_only: bool = False) -> Tensors:
        """See ``BroadcastReceiver``; the others get the same, and RunError if reading stops."""
        arriving = self._receiver.tensors(version, adapters_only=adapters_only)
        return self._relay.passed_on(arriving, version, adapters_only=adapters_only)
