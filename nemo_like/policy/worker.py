"""One rank of the policy: a process with its shard of model and optimizer."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
from nemo_like.distributed.worker import Worker, WorkerContext, listening_store
from nemo_like.imports import freeze_objects
from nemo_like.losses.mismatch import MismatchSums, mismatch_of_rows
from nemo_like.losses.policy_gradient import kl_of_rows
from nemo_like.losses.protocol import Denominators, Loss
from nemo_like.observe.metrics import Metrics
from nemo_like.planning.offload import Placement
from nemo_like.policy import scoring
from nemo_like.policy.model import MicroBatches
from nemo_like.policy.state.loading import unused_tensors
from nemo_like.policy.state.state import (
    export_folder,
    load_checkpoint,
    load_weights,
    refit_tensors,
    save_checkpoint,
    state_bytes,
)
from nemo_like.policy.trainer import Trainer
from nemo_like.policy.trainer_setup import TrainerSetup
from nemo_like.refit.buckets import Bucket, plan_refit, travels_apart
from nemo_like.refit.ipc import IpcAddress, IpcSender

if TYPE_CHECKING:
    from nemo_like.refit.broadcast import BroadcastSender

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        ends = list(accumulate(self.bin_sizes))
        return [
            local.select(range(end - size, end)).to(device) if size else None
            for size, end in zip(self.bin_sizes, ends, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class SenderAddress:
    buckets: Sequence[Bucket] = ()
    """Of all ranks; from rank 0 alone, to keep the driver light."""
    ipc: IpcAddress | None = None
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class Started:
    num_trained: int
    """Trained parameters of the full model, not of this rank's shard."""
    placement: Placement
    unused: Sequence[str] = ()
    """Rank 0: tensors that the model's files hold and that it has no use for."""


