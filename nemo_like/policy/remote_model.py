"""The driver's handle of a model spread over ranks: sends references out, gets numbers back."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from ray import ObjectRef
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.micro_batches import MicroBatchPlan, plan_micro_batches
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.generation import Transport
from nemo_like.config.losses import KLEstimator
from nemo_like.config.policy import Output, PolicyConfig
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.remote_batch import RemoteBatch, counts_of, prompts_of, trained
from nemo_like.distributed.waiting import IMPORTING
from nemo_like.errors import UserError
from nemo_like.losses.protocol import Denominators, Loss
from nemo_like.observe.metrics import Metrics, merge
from nemo_like.planning.layout import bins_for_pipeline
from nemo_like.planning.model_shape import Role, attention_tokens, read_model_shape
from nemo_like.planning.offload import MemoryNeeds, Neighbours, memory_needs
from nemo_like.policy.optim import log_placement
from nemo_like.policy.state.files import gb, num_bytes, writing_folder, written
from nemo_like.policy.trainer_setup import TrainerSetup
from nemo_like.policy.worker import PolicyWorker, SenderAddress, Shard

if TYPE_CHECKING:
    from nemo_like.distributed.worker_group import Pending, WorkerGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LEARNER = Role()


class RemoteModel:
    """A model on its ranks: batches go out by reference, metrics come back."""

    def __init__(
        self,
        config: PolicyConfig,
        cluster_config: ClusterConfig,
        group: "WorkerGroup[PolicyWorker]",
        *,
        model_path: str,
        max_steps: int,
        temperature: float = 1.0,
        output: Output = "logprobs",
        role: Role = _LEARNER,
    ) -> None:
        """``temperature``: of logprobs."""
        self.config = config
        self.temperature = temperature
        self.weight_version = 0
        self.gpu_neighbours = Neighbours()
        """What else takes memory of its GPUs; known before ``start``."""
        self._start_timeout_s = cluster_config.start_timeout_s
        self._role = replace(role, scalar_head=output != "logprobs")
        self._attention_tokens = attention_tokens(Path(model_path))
        self._save_timeout_s = 4 * cluster_config.call_timeout_s
        self.group = group
        self._setup = TrainerSetup(
            config=config,
            model_path=model_path,
            max_steps=max_steps,
            with_reference=role.with_reference,
            output=output,
            role=group.role,
            trains=role.trains,
            log_dir=group.contexts[0].log_dir,
            num_threads=max(1, int(cluster_config.cpus_per_worker)),
            # Ranks wait for each other in a save, too; it is the driver's limit that counts.
            timeout_s=self._save_timeout_s,
            refit_timeout_s=cluster_config.call_timeout_s,
        )

    def start(self) -> None:

        def waiting(doing: str) -> "WorkerGroup[PolicyWorker]":
            return self.group.waiting(self._start_timeout_s, "start_timeout_s", doing)

        path, contexts = self._setup.model_path, self.group.contexts
        setup = replace(
            self._setup,
            memory=self._memory(),
            ranks_per_node=max(Counter(each.node_id for each in contexts).values()),
        )
        port = waiting(IMPORTING).call_rank(0, PolicyWorker.open_store)
        started, *_ = waiting(
            f"it loads a model, whose files have {gb(num_bytes(Path(path)))}, and checks a "
            "small one of its kind; from a shared disk that may take minutes"
        ).call(PolicyWorker.start, setup, contexts[0].meeting_address, port)
        if self._setup.trains:
            logger.info("%s: %s parameters train.", path, f"{started.num_trained:,}")
            log_placement(started.placement)
        if unused := started.unused:
            logger.warning(
                "%s: %d tensors of its files are not used, as its config.json has no place for "
                "them: %s; see that the two belong together.",
                path,
                len(unused),
                ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else ""),
            )
        waiting("it compiles the model, which takes a minute or more the first time").call(
            PolicyWorker.warm_up, self.temperature
        )

    def with_this_model(self, neighbours: Neighbours) -> Neighbours:
        """``neighbours``, and what this model takes of its GPUs while they work."""
        path, num_ranks = self._setup.model_path, self.group.world_size
        return neighbours.and_model(path, self.config, num_ranks, self._role)

    def _memory(self) -> MemoryNeeds | None:
        """None without GPUs or training, and for a model that the formulas do not cover."""
        uses_gpus = bool(self.group.contexts[0].gpu_ids)
        if not (uses_gpus and self._setup.trains and self.gpu_neighbours.is_known):
            return None
        try:
            shape = read_model_shape(Path(self._setup.model_path))
            return memory_needs(
                shape, self.config, self.group.world_size, self._role, self.gpu_neighbours
            )
        except UserError:
            return None

    def logprobs(
        self, batch: RemoteBatch, *, with_policy: bool = True, kl: KLEstimator | None = None
    ) -> Metrics:
        """Add column ``policy_logprobs``, and ``reference_logprobs`` if there is a reference.

        Also row columns ``mean_mismatches`` and, summed over a row's tokens, ``reference_kl``.
        """
        plan = self._plan(batch)
        results = self.group.scatter(
            PolicyWorker.logprobs, self._shards(batch, plan), with_policy, kl, last="pp"
        )
        _add_columns(batch, plan, [ref for ref, _, _ in results])
        for name in results[0][2]:
            column = batch.rows[name] = torch.zeros(len(batch), dtype=torch.float64)
            for rank, (_, _, of_rows) in enumerate(results):
                column[plan.rows(rank)] = of_rows[name]
        return merge([metrics for _, metrics, _ in results])

    def score(self, batch: RemoteBatch, column: str) -> None:
        """Add token column ``column``: the model's ``Output`` for tokens that train, or values of
        all."""
        plan = self._plan(batch)
        shards = self._shards(batch, plan)
        _add_columns(batch, plan, self.group.scatter(PolicyWorker.score, shards, column, last="pp"))

    def top_logprobs(self, batch: RemoteBatch, k: int, vocabulary: int | None = None) -> None:
        """Add token columns ``teacher_ids`` and ``teacher_logprobs`` of the ``k`` likeliest tokens.

        In falling order; if the vocabulary has no more than ``k``, all are, in order of id. Zeros
        where no token trains. ``vocabulary``: ids from here on are left out.
        """
        plan = self._plan(batch)
        shards, method = self._shards(batch, plan), PolicyWorker.top_logprobs
        _add_columns(batch, plan, self.group.scatter(method, shards, k, vocabulary, last="pp"))

    def derive(
        self, batch: RemoteBatch, make: Callable[[TensorBatch], tuple[dict[str, Tensor], T]]
    ) -> list[T]:
        """Add the token columns that ``make`` gives for the rows of each data-parallel rank.

        Returns the other results of ``make``. It is sent to ranks: a function of a module, or a
        dataclass that can be called.
        """
        plan = self._plan(batch)
        shards = [batch.select(plan.rows(rank)) for rank in range(len(plan.bins))]
        results: list[Any] = self.group.scatter(PolicyWorker.derive, shards, make)
        _add_columns(batch, plan, [made[0] if made else None for made in results])
        return [made[1] for made in results if made]

    def train(
        self,
        batch: RemoteBatch,
        loss: Loss,
        *,
        rows_per_unit: int = 1,
        check: Callable[[Metrics], None] | None = None,
    ) -> Metrics:
        """One optimizer step on all rows that train, by the gradient of one global mean.

        ``rows_per_unit``: consecutive rows that train together or not at all (2: preference pairs).
        ``check`` runs on every rank before the optimizer step; see ``Trainer.train``. Sampled
        completions without policy logprobs must be those of the current weights or, in runs with
        lag, see them for the first time.
        """
        batch = trained(batch, rows_per_unit)
        if not len(batch):
            return self.finish(0.0)
        shards, counts = self._shards(batch, self._plan(batch, rows_per_unit)), counts_of(batch)
        on_policy = self._is_on_policy(batch)
        results = self.group.scatter(
            PolicyWorker.train, shards, loss, counts, on_policy, check, last="pp"
        )
        self.weight_version += 1
        return merge(results)

    def add(self, batch: RemoteBatch, loss: Loss, divided_by: float) -> Denominators:
        """Compute gradients of some of a step's rows, and return their counts; see ``finish``.

        ``divided_by`` divides them in place of the step's denominator, which is not known yet.
        """
        batch = trained(batch)
        if len(batch):
            shards, on_policy = self._shards(batch, self._plan(batch)), self._is_on_policy(batch)
            instead = Denominators(tokens=divided_by, sequences=divided_by)
            self.group.scatter(PolicyWorker.add, shards, loss, instead, on_policy, last="pp")
        return counts_of(batch)

    def finish(self, divide_by: float, check: Callable[[Metrics], None] | None = None) -> Metrics:
        """One optimizer step on everything added.

        ``divide_by``: the loss's denominator over ``divided_by`` of ``add``.
        """
        if not divide_by:
            logger.warning("No row of this step trains; its optimizer step is skipped.")
            return {}
        results = self.group.call(PolicyWorker.finish, divide_by, check)
        self.weight_version += 1
        return merge([results[rank] for rank in self.group.layout.output_ranks("dp", "pp")])

    def evaluate(
        self, batch: RemoteBatch, loss: Loss, counts: Denominators, *, rows_per_unit: int = 1
    ) -> Metrics:
        """Metrics of ``loss`` on rows that would train; ``counts``: of all that are measured."""
        shards = self._shards(batch, self._plan(batch, rows_per_unit))
        return merge(self.group.scatter(PolicyWorker.evaluate, shards, loss, counts, last="pp"))

    def submit_senders(
        self, num_receivers: Sequence[int], transport: Transport, bucket_bytes: int
    ) -> "Pending[SenderAddress]":
        """Start listening; each rank returns where its ``num_receivers`` engine ranks find it."""
        method = PolicyWorker.open_sender
        return self.group.submit_each(method, num_receivers, transport, bucket_bytes)

    def submit_accept(self) -> "Pending[None]":
        return self.group.submit(PolicyWorker.accept_receivers)

    def submit_weights(self, *, adapters_only: bool) -> "Pending[float]":
        """Start sending weights to the engines; each rank returns the seconds it took."""
        return self.group.submit(PolicyWorker.send_weights, self.weight_version, adapters_only)

    def release_memory(self) -> None:
        self.group.call(PolicyWorker.release_memory)

    def save(self, folder: str) -> None:
        layout = self.group.layout
        stages = layout.output_ranks("pp") if "pp" in layout.sizes else (0,)
        expected = sum(self.group.call_rank(rank, PolicyWorker.state_bytes) for rank in stages)
        self._saving(written(Path(folder), expected)).call(PolicyWorker.save, folder)

    def load(self, folder: str, weight_version: int, *, weights_only: bool = False) -> None:
        method = PolicyWorker.load_weights if weights_only else PolicyWorker.load
        reading = self._saving(lambda: f"it reads {gb(num_bytes(Path(folder)))} of {folder}")
        reading.call(method, folder)
        self.weight_version = weight_version

    def export(self, folder: str) -> None:
        expected = num_bytes(Path(self._setup.model_path))
        aside = writing_folder(Path(folder))
        self._saving(written(aside, expected)).call(PolicyWorker.export, folder)

    def _saving(self, doing: Callable[[], str]) -> "WorkerGroup[PolicyWorker]":
        return self.group.waiting(self._save_timeout_s, "call_timeout_s", doing)

    def _is_on_policy(self, batch: RemoteBatch) -> bool:
        """Whether this step's own forward pass gives the policy's logprobs of what it sampled."""
        versions = batch.rows.get(keys.WEIGHT_VERSIONS)
        measured = versions is None or keys.MEAN_MISMATCHES in batch.rows
        if measured or self._setup.output != "logprobs":
            return False
        older = versions != self.weight_version
        assert keys.FRESH_FROM in batch.rows or not older.any(), "these rows need policy logprobs"
        return True

    def _plan(self, batch: RemoteBatch, rows_per_unit: int = 1) -> MicroBatchPlan:
        return plan_micro_batches(
            batch.lengths.tolist(),
            rows_per_unit=rows_per_unit,
            num_ranks=self.group.layout.sizes["dp"],
            max_tokens=self.config.micro_batch_tokens,
            max_rows=self.config.micro_batch_size,
            padded=self.config.batching == "padded",
            attention_tokens=self._attention_tokens,
            prompts=prompts_of(batch) if self.config.batching == "shared" else None,
            **bins_for_pipeline(self.config.parallel),
        )

    def _shards(self, batch: RemoteBatch, plan: MicroBatchPlan) -> list[Shard]:
        return [
            Shard(
                batch=batch.select(plan.rows(rank)),
                bin_sizes=tuple(len(one) for one in bins),
                temperature=self.temperature,
            )
            for rank, bins in enumerate(plan.bins)
        ]


def _add_columns(
    batch: RemoteBatch, plan: MicroBatchPlan, refs: Sequence[ObjectRef | None]
) -> None:
    """Add the columns that each data-parallel rank with rows has put into the object store."""
    parts = [(ref, rows) for rank, ref in enumerate(refs) if (rows := plan.rows(rank))]
    found = [ref for ref, _ in parts if ref is not None]
    assert len(found) == len(parts), "the mesh's output ranks must be the layout's"
    batch.add_columns(found, [rows for _, rows in parts])
