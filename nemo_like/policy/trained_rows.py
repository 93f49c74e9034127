"""Which rows of a batch train, and how many they are."""

from nemo_like.batch import keys
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.losses.protocol import Denominators


def trained(batch: RemoteBatch, rows_per_unit: int = 1) -> RemoteBatch:
    """The rows that train, in units of which all rows do."""
    trains = batch.rows[keys.SAMPLE_MASK] & (batch.rows[keys.NUM_LOSS_TOKENS] > 0)
    together = trains.view(-1, rows_per_unit).all(1).repeat_interleave(rows_per_unit)
    return batch.select(together.nonzero(as_tuple=True)[0])


def counts_of(batch: RemoteBatch) -> Denominators:
    """What means over these rows divide by."""
    tokens = float(batch.rows[keys.NUM_LOSS_TOKENS].sum())
    return Denominators(tokens=tokens, sequences=float(len(batch)))
