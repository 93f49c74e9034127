"""What runs that train on given texts share: rows by reference, their order, a held-out loss."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nemo_like.algorithms.session import Session
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch, prompt_columns
from nemo_like.config.policy import Output
from nemo_like.config.section import value_of
from nemo_like.config.texts import TextRunConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.mixtures import EpochLoader, MixtureLoader
from nemo_like.distributed.remote_batch import RemoteBatch, counts_of, trained
from nemo_like.errors import UserError
from nemo_like.losses.protocol import Loss
from nemo_like.models.resolve import context_length
from nemo_like.observe.metrics import Metric, Metrics, Reduce, merge
from nemo_like.planning.model_shape import role_of
from nemo_like.planning.offload import Neighbours
from nemo_like.policy.remote_model import RemoteModel

logger = logging.getLogger(__name__)

# A step fetches whole chunks of the rows that it needs; smaller ones are more objects to keep.
_ROWS_PER_CHUNK = 64
# Rows of one call to a model, in whole units: a whole data set at once may not fit a device.
_ROWS_PER_CALL = 1024


@dataclass(kw_only=True)
class Texts:
    """Live parts of a run on given texts. Rows that belong together (pairs) follow each other."""

    policy: RemoteModel
    train: RemoteBatch
    held_out: RemoteBatch | None
    loader: EpochLoader[int] | MixtureLoader[int]
    """Deals out units of rows: row i, or rows 2i and 2i + 1."""
    rows_per_unit: int
    max_steps: int
    session: Session
    batch: RemoteBatch | None = None
    """The batch of the step in progress."""
    loss: Loss | None = None

    def batches(self, loss: Loss) -> Iterator[RemoteBatch]:
        """The rows of each step; measures ``loss`` on held-out rows, logs and saves between."""
        run, self.loss = self.session.run, loss
        validator = None if self.held_out is None else self
        every = value_of(run.config, "validation.every_steps")
        for _ in run.steps(self.max_steps, {"policy": self.policy}, self.loader, validator, every):
            self.session.meter.pop()  # what start-up, a validation and a checkpoint came to
            rows = unit_rows(next(self.loader), self.rows_per_unit)
            self.batch = self.train.select(rows)
            self.batch.rows[keys.GROUP_IDS] = torch.arange(len(rows))  # two may have the same text
            yield self.batch

    def steps(
        self, loss: Loss, prepare: Callable[[RemoteBatch], RemoteBatch] | None = None
    ) -> None:
        """The loop of training; ``prepare`` adds a teacher's columns to each batch."""
        span = self.session.run.span
        for batch in self.batches(loss):
            if prepare is not None:
                with span("teacher"):
                    batch = prepare(batch)
            with span("train"):
                metrics = self.policy.train(batch, loss, rows_per_unit=self.rows_per_unit)
            self.log(metrics)

    def log(self, metrics: Metrics) -> None:
        """Keep the metrics of the step in progress; see ``Run.log``."""
        assert self.batch is not None
        num_tokens = int(self.batch.rows[keys.NUM_LOSS_TOKENS].sum())
        if isinstance(self.loader, MixtureLoader):
            metrics |= self.loader.pop_metrics()
        self.session.run.log(
            metrics
            | {
                "train/num_tokens": Metric(num_tokens, reduce=Reduce.sum),
                "train/epoch": Metric(self.loader.epochs_done),
            }
            | self.session.meter.pop()
        )

    def validate(self, step: int) -> Metrics:
        """The loss's own metrics on rows that never train; see ``Validator``."""
        assert self.held_out is not None
        assert self.loss is not None
        with self.session.run.span("validation"):
            unit, loss = self.rows_per_unit, self.loss
            measured = trained(self.held_out, unit)
            counts = counts_of(measured)
            found = merge(
                [
                    self.policy.evaluate(part, loss, counts, rows_per_unit=unit)
                    for part in _parts(measured)
                ]
            )
        return {f"validation/{name.rpartition('/')[2]}": metric for name, metric in found.items()}


