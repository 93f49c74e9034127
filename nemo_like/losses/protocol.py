"""What a loss is: a function of logprobs and batch that is told what to divide by."""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.observe.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Counts over the whole global batch: all micro-batches of all data-parallel ranks.

    They are known before the first backward pass, so micro-batches simply add up.
    """

    tokens: float
    """Trained tokens of rows that train."""
    sequences: float
    """Rows that train and have at least one trained token."""


class Loss(Protocol):
    """Called once per micro-batch; the sum over micro-batches and ranks is the loss of the step.

    A loss with an attribute ``needs_entropy`` that is True finds the token column
    ``keys.ENTROPIES`` in its batch. One with an attribute ``ids_column``, the name of a token
    column of vocabulary ids [N, K], is given logprobs [N, K] of these in place of each token's own;
    if it has an attribute ``vocabulary``, a number, they are under a softmax over lower ids alone.
    """

    def __call__(
        self, logprobs: Tensor, /, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """``logprobs`` (of a value model: values) float32 [N] with gradient -> scalar loss and
        metrics of this micro-batch."""
        ...


def needs_entropy(loss: Loss) -> bool:
    """Whether ``loss`` is to be given entropies with gradient."""
    return getattr(loss, "needs_entropy", False)


def ids_column(loss: Loss) -> str | None:
    """The token column of ids whose logprobs ``loss`` is to be given; None: those of each token."""
    return getattr(loss, "ids_column", None)


def vocabulary(loss: Loss) -> int | None:
    """Where the ids end that ``loss`` is about; None: with the model's vocabulary."""
    return getattr(loss, "vocabulary", None)


def apply_loss(
    loss: Loss, output: Tensor, batch: TensorBatch, denominators: Denominators
) -> tuple[Tensor, Metrics]:
    """``loss`` of one micro-batch, given what it needs of a model's output.

    ``output`` [2 or 2 + K, N]: logprobs, entropies, and the logprobs of K ids.
    """
    if ids_column(loss):
        return loss(output[2:].t(), batch, denominators)
    if needs_entropy(loss):
        batch = replace(batch, tokens=batch.tokens | {keys.ENTROPIES: output[1]})
    return loss(output[0], batch, denominators)
