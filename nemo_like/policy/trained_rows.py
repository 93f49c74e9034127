"""Select the rows of a batch that train, count them, and add columns computed by ranks."""

from collections.abc import Sequence

from ray import ObjectRef

from nemo_like.batch import keys
from nemo_like.batch.micro_batches import MicroBatchPlan
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.losses.protocol import Denominators


def trained(batch: RemoteBatch, rows_per_unit: int = 1) -> RemoteBatch:
    """Rows of the units in which all rows train."""
    trains = batch.rows[keys.SAMPLE_MASK] & (batch.rows[keys.NUM_LOSS_TOKENS] > 0)
    together = trains.view(-1, rows_per_unit).all(1).repeat_interleave(rows_per_unit)
    return batch.select(together.nonzero(as_tuple=True)[0])


def counts_of(batch: RemoteBatch) -> Denominators:
    """Denominators of means over these rows."""
    tokens = float(batch.rows[keys.NUM_LOSS_TOKENS].sum())
    return Denominators(tokens=tokens, sequences=float(len(batch)))


def add_columns(batch: RemoteBatch, plan: MicroBatchPlan, refs: Sequence[ObjectRef | None]) -> None:
    """Add the columns that each data-parallel rank with rows has put into the object store."""
    parts = [(ref, rows) for rank, ref in enumerate(refs) if (rows := plan.rows(rank))]
    found = [ref for ref, _ in parts if ref is not None]
    assert len(found) == len(parts), "the mesh's output ranks must be the layout's"
    batch.add_columns(found, [rows for _, rows in parts])
