"""One rank of the policy: a process with its shard of model and optimizer."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import ray
import torch
import torch.distributed as dist
from ray import ObjectRef
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.generation import Transport
from nemo_like.config.losses import KLEstimator
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.store import listening_store
from nemo_like.distributed.worker import Worker, WorkerContext
from nemo_like.losses.kl import kl_of_rows
from nemo_like.losses.mismatch import MismatchSums, mismatch_of_rows
from nemo_like.observe.metrics import Metrics
from nemo_like.policy import scoring
from nemo_like.policy.parallel.row_shards import Shard, TrainShard
from nemo_like.policy.state.export_check import check_export
from nemo_like.policy.state.loading import unused_tensors
from nemo_like.policy.state.probe import check_architecture
from nemo_like.policy.state.state import (
    export_folder,
    load_checkpoint,
    load_weights,
    refit_tensors,
    save_checkpoint,
    state_bytes,
)
from nemo_like.policy.trainer import Trainer, TrainerSetup
from nemo_like.policy.warm_up import warm_up
from nemo_like.refit.adapters import plan_refit, travels_apart
from nemo_like.refit.broadcast import BroadcastSender
from nemo_like.refit.buckets import Bucket
from nemo_like.refit.ipc import IpcAddress, IpcSender

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SenderAddress:
    """Where a rank's sender is reached."""

    buckets: Sequence[Bucket] = ()
    """Bucket boundaries of all ranks; rank 0 alone tells them, so that the driver stays light."""
    ipc: IpcAddress | None = None
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a rank found when it loaded its model."""

    num_trained: int
    """Trained parameters of the full model, not of this rank's shard."""
    unused: Sequence[str] = ()
    """Rank 0: tensors that the model's files hold and that it has no use for."""


