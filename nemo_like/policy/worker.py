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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy_schema import PolicyConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.worker import Worker, WorkerContext
from nemo_like.losses.protocol import Denominators, Loss
from nemo_like.observe.metrics import Metric, Metrics, Reduce, merge
from nemo_like.policy.inputs import empty_inputs, model_inputs
from nemo_like.policy.model import LogprobModel, load_model
from nemo_like.policy.optim import make_optimizer, make_scheduler
from nemo_like.policy.parallelize import shard_model
from nemo_like.policy.state import (
    export_folder,
    full_tensors,
    load_checkpoint,
    save_checkpoint,
    write_buckets,
)
from nemo_like.policy.train_step import train_step
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

    def micro_batches(self, device: torch.device) -> list[TensorBatch | None]:
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
        if self.context.rank > 0:
            world_size = self.context.world_size
            self._store = TCPStore(address, port, world_size, False, timeout)
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=self._store,
            rank=self.context.rank,
            world_size=self.context.world_size,
            timeout=timeout,
        )
        if self._device.type == "cuda":
            torch.cuda.set_device(0)
        self._mesh = init_device_mesh(
            self._device.type, (self.context.world_size,), mesh_dim_names=("dp",)
        )
        self._model = self._sharded_model()
        self._reference = None
        if setup.with_reference:
            self._reference = self._sharded_model().requires_grad_(False)
        self._optimizer = make_optimizer(self._model, setup.config.optimizer)
        self._scheduler = make_scheduler(self._optimizer, setup.config.scheduler, setup.max_steps)

    def logprobs(self, shard: Shard) -> tuple[ObjectRef, Metrics]:
        """Logprobs of the policy, and of the reference if there is one, for the shard's rows.

        Returns a reference to their columns; metrics compare them with the generation logprobs.
        """
        micro_batches = shard.micro_batches(self._device)
        columns: dict[str, list[torch.Tensor]] = {keys.POLICY_LOGPROBS: []}
        if self._reference is not None:
            columns[keys.REFERENCE_LOGPROBS] = []
        parts: list[Metrics] = []
        for micro_batch in micro_batches:
            policy, entropy = self._score(self._model, micro_batch, shard.temperature, True)
            if self._reference is not None:
                reference, _ = self._score(self._reference, micro_batch, shard.temperature, False)
                columns[keys.REFERENCE_LOGPROBS].append(reference)
            columns[keys.POLICY_LOGPROBS].append(policy)
            if micro_batch is not None:
                parts.append(mismatch_metrics(micro_batch, policy, entropy))
        # Without a backward pass the root module stays gathered; free it.
        for model in (self._model, self._reference):
            if isinstance(model, FSDPModule):
                model.reshard()
        tokens = {name: torch.cat(parts_).cpu() for name, parts_ in columns.items()}
        return ray.put(TensorBatch(lengths=shard.batch.lengths, tokens=tokens)), merge(parts)

    def train(self, work: TrainShard) -> Metrics:
        """One optimizer step over all ranks' shards; collective."""
        return train_step(
            self._model,
            self._optimizer,
            self._scheduler,
            work.shard.micro_batches(self._device),
            work.loss,
            work.denominators,
            temperature=work.shard.temperature,
            batching=self._config.batching,
            max_grad_norm=self._config.max_grad_norm,
            device=self._device,
        )

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
            full_tensors(self._model, self._setup.model_path, self._dtype),
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
        save_checkpoint(Path(folder), self._model, self._optimizer, self._scheduler)

    def load(self, folder: str) -> None:
        """Restore what ``save`` wrote; collective."""
        load_checkpoint(Path(folder), self._model, self._optimizer, self._scheduler)

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder; collective."""
        tensors = full_tensors(self._model, self._setup.model_path, self._dtype)
        export_folder(
            tensors, Path(self._setup.model_path), Path(folder), write=self.context.rank == 0
        )

    def _sharded_model(self) -> LogprobModel:
        model = load_model(self._setup.model_path, self._config)
        # Moves to the device unit by unit as it shards, so that no GPU ever holds the whole model.
        shard_model(model, self._mesh, self._dtype, self._config.activation_checkpointing)
        return model

    @torch.no_grad()
    def _score(
        self,
        model: LogprobModel,
        micro_batch: TensorBatch | None,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if micro_batch is None:
            model(empty_inputs(self._config.batching, self._device), temperature)
            return torch.zeros(0, device=self._device), None
        inputs = model_inputs(micro_batch, self._config.batching)
        return model(inputs, temperature, with_entropy)


def mismatch_metrics(
    batch: TensorBatch, policy_logprobs: torch.Tensor, entropy: torch.Tensor | None
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
    numbers = [gap.mean(), gap.max(), (log_ratio.exp() - 1 - log_ratio).mean(), policy.mean()]
    if entropy is not None:
        numbers.append(entropy.mean())
    mean_gap, max_gap, kl, logprob, *rest = torch.stack(numbers).tolist()
    metrics: Metrics = {
        "mismatch/mean_abs": Metric(mean_gap, weight=count),
        "mismatch/max_abs": Metric(max_gap, reduce=Reduce.max),
        "mismatch/kl": Metric(kl, weight=count),
        "policy/logprob": Metric(logprob, weight=count),
    }
    if rest:
        metrics["policy/entropy"] = Metric(rest[0], weight=count)
    return metrics
