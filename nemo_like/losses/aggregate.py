"""What all losses share: which tokens count, and how a micro-batch's numbers become metrics.

Legend: ``B`` rows and ``N`` tokens of the micro-batch, ``M`` trained tokens among them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.observe.metrics import Metric, Metrics, Reduce


def trained_tokens(batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """Positions int64 [M] of the tokens that train, and the row int64 [M] of each.

    A loss that takes ``column[positions]`` first of all can't see what stands elsewhere, even NaN.
    """
    row_of_token = batch.row_of_token
    trained = batch.tokens[keys.LOSS_MASK] & batch.rows[keys.SAMPLE_MASK][row_of_token]
    positions = trained.nonzero(as_tuple=True)[0]
    return positions, row_of_token[positions]


def as_metrics(
    *,
    sums: Mapping[str, Tensor],
    means: Mapping[str, Tensor],
    maxima: Mapping[str, Tensor] | None = None,
) -> Metrics:
    """One transfer from the device for all numbers of a micro-batch.

    ``sums`` are scalars that a global denominator has already divided, so that parts add up.
    ``means`` and ``maxima`` hold one entry for each thing measured (token, pair); a mean weighs by
    how many these are. What was measured over nothing is left out.
    """
    means = {name: measured for name, measured in means.items() if len(measured)}
    maxima = {name: measured for name, measured in (maxima or {}).items() if len(measured)}
    scalars = {
        **sums,
        **{name: measured.float().mean() for name, measured in means.items()},
        **{name: measured.amax() for name, measured in maxima.items()},
    }
    numbers = torch.stack([scalar.detach().float() for scalar in scalars.values()]).tolist()
    metrics: Metrics = {}
    for name, number in zip(scalars, numbers, strict=True):
        if name in sums:
            metrics[name] = Metric(number, reduce=Reduce.sum)
        elif name in maxima:
            metrics[name] = Metric(number, reduce=Reduce.max)
        else:
            metrics[name] = Metric(number, weight=len(means[name]))
    return metrics
