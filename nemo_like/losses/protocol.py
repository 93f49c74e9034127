"""What a loss is: a function of logprobs and batch that says what it needs of them."""

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
    def needs(self) -> Needs:
        """What the loss needs."""
        ...

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