class PolicyWorker(Worker):
    """See the module. Methods marked collective must run on all ranks at once."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._sender: IpcSender | BroadcastSender | None = None
        self._device = torch.device("cuda" if context.gpu_ids else "cpu")

    def open_store(self) -> int:
        """Rank 0: open the rendezvous on a port that the system picks and we keep."""
        self._store = listening_store(self.context.listens_on, self.context.world_size)
        return self._store.port

    def start(self, setup: TrainerSetup, address: str, port: int) -> Started:
        """Join the process group, load the model, shard it; collective."""
        path, output = setup.model_path, setup.output
        self._refit_timeout_s = setup.refit_timeout_s
        torch.set_num_threads(setup.num_threads)
        timeout = timedelta(seconds=setup.timeout_s)
        if self.context.rank == 0:
            check_architecture(path, setup.config)
            if setup.trains:
                check_export(path, setup.config, output)
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
        self._trainer = Trainer(setup, self._device)
        unused = [] if self.context.rank else unused_tensors(path, output)
        return Started(num_trained=self._trainer.num_parameters(), unused=unused)

    def warm_up(self) -> None:
        """Compile before the first step, if anything is compiled; collective."""
        if self._trainer.config.compile and self._trainer.setup.trains:
            warm_up(self._trainer)

    def logprobs(
        self, shard: Shard, with_policy: bool, kl: KLEstimator | None
    ) -> tuple[ObjectRef | None, Metrics, dict[str, Tensor]]:
        """Logprobs of the policy (``with_policy``) and of the reference, if there is one.

        Returns a reference to their columns (from output ranks; None from others); metrics
        that compare the policy's with the generation logprobs; and row columns: how far these are
        apart, and the estimate ``kl`` of the KL to the reference, if it is asked for; collective.
        """
        micro_batches = shard.micro_batches(self._device)
        columns = scoring.logprobs(
            self._trainer, micro_batches, shard.temperature, with_policy=with_policy
        )
        metrics = self._trainer.diagnostics.pop()
        real = [each for each in micro_batches if each is not None]
        if with_policy:
            sums = MismatchSums(self._device)
            if self._trainer.mesh.is_output_rank:
                for batch, logprobs, entropy in zip(
                    real, columns["policy"], columns["entropy"], strict=True
                ):
                    sums.add(logprobs, entropy, batch)
            sums.all_reduce()
            metrics |= sums.metrics()
        if not self._trainer.mesh.is_output_rank:
            return None, {}, {}
        names = {"policy": keys.POLICY_LOGPROBS, "reference": keys.REFERENCE_LOGPROBS}
        tokens = {
            names[name]: torch.cat(parts).cpu() if parts else torch.zeros(0)
            for name, parts in columns.items()
            if name in names
        }
        found: dict[str, list[Tensor]] = {}
        if with_policy:
            parts = zip(columns["policy"], real, strict=True)
            found[keys.MEAN_MISMATCHES] = [mismatch_of_rows(*part) for part in parts]
        if kl is not None:
            parts = zip(columns["policy"], columns["reference"], real, strict=True)
            found[keys.REFERENCE_KL] = [kl_of_rows(*part, kl) for part in parts]
        none = torch.zeros(0, dtype=torch.float64)  # of a rank without rows
        rows = {name: torch.cat([none, *(p.cpu() for p in each)]) for name, each in found.items()}
        ref = ray.put(TensorBatch(lengths=shard.batch.lengths, tokens=tokens))
        return ref, metrics, rows

    def train(self, work: TrainShard) -> Metrics:
        """One optimizer step over all ranks' shards; collective."""
        shard = work.shard
        return self._trainer.train(
            shard.micro_batches(self._device),
            work.loss,
            work.denominators,
            shard.temperature,
            on_policy=work.on_policy,
            check=work.check,
        )

    def evaluate(self, work: TrainShard) -> Metrics:
        """The loss's metrics of a shard; collective."""
        shard = work.shard
        return scoring.evaluate(
            self._trainer,
            shard.micro_batches(self._device),
            work.loss,
            work.denominators,
            shard.temperature,
        )

    def score(self, shard: Shard, column: str) -> ObjectRef | None:
        """A reference to what the model gives for each token, as token column ``column``.

        None from ranks without output; collective.
        """
        parts = scoring.scores(self._trainer, shard.micro_batches(self._device), shard.temperature)
        if not self._trainer.mesh.is_output_rank:
            return None
        tokens = {column: torch.cat(parts).cpu() if parts else torch.zeros(0)}
        return ray.put(TensorBatch(lengths=shard.batch.lengths, tokens=tokens))

    def top_logprobs(self, shard: Shard, k: int, vocabulary: int | None) -> ObjectRef | None:
        """A reference to token columns ``teacher_ids`` and ``teacher_logprobs``; see ``score``."""
        micro_batches = shard.micro_batches(self._device)
        temperature = shard.temperature
        parts = scoring.top_logprobs(self._trainer, micro_batches, temperature, k, vocabulary)
        if not self._trainer.mesh.is_output_rank:
            return None
        none = (torch.zeros(0, k, dtype=torch.int64), torch.zeros(0, k))
        ids, logprobs = zip(*(parts or [none]), strict=True)
        tokens = {
            keys.TEACHER_IDS: torch.cat(ids).cpu(),
            keys.TEACHER_LOGPROBS: torch.cat(logprobs).cpu(),
        }
        return ray.put(TensorBatch(lengths=shard.batch.lengths, tokens=tokens))

    def derive(
        self, batch: RemoteBatch, make: Callable[[TensorBatch], tuple[dict[str, Tensor], T]]
    ) -> tuple[ObjectRef, T] | None:
        """A reference to the token columns that ``make`` gives for rows, and what else it gives.

        None where there are no rows.
        """
        if not len(batch):
            return None
        columns, summary = make(batch.fetch())
        return ray.put(TensorBatch(lengths=batch.lengths, tokens=columns)), summary

    def open_sender(
        self, num_receivers: int, transport: Transport, bucket_bytes: int
    ) -> SenderAddress:
        """Plan the buckets and listen for ``num_receivers`` engine ranks; tells them where."""
        trainer, timeout_s = self._trainer, self._refit_timeout_s
        lora = trainer.config.lora if travels_apart(trainer.config.lora) else None
        buckets = plan_refit(trainer.setup.model_path, trainer.dtype, lora, bucket_bytes)
        told = buckets if self.context.rank == 0 else ()
        if not num_receivers:  # This rank only takes part in gathering.
            return SenderAddress(buckets=told)
        if transport == "ipc":
            sender = IpcSender(buckets, self._device, num_receivers, timeout_s)
            self._sender = sender
            return SenderAddress(buckets=told, ipc=sender.address)
        store = listening_store(self.context.listens_on, None, timedelta(seconds=timeout_s))
        broadcast = BroadcastSender(store, buckets, self._device, num_receivers, timeout_s)
        self._sender = broadcast
        return SenderAddress(buckets=told, port=broadcast.port)

    def accept_receivers(self) -> None:
        """Wait until the engines of ``open_sender`` have connected."""
        if self._sender is not None:
            self._sender.accept()

    def send_weights(self, version: int, adapters_only: bool) -> float:
        """Hand weights to the engines; returns the seconds that it took; collective."""
        start = time.monotonic()
        tensors = refit_tensors(self._trainer, self._trainer.dtype, adapters_only=adapters_only)
        if self._sender is not None:
            self._sender.send(tensors, version, adapters_only=adapters_only)
        else:
            for _ in tensors:
                pass
        return time.monotonic() - start

    def release_memory(self) -> None:
        """Give memory that is cached for the next step back to the GPU."""
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def state_bytes(self) -> int:
        """About what ``save`` writes of this rank's pipeline stages."""
        return state_bytes(self._trainer)

    def save(self, folder: str) -> None:
        """Write model, optimizer and schedule; collective."""
        save_checkpoint(Path(folder), self._trainer)

    def load(self, folder: str) -> None:
        """Restore what ``save`` wrote; collective."""
        load_checkpoint(Path(folder), self._trainer)

    def load_weights(self, folder: str) -> None:
        """Restore the model alone of what ``save`` wrote; collective."""
        load_weights(Path(folder), self._trainer)

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder; collective."""
        export_folder(self._trainer, Path(folder), write=self.context.rank == 0)
