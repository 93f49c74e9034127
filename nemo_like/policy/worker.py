"""One rank of the policy: a process with its shard of model and optimizer."""

import logging
import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray import ObjectRef
from torch._C._distributed_c10d import TCPStore

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy_schema import PolicyConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.worker import Worker, WorkerContext
from nemo_like.losses.protocol import Denominators, Loss
from nemo_like.observe.metrics import Metric, Metrics, Reduce, merge
from nemo_like.policy.engine import EngineSetup, MicroBatches, TrainEngine
from nemo_like.policy.probe import check_architecture
from nemo_like.policy.state import (
    export_folder,
    full_tensors,
    load_checkpoint,
    save_checkpoint,
    write_buckets,
)
from nemo_like.weights.manifest import expected_tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PolicySetup:
    """What every rank needs to start."""

    config: PolicyConfig
    model_path: str
    max_steps: int
    with_reference: bool
    num_threads: int
    timeout_s: float


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


class PolicyWorker(Worker):
    """See the module. Methods marked collective must run on all ranks at once."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._device = torch.device("cuda" if context.gpu_ids else "cpu")

    def open_store(self) -> int:
        """Rank 0: open the rendezvous on a port that the system picks and we keep."""
        self._store = TCPStore("0.0.0.0", 0, self.context.world_size, True, wait_for_workers=False)
        return self._store.port

    def start(self, setup: PolicySetup, address: str, port: int) -> None:
        """Join the process group, load the model, shard it; collective."""
        self._setup = setup
        self._config = setup.config
        self._dtype = getattr(torch, setup.config.dtype.value)
        torch.set_num_threads(setup.num_threads)
        timeout = timedelta(seconds=setup.timeout_s)
        if self.context.rank == 0:
            check_architecture(setup.model_path, setup.config)
        else:
            world_size = self.context.world_size
            self._store = TCPStore(address, port, world_size, False, timeout)
        if self._device.type == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(
            # Tensors that are offloaded to the host are exchanged there, too.
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            store=self._store,
            rank=self.context.rank,
            world_size=self.context.world_size,
            timeout=timeout,
        )
        self._engine = TrainEngine(
            EngineSetup(
                config=setup.config,
                model_path=setup.model_path,
                max_steps=setup.max_steps,
                with_reference=setup.with_reference,
                log_dir=self.context.log_dir,
            ),
            self._device,
        )

    def logprobs(self, shard: Shard) -> tuple[ObjectRef | None, Metrics]:
        """Logprobs of the policy, and of the reference if there is one, for the shard's rows.

        Returns a reference to their columns (from ranks that answer; None from others); metrics
        compare them with the generation logprobs.
        """
        micro_batches = shard.micro_batches(self._device)
        columns = self._engine.logprobs(micro_batches, shard.temperature)
        measured = self._engine.diagnostics.pop()
        if not self._engine.mesh.answers:
            return None, {}
        real = [each for each in micro_batches if each is not None]
        parts = [
            mismatch_metrics(batch, logprobs, entropy)
            for batch, logprobs, entropy in zip(
                real, columns["policy"], columns["entropy"], strict=True
            )
        ]
        names = {"policy": keys.POLICY_LOGPROBS, "reference": keys.REFERENCE_LOGPROBS}
        tokens = {
            names[name]: torch.cat(parts_).cpu() if parts_ else torch.zeros(0)
            for name, parts_ in columns.items()
            if name in names
        }
        return ray.put(TensorBatch(lengths=shard.batch.lengths, tokens=tokens)), merge(
            [*parts, measured]
        )

    def train(self, work: TrainShard) -> Metrics:
        """One optimizer step over all ranks' shards; collective."""
        shard = work.shard
        micro_batches = shard.micro_batches(self._device)
        return self._engine.train(micro_batches, work.loss, work.denominators, shard.temperature)

    def write_weights(
        self, folder: str, version: int, bucket_bytes: int, writers: list[bool]
    ) -> tuple[list[str], int]:
        """Write the weights for a refit where ``writers`` says so; paths and bytes; collective."""
        expected = expected_tensors(self._setup.model_path, self._dtype)
        sizes = {
            name: torch.Size(shape).numel() * dtype.itemsize
            for name, (shape, dtype) in expected.items()
        }
        paths = write_buckets(
            full_tensors(self._engine, self._dtype),
            sizes,
            Path(folder),
            version,
            bucket_bytes,
            writers[self.context.rank],
        )
        return paths, sum(sizes.values())

    def remove_weights(self, folder: str) -> None:
        """Remove what ``write_weights`` wrote on this node."""
        shutil.rmtree(folder, ignore_errors=True)

    def save(self, folder: str) -> None:
        """Write model, optimizer and schedule; collective."""
        save_checkpoint(Path(folder), self._engine)

    def load(self, folder: str) -> None:
        """Restore what ``save`` wrote; collective."""
        load_checkpoint(Path(folder), self._engine)

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder; collective."""
        export_folder(
            full_tensors(self._engine, self._dtype),
            Path(self._setup.model_path),
            Path(folder),
            write=self.context.rank == 0,
        )


def mismatch_metrics(
    batch: TensorBatch, policy_logprobs: torch.Tensor, entropy: torch.Tensor
) -> Metrics:
    """The gap between the engine that sampled and the trainer, over trained tokens.

    It is the smoke alarm of this field: anything but rounding means that ratios are wrong.
    """
    trained = batch.tokens[keys.LOSS_MASK]
    policy = policy_logprobs[trained]
    log_ratio = policy - batch.tokens[keys.GENERATION_LOGPROBS].to(policy.device)[trained]
    count = len(policy)
    if count == 0:
        return {}
    gap = log_ratio.abs()
    kl = (log_ratio.exp() - 1 - log_ratio).mean()
    numbers = [gap.mean(), gap.max(), kl, policy.mean(), entropy[trained].mean()]
    mean_gap, max_gap, mean_kl, logprob, mean_entropy = torch.stack(numbers).tolist()
    return {
        "mismatch/mean_abs": Metric(mean_gap, weight=count),
        "mismatch/max_abs": Metric(max_gap, reduce=Reduce.max),
        "mismatch/kl": Metric(mean_kl, weight=count),
        "policy/logprob": Metric(logprob, weight=count),
        "policy/entropy": Metric(mean_entropy, weight=count),
    }
