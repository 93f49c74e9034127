"""Rows on their way to a data-parallel rank, cut into micro-batches there."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.losses.protocol import Denominators, Loss
from nemo_like.observe.metrics import Metrics
from nemo_like.policy.trainer import MicroBatches


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The rows of one data-parallel rank, in the order of its micro-batches."""

    batch: RemoteBatch
    bin_sizes: tuple[int, ...]
    """Rows of each micro-batch; 0 where only other ranks have one."""
    temperature: float

    def micro_batches(self, device: torch.device) -> MicroBatches:
        """Fetch the rows and cut them; None for an empty micro-batch."""
        local = self.batch.fetch()
        first = 0
        cut: list[TensorBatch | None] = []
        for size in self.bin_sizes:
            rows = range(first, first + size)
            cut.append(local.select(list(rows)).to(device) if size else None)
            first += size
        return cut


@dataclass(frozen=True, kw_only=True)
class TrainShard:
    """A shard, and the loss that all ranks step on together."""

    shard: Shard
    loss: Loss
    denominators: Denominators
    on_policy: bool
    """Whether the shard was sampled with the current weights."""
    check: Callable[[Metrics], None] | None
    """May refuse the step; see ``Trainer.train``."""
