"""The loss of supervised fine-tuning."""

from dataclasses import dataclass

from torch import Tensor

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.losses.protocol import Denominators, Needs, as_metrics, trained_tokens
from nemo_like.observe.metrics import Metrics


@dataclass(frozen=True)
class CrossEntropyLoss:
    """Mean of -log p(token) over the trained tokens of the *global* batch, in nats per token."""

    needs = Needs()

    def __call__(
        self, logprobs: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        at, _ = trained_tokens(batch)
        nll = -logprobs[at].float()
        loss = nll.sum() / denominators.tokens
        return loss, as_metrics(sums={"train/loss": loss}, means={"train/nll": nll})
