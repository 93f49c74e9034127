"""The loss of a reward model: the chosen completion of a pair should score higher.

Legend: ``N`` tokens and ``B`` rows of the micro-batch, ``P`` pairs among them that train.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import RewardModelLossConfig
from nemo_like.losses.aggregate import as_metrics, trained_tokens
from nemo_like.losses.preference import of_pairs, sigmoid_loss, smoothed, training_pairs
from nemo_like.losses.protocol import Denominators, Needs
from nemo_like.observe.metrics import Metrics


@dataclass(frozen=True)
class RewardModelLoss:
    """Mean over the pairs of the *global* batch of -log sigmoid(chosen - rejected score - margin).

    Bradley-Terry, with the margin of Eq. 2 of arXiv:2307.09288, plus center_coef * the mean of
    (chosen + rejected score)^2 (Eq. 2 of arXiv:2312.09244). Pairs are as in ``preference``.
    """

    config: RewardModelLossConfig
    needs = Needs()

    def __call__(
        self, values: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """``values`` [N] with gradient -> loss and metrics of one micro-batch; see ``Loss``.

        An entry is the scalar head's output where the model has read that token and all before it.
        A row's score is that of its last token, trained or not. A tie is not a win in the accuracy.
        """
        config = self.config
        last = batch.starts + batch.lengths - 1
        _, row = trained_tokens(batch)
        at_chosen, at_rejected = of_pairs(last, training_pairs(row, len(batch)))
        chosen, rejected = values[at_chosen].float(), values[at_rejected].float()
        difference = chosen - rejected
        ranking = partial(sigmoid_loss, target=config.margin)
        per_pair = smoothed(ranking, difference, config.label_smoothing)
        per_pair = per_pair + config.center_coef * (chosen + rejected).square()
        loss = per_pair.sum() / (denominators.sequences / 2)
        means = {
            "train/accuracy": difference > 0,
            "train/reward_margin": difference,
            "train/chosen_reward": chosen,
            "train/rejected_reward": rejected,
        }
        return loss, as_metrics(sums={"train/loss": loss}, means=means)
