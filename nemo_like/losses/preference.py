"""Losses over pairs of a chosen and a rejected completion of one prompt.

Legend: ``B`` rows of the micro-batch, ``P`` pairs among them that train.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.losses.aggregate import as_metrics, trained_tokens
from nemo_like.losses.protocol import Denominators
from nemo_like.observe.metrics import Metrics


def sigmoid_loss(margin: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta * margin), any shape: DPO, Eq. 7 of arXiv:2305.18290.

    ``margin`` = log ratio of the chosen completion - that of the rejected one.

    >>> [round(v, 6) for v in sigmoid_loss(torch.tensor([2.0, 0.0]), beta=0.1).tolist()]
    [0.598139, 0.693147]
    """
    return -logsigmoid(beta * margin)


@dataclass(frozen=True)
class PreferenceLoss:
    """Mean of ``sigmoid_loss`` over the pairs of the *global* batch.

    Row 2i of a micro-batch is the chosen completion of pair i, row 2i + 1 the rejected one. Both
    train or neither does, so the global number of pairs is half of ``denominators.sequences``. A
    row's log ratio is the sum over its trained tokens of current - reference logprobs; beta times
    that is the reward that the policy implies (section 4 of arXiv:2305.18290).
    """

    beta: float
    """How closely the policy is held to the reference, > 0: the weight of the KL term of the
    objective that the loss solves."""

    def __call__(
        self, logprobs: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; see ``Loss``. A tie is no win in the accuracy."""
        chosen, rejected = _log_ratios(logprobs, batch)
        margin = chosen - rejected
        num_pairs = denominators.sequences / 2
        loss = sigmoid_loss(margin, self.beta).sum() / num_pairs
        means = {
            "train/accuracy": margin > 0,
            "train/reward_margin": self.beta * margin,
            "train/chosen_reward": self.beta * chosen,
            "train/rejected_reward": self.beta * rejected,
        }
        return loss, as_metrics(sums={"train/loss": loss}, means=means)


def _log_ratios(logprobs: Tensor, batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """Log ratios float32 [P] of the chosen rows and of the rejected rows of pairs that train."""
    at, row = trained_tokens(batch)
    # Subtracted before it is summed: two sums over a long row are large, their difference small.
    per_token = logprobs[at].float() - batch.tokens[keys.REFERENCE_LOGPROBS][at]
    of_row = per_token.new_zeros(len(batch)).index_add(0, row, per_token)
    trains = torch.bincount(row, minlength=len(batch)) > 0
    assert len(batch) % 2 == 0, f"{len(batch)} rows do not make pairs"
    pair_trains = trains[0::2]
    assert torch.equal(pair_trains, trains[1::2]), "only one row of a pair has trained tokens"
    return of_row[0::2][pair_trains], of_row[1::2][pair_trains]
