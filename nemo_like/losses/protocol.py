"""What a loss is: a function of logprobs and batch that says what it needs; means over tokens.

Legend: ``B`` rows and ``N`` tokens of the micro-batch, ``M`` trained tokens among them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import Normalization
from nemo_like.observe.metrics import Metric, Metrics, Reduce

MAX_EXPONENT = 20.0
"""Largest exponent in losses. Such a ratio has long left any trust region; exp(20) = 4.9e8 and its
gradient are finite in float32 and bfloat16, so 0 * inf never appears."""


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Counts over the global batch, known before the first backward pass: micro-batches add up."""

    tokens: float
    """Trained tokens of rows that train."""
    sequences: float
    """Rows that train and have at least one trained token."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a loss gets besides the logprob of each token."""

    entropy: bool = False
    """Token column ``keys.ENTROPIES``, with gradient."""
    ids_column: str | None = None
    """A token column of vocabulary ids [N, K]: logprobs [N, K] of these take the place of each
    token's own."""
    vocabulary: int | None = None
    """With ``ids_column``: they are under a softmax over lower ids alone. None: over all."""


class Loss(Protocol):
    """Called once per micro-batch; the sum over micro-batches and ranks is the loss of the step.

    It travels to the workers: an instance of a dataclass, or of another class that can be pickled.
    """

    @property
    def needs(self) -> Needs: ...

    def __call__(
        self, logprobs: Tensor, /, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """``logprobs`` (of a value model: values) float32 [N] with gradient -> scalar loss and
        metrics of this micro-batch."""
        ...


def apply_loss(
    loss: Loss, output: Tensor, batch: TensorBatch, denominators: Denominators
) -> tuple[Tensor, Metrics]:
    """``loss`` of one micro-batch, given what it needs of a model's output.

    ``output`` [2 or 2 + K, N]: logprobs, entropies, and the logprobs of K ids.
    """
    if loss.needs.ids_column is not None:
        return loss(output[2:].t(), batch, denominators)
    if loss.needs.entropy:
        batch = replace(batch, tokens=batch.tokens | {keys.ENTROPIES: output[1]})
    return loss(output[0], batch, denominators)


def trained_tokens(batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """Positions int64 [M] of the tokens that train, and the row int64 [M] of each.

    A loss that takes ``column[positions]`` first can't see what stands elsewhere, even NaN.
    """
    row_of_token = batch.row_of_token
    trained = batch.tokens[keys.LOSS_MASK] & batch.rows[keys.SAMPLE_MASK][row_of_token]
    positions = trained.nonzero(as_tuple=True)[0]
    return positions, row_of_token[positions]


def row_sums(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Sum of ``values`` [M] over each row -> [B]; 0 for a row without any."""
    return values.new_zeros(num_rows).index_add(0, row, values)


def row_means(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Mean of ``values`` [M] over each row -> [B]; 0 for a row without any."""
    count = torch.bincount(row, minlength=num_rows).clamp(min=1)
    return row_sums(values, row, num_rows) / count


@dataclass(frozen=True)
class GlobalMean:
    """This micro-batch's share of a mean over the whole global batch; shares add up to it.

    Rows of 1 and 3 tokens, of which the first alone is not 0:

    >>> row, whole = torch.tensor([0, 1, 1, 1]), Denominators(tokens=4.0, sequences=2.0)
    >>> x = torch.tensor([1.0, 0.0, 0.0, 0.0])
    >>> kinds = ("token", "sequence", "constant")
    >>> [GlobalMean(kind, row, 2, whole, 8)(x).item() for kind in kinds]
    [0.25, 0.5, 0.0625]
    """

    normalization: Normalization
    row: Tensor
    num_rows: int
    denominators: Denominators
    constant_tokens: int | None = None
    """What ``"constant"`` divides each sequence by (Dr. GRPO, arXiv:2503.20783)."""

    def __call__(self, per_token: Tensor) -> Tensor:
        """``per_token`` [M] -> scalar."""
        match self.normalization:
            case "token":
                return per_token.sum() / self.denominators.tokens
            case "sequence":
                count = torch.bincount(self.row, minlength=self.num_rows)
                return (per_token / count[self.row]).sum() / self.denominators.sequences
            case "constant":
                assert self.constant_tokens is not None
                return per_token.sum() / (self.denominators.sequences * self.constant_tokens)


def as_metrics(
    *,
    sums: Mapping[str, Tensor],
    means: Mapping[str, Tensor],
    maxima: Mapping[str, Tensor] | None = None,
) -> Metrics:
    """One transfer from the device for all numbers of a micro-batch.

    ``sums`` are shares of a global mean: parts add up. ``means`` and ``maxima`` hold one entry for
    each thing measured (token, pair), by whose number a mean weighs; nothing measured is left out.
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