def start_texts(
    config: TextRunConfig,
    session: Session,
    load: Callable[..., tuple[TensorBatch, TensorBatch | None]],
    *,
    output: Output = "logprobs",
    temperature: float = 1.0,
    neighbours: Neighbours | None = None,
) -> Texts:
    """Tokenize all rows by ``load`` (of ``conversations`` or ``preferences``), start the model.

    The model is not restored yet; see ``restore``. ``neighbours``: models that share its GPUs.
    Raises UserError.
    """
    passes, run = config.passes, session.run
    with run.start_phase("data"):
        train, held_out = read_texts(config, load, session.model_path)
        if config.policy.batching == "shared":
            for batch in (train, held_out):
                if batch is not None:
                    batch.rows |= prompt_columns(batch)
        loader = _loader(config, train)
        max_steps = passes.max_steps or passes.num_epochs * loader.steps_per_epoch
        for sentence in config.policy.schedule_rules("policy", config, max_steps):
            raise UserError(sentence)
        logger.info(
            "%d rows, %d tokens of %d train; %d steps of %d.",
            len(train),
            int(train.rows[keys.NUM_LOSS_TOKENS].sum()),
            train.num_tokens,
            max_steps,
            passes.units_per_step,
        )
    policy = RemoteModel(
        config.policy,
        config.cluster,
        session.policy_group,
        model_path=session.model_path,
        max_steps=max_steps,
        output=output,
        temperature=temperature,
        role=role_of(config),
    )
    policy.gpu_neighbours = neighbours or Neighbours()
    with run.start_phase("workers"):
        session.check_folders()
        policy.start()
    return Texts(
        policy=policy,
        train=RemoteBatch.put(train, _ROWS_PER_CHUNK),
        held_out=None if held_out is None else RemoteBatch.put(held_out, _ROWS_PER_CHUNK),
        loader=loader,
        rows_per_unit=passes.rows_per_unit,
        max_steps=max_steps,
        session=session,
    )


def read_texts(
    config: TextRunConfig,
    load: Callable[..., tuple[TensorBatch, TensorBatch | None]],
    model_path: str,
) -> tuple[TensorBatch, TensorBatch | None]:
    """Training and held-out rows, tokenized by ``load``; raises UserError."""
    return load(
        config.texts,
        ChatTokenizer(model_path, config.texts.template_switches),
        micro_batch_tokens=config.policy.micro_batch_tokens,
        context=context_length(model_path),
        seed=config.run.seed,
        with_validation=config.validation.every_steps > 0,
    )


def _loader(config: TextRunConfig, train: TensorBatch) -> EpochLoader[int] | MixtureLoader[int]:
    passes, data = config.passes, config.texts
    units = range(len(train) // passes.rows_per_unit)
    if not data.mixes:
        return EpochLoader(
            units,
            batch_size=passes.units_per_step,
            num_epochs=passes.num_epochs if passes.max_steps is None else None,
            seed=config.run.seed,
            shuffle=data.shuffle,
            fingerprint=_fingerprint(train),
        )
    part_of = train.rows.pop(keys.PART)[:: passes.rows_per_unit].tolist()
    names = [part.name for part in data.train_parts]
    return MixtureLoader(
        {name: [unit for unit in units if names[part_of[unit]] == name] for name in data.weights},
        data.weights,
        fingerprint=lambda units: _fingerprint(
            train.select(unit_rows(list(units), passes.rows_per_unit))
        ),
        batch_size=passes.units_per_step,
        seed=config.run.seed,
        shuffle=data.shuffle,
    )


def restore(config: TextRunConfig, texts: Texts) -> None:
    """``Run.restore``; UserError if the remaining rows do not match the remaining steps."""
    run = texts.session.run
    run.restore_position(texts.loader)
    run.restore({"policy": texts.policy})
    done, left = run.first_step, texts.loader.steps_left
    if left is None or done + left == texts.max_steps or (left == 0 and done > texts.max_steps):
        return
    raise UserError(
        f"{config.section}.num_epochs={config.passes.num_epochs} makes {texts.max_steps} steps, "
        f"and after step {done} the rows that are left make {left}: rows, run.seed or "
        f"{config.section}.{config.passes.size_key} are not those that the run began with; restore "
        f"them, or set {config.section}.max_steps and leave num_epochs out."
    )


def unit_rows(units: list[int], rows_per_unit: int) -> torch.Tensor:
    """Row numbers of units, in order.

    >>> unit_rows([4, 0], 2).tolist()
    [8, 9, 0, 1]
    """
    first = torch.tensor(units, dtype=torch.int64)[:, None] * rows_per_unit
    return (first + torch.arange(rows_per_unit)).flatten()


def in_parts(batch: RemoteBatch, add: Callable[[RemoteBatch], None]) -> RemoteBatch:
    """``batch`` with the columns that ``add`` gives to each of its parts, call by call."""
    for part in (parts := _parts(batch)):
        add(part)
    return RemoteBatch.concatenate(parts)


def _parts(batch: RemoteBatch) -> list[RemoteBatch]:
    """Rows of one call each; those of a unit stay in one part."""
    return [
        batch.select(range(first, min(first + _ROWS_PER_CALL, len(batch))))
        for first in range(0, len(batch), _ROWS_PER_CALL)
    ]


def _fingerprint(batch: TensorBatch) -> str:
    """Short hash of all tokens: identifies the rows that a data position belongs to."""
    digest = hashlib.blake2b(batch.lengths.numpy().tobytes(), digest_size=8)
    for column in batch.tokens.values():
        digest.update(column.numpy().tobytes())
    return digest.hexdigest()