class PolicyWorker(Worker):
    """Methods marked collective must run on all ranks at once."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._sender: IpcSender | BroadcastSender | None = None
        self._device = torch.device("cuda" if context.gpu_ids else "cpu")

    def open_store(self) -> int:
        """Rank 0: open the rendezvous; the system picks the port."""
        self._store = listening_store(self.context.listens_on, self.context.world_size)
        return self._store.port

    def start(self, setup: TrainerSetup, address: str, port: int) -> Started:
        """Join the process group, load the model, shard it; collective."""
        path, output = setup.model_path, setup.output
        self._refit_timeout_s = setup.refit_timeout_s
        torch.set_num_threads(setup.num_threads)
        timeout = timedelta(seconds=setup.timeout_s)
        if self.context.rank == 0:
            from nemo_like.policy.state.checks import check_architecture, check_export

            check_architecture(path, setup.config, setup.role)
            if setup.trains:
                check_export(path, setup.config, output, setup.role)
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
        return Started(
            num_trained=self._trainer.num_parameters(),
            placement=self._trainer.placement,
            unused=unused,
        )

    def warm_up(self, temperature: float) -> None:
        if self._trainer.config.compile and self._trainer.setup.trains:
            from nemo_like.policy.warm_up import warm_up

            warm_up(self._trainer, temperature)
            freeze_objects()

    def logprobs(
        self, shard: Shard, with_policy: bool, kl: KLEstimator | None
    ) -> tuple[ObjectRef | None, Metrics, dict[str, Tensor]]:
        """Logprobs of the policy (``with_policy``) and of any reference; collective.

        Returns their columns (see ``score``), metrics of the mismatch with the generation logprobs,
        and row columns: each row's mean mismatch, and the KL to the reference as ``kl`` estimates.
        """
        trainer, micro_batches = self._trainer, shard.micro_batches(self._device)
        columns = scoring.logprobs(
            trainer, micro_batches, shard.temperature, with_policy=with_policy
        )
        metrics = trainer.diagnostics.pop()
        real = [each for each in micro_batches if each is not None]
        policy, entropy, reference = (
            columns.get(name, []) for name in ("policy", "entropy", "reference")
        )
        if with_policy:
            sums = MismatchSums(self._device)
            for part in zip(policy, entropy, real, strict=trainer.mesh.is_output_rank):
                sums.add(*part)
            sums.all_reduce()
            metrics |= sums.metrics()
        if not trainer.mesh.is_output_rank:
            return None, {}, {}
        tokens, of_rows = {}, {}
        if with_policy:
            tokens[keys.POLICY_LOGPROBS] = policy
            parts = zip(policy, real, strict=True)
            of_rows[keys.MEAN_MISMATCHES] = [mismatch_of_rows(*part) for part in parts]
        if "reference" in columns:
            tokens[keys.REFERENCE_LOGPROBS] = reference
        if kl is not None:
            parts = zip(policy, reference, real, strict=True)
            of_rows[keys.REFERENCE_KL] = [kl_of_rows(*part, kl) for part in parts]
        none = torch.zeros(0, dtype=torch.float64)  # of a rank without rows
        rows = {name: torch.cat([none, *(p.cpu() for p in each)]) for name, each in of_rows.items()}
        return self._put(shard, tokens), metrics, rows

    def train(
        self,
        shard: Shard,
        loss: Loss,
        denominators: Denominators,
        on_policy: bool,
        check: Callable[[Metrics], None] | None,
    ) -> Metrics:
        metrics = self._trainer.train(
            shard.micro_batches(self._device),
            loss,
            denominators,
            shard.temperature,
            on_policy=on_policy,
            check=check,
        )
        return metrics | self.memory("train/")

    def add(self, shard: Shard, loss: Loss, denominators: Denominators, on_policy: bool) -> None:
        """Gradients of part of a step, before its denominators are known; collective."""
        rows = shard.micro_batches(self._device)
        self._trainer.add(rows, loss, denominators, shard.temperature, on_policy=on_policy)

    def finish(self, divide_by: float, check: Callable[[Metrics], None] | None) -> Metrics:
        """One optimizer step over everything added, see ``Trainer.finish``; collective."""
        return self._trainer.finish(check, divide_by) | self.memory("train/")

    def evaluate(self, shard: Shard, loss: Loss, denominators: Denominators) -> Metrics:
        micro_batches = shard.micro_batches(self._device)
        return scoring.evaluate(self._trainer, micro_batches, loss, denominators, shard.temperature)

    def score(self, shard: Shard, column: str) -> ObjectRef | None:
        """A reference to token column ``column``; None from ranks without output or rows;
        collective."""
        parts = scoring.scores(self._trainer, shard.micro_batches(self._device), shard.temperature)
        return self._put(shard, {column: parts})

    def top_logprobs(self, shard: Shard, k: int, vocabulary: int | None) -> ObjectRef | None:
        micro_batches = shard.micro_batches(self._device)
        parts = scoring.top_logprobs(self._trainer, micro_batches, shard.temperature, k, vocabulary)
        ids, logprobs = [ids for ids, _ in parts], [logprobs for _, logprobs in parts]
        return self._put(shard, {keys.TEACHER_IDS: ids, keys.TEACHER_LOGPROBS: logprobs})

    def _put(self, shard: Shard, columns: dict[str, list[Tensor]]) -> ObjectRef | None:
        if not (self._trainer.mesh.is_output_rank and len(shard.batch)):
            return None
        tokens = {name: torch.cat(parts).cpu() for name, parts in columns.items()}
        return ray.put(TensorBatch(lengths=shard.batch.lengths, tokens=tokens))

    def derive(
        self, batch: RemoteBatch, make: Callable[[TensorBatch], tuple[dict[str, Tensor], T]]
    ) -> tuple[ObjectRef, T] | None:
        if not len(batch):
            return None
        columns, summary = make(batch.fetch())
        return ray.put(TensorBatch(lengths=batch.lengths, tokens=columns)), summary

    def open_sender(
        self, num_receivers: int, transport: Transport, bucket_bytes: int
    ) -> SenderAddress:
        """Plan the buckets and listen for ``num_receivers`` engine ranks, possibly none."""
        trainer, timeout_s = self._trainer, self._refit_timeout_s
        lora = trainer.config.lora if travels_apart(trainer.config.lora) else None
        buckets = plan_refit(trainer.setup.model_path, trainer.dtype, lora, bucket_bytes)
        address = SenderAddress(buckets=buckets if self.context.rank == 0 else ())
        if num_receivers and transport == "ipc":
            self._sender = IpcSender(buckets, self._device, num_receivers, timeout_s)
            return replace(address, ipc=self._sender.address)
        if num_receivers:
            from nemo_like.refit.broadcast import BroadcastSender

            store = listening_store(self.context.listens_on, None, timedelta(seconds=timeout_s))
            self._sender = BroadcastSender(store, buckets, self._device, num_receivers, timeout_s)
            return replace(address, port=self._sender.port)
        return address

    def accept_receivers(self) -> None:
        if self._sender is not None:
            self._sender.accept()

    def send_weights(self, version: int, adapters_only: bool) -> float:
        """Send weights to the engines; returns the seconds it took; collective."""
        start = time.monotonic()
        tensors = refit_tensors(self._trainer, self._trainer.dtype, adapters_only=adapters_only)
        if self._sender is not None:
            self._sender.send(tensors, version, adapters_only=adapters_only)
        else:
            for _ in tensors:
                pass
        return time.monotonic() - start

    def release_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def state_bytes(self) -> int:
        return state_bytes(self._trainer)

    def save(self, folder: str) -> None:
        save_checkpoint(Path(folder), self._trainer)

    def load(self, folder: str) -> None:
        load_checkpoint(Path(folder), self._trainer)

    def load_weights(self, folder: str) -> None:
        load_weights(Path(folder), self._trainer)

    def export(self, folder: str) -> None:
        export_folder(self._trainer, Path(folder), write=self.context.rank == 0)
