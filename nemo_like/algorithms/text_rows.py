"""What runs that train on given texts share: rows by reference, their order, a held-out loss."""

import hashlib
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from nemo_like.algorithms.run import Run
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy import Output
from nemo_like.config.texts import TextRunConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.loader import EpochLoader
from nemo_like.distributed.connection import connect
from nemo_like.distributed.driver_meter import DriverMeter
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.virtual_cluster import VirtualCluster, reserve
from nemo_like.errors import UserError
from nemo_like.losses.protocol import Loss
from nemo_like.models.context import context_length
from nemo_like.observe.metrics import Metric, Metrics, Reduce
from nemo_like.planning.resources import plan_run
from nemo_like.policy.policy import Policy
from nemo_like.policy.process import policy_group

logger = logging.getLogger(__name__)

# A step fetches whole chunks of the rows that it needs; smaller ones are more objects to keep.
_ROWS_PER_CHUNK = 64
# Rows that a model is asked about in one call: all of a data set at once may not fit a device.
_ROWS_PER_CALL = 1024


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """What is known before Ray starts. Rows that belong together (pairs) follow each other."""

    train: TensorBatch
    held_out: TensorBatch | None
    loader: EpochLoader
    """Deals out units of rows: row i, or rows 2i and 2i + 1."""
    rows_per_unit: int
    max_steps: int


@dataclass(frozen=True, kw_only=True)
class TextSetup:
    """Live parts of a run."""

    policy: Policy
    train: RemoteBatch
    held_out: RemoteBatch | None
    rows: TextRows
    meter: DriverMeter
    cluster: VirtualCluster

    def next_batch(self) -> RemoteBatch:
        """The rows of the next step."""
        return self.train.select(unit_rows(next(self.rows.loader), self.rows.rows_per_unit))

    def metrics(self, batch: RemoteBatch) -> Metrics:
        """What the driver knows of a step beside what its workers reported."""
        num_tokens = int(batch.rows[keys.NUM_LOSS_TOKENS].sum())
        return {
            "train/num_tokens": Metric(num_tokens, reduce=Reduce.sum),
            "train/epoch": Metric(self.rows.loader.epochs_done),
            **self.meter.pop(),
        }


class HeldOutLoss:
    """The loss's own metrics on rows that never train, as ``validation/...``."""

    def __init__(self, setup: TextSetup, loss: Loss, run: Run) -> None:
        self._setup, self._loss, self._run = setup, loss, run

    def validate(self, step: int) -> Metrics:
        """See ``Validator``."""
        setup = self._setup
        assert setup.held_out is not None
        with self._run.span("validation"):
            found = setup.policy.evaluate(
                setup.held_out, self._loss, rows_per_unit=setup.rows.rows_per_unit
            )
        return {f"validation/{name.rpartition('/')[2]}": metric for name, metric in found.items()}


def prepare(
    config: TextRunConfig,
    load: Callable[..., tuple[TensorBatch, TensorBatch | None]],
    model_path: str,
) -> TextRows:
    """Read and tokenize all rows by ``load`` (of ``conversations`` or ``preferences``).

    Raises UserError.
    """
    passes = config.passes
    train, held_out = load(
        config.texts,
        ChatTokenizer(model_path, config.texts.template_switches),
        micro_batch_tokens=config.policy.micro_batch_tokens,
        context=context_length(model_path),
        seed=config.run.seed,
        with_validation=config.validation.every_steps > 0,
    )
    loader = EpochLoader(
        range(len(train) // passes.rows_per_unit),
        batch_size=passes.units_per_step,
        num_epochs=passes.num_epochs if passes.max_steps is None else None,
        seed=config.run.seed,
        shuffle=config.texts.shuffle,
        drop_last=passes.drop_last,
        fingerprint=_fingerprint(train),
    )
    max_steps = passes.max_steps or passes.num_epochs * loader.steps_per_epoch
    for sentence in config.policy.schedule_rules("policy", config, max_steps):
        raise UserError(sentence)
    tokens = int(train.rows[keys.NUM_LOSS_TOKENS].sum())
    logger.info(
        "%d rows, %d tokens of %d train; %d steps of %d.",
        len(train),
        tokens,
        train.num_tokens,
        max_steps,
        passes.units_per_step,
    )
    return TextRows(
        train=train,
        held_out=held_out,
        loader=loader,
        rows_per_unit=passes.rows_per_unit,
        max_steps=max_steps,
    )


def start(
    config: TextRunConfig,
    run: Run,
    rows: TextRows,
    stack: ExitStack,
    *,
    model_path: str,
    output: Output = "logprobs",
    temperature: float = 1.0,
    with_reference: bool = False,
) -> TextSetup:
    """Reserve the cluster, bring up the model, put the rows into the store; ``stack`` ends them."""
    with run.start_phase("ray"):
        stack.callback(connect())
        plan = plan_run(config)
        cluster = stack.enter_context(reserve(plan, config.cluster))
    meter = DriverMeter()
    group = policy_group(config.policy, config.cluster, cluster, log_dir=run.log_dir, meter=meter)
    policy = Policy(
        config.policy,
        config.cluster,
        group,
        model_path=model_path,
        max_steps=rows.max_steps,
        output=output,
        temperature=temperature,
        with_reference=with_reference,
    )
    stack.callback(policy.shutdown)
    with run.start_phase("workers"):
        policy.start()
    held_out = rows.held_out
    return TextSetup(
        policy=policy,
        train=RemoteBatch.put(rows.train, _ROWS_PER_CHUNK),
        held_out=None if held_out is None else RemoteBatch.put(held_out, _ROWS_PER_CHUNK),
        rows=rows,
        meter=meter,
        cluster=cluster,
    )


def restore(config: TextRunConfig, run: Run, setup: TextSetup) -> None:
    """``Run.restore``; UserError if the rows that are left are not those of the steps left."""
    rows = setup.rows
    run.restore({"policy": setup.policy}, rows.loader)
    done, left = run.first_step, rows.loader.steps_left
    if left is None or done + left == rows.max_steps or (left == 0 and done > rows.max_steps):
        return
    raise UserError(
        f"{config.section}.num_epochs={config.passes.num_epochs} makes {rows.max_steps} steps, and "
        f"after step {done} the rows that are left make {left}: rows, run.seed or "
        f"{config.section}.{config.passes.size_key} are not those that the run began with; restore "
        f"them, or set {config.section}.max_steps."
    )


def unit_rows(units: list[int], rows_per_unit: int) -> torch.Tensor:
    """Row numbers of units, in order.

    >>> unit_rows([4, 0], 2).tolist()
    [8, 9, 0, 1]
    """
    first = torch.tensor(units, dtype=torch.int64)[:, None] * rows_per_unit
    return (first + torch.arange(rows_per_unit)).flatten()


def in_parts(batch: RemoteBatch, add: Callable[[RemoteBatch], None]) -> RemoteBatch:
    """``batch`` with the columns that ``add`` gives to each of its parts, one call after another.

    Rows of a unit stay in one part.
    """
    parts = [
        batch.select(range(first, min(first + _ROWS_PER_CALL, len(batch))))
        for first in range(0, len(batch), _ROWS_PER_CALL)
    ]
    for part in parts:
        add(part)
    return RemoteBatch.concatenate(parts)


def _fingerprint(batch: TensorBatch) -> str:
    """Short hash of all tokens: tells whether a data position belongs to these rows."""
    digest = hashlib.blake2b(batch.lengths.numpy().tobytes(), digest_size=8)
    for column in batch.tokens.values():
        digest.update(column.numpy().tobytes())
    return digest.hexdigest()
