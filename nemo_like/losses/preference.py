"""Losses over pairs of a chosen and a rejected completion of one prompt.

Row 2i of a micro-batch is the chosen completion of pair i, row 2i + 1 the rejected one. Both train
or neither does, so the global number of pairs is half of ``Denominators.sequences``.

Legend: ``N`` tokens and ``B`` rows of the micro-batch, ``M`` trained tokens and ``P`` pairs that
train among them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import PreferenceLossConfig, RewardModelLossConfig
from nemo_like.losses.protocol import (
    Denominators,
    Needs,
    as_metrics,
    row_means,
    row_sums,
    trained_tokens,
)
from nemo_like.observe.metrics import Metrics


@dataclass(frozen=True)
class PreferenceLoss:
    """Mean of ``pair_loss`` over the pairs of the *global* batch, plus sft_coef * NLL.

    A row's log ratio is the sum over its trained tokens of current - reference logprobs, or their
    mean if length-normalized; beta times that is the reward that the policy implies (section 4 of
    arXiv:2305.18290). NLL is the mean over pairs of the chosen row's mean -log p(token), whatever
    the other options are (arXiv:2404.19733).
    """

    config: PreferenceLossConfig
    needs = Needs()

    def __call__(
        self, logprobs: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; see ``Loss``. A tie is not a win in the accuracy."""
        config = self.config
        at, row = trained_tokens(batch)
        trains = training_pairs(row, len(batch))
        current = logprobs[at].float()
        # Subtracted before it is summed: two sums over a long row are large, the difference small.
        ratio = current
        if not config.reference_free:
            ratio = current - batch.tokens[keys.REFERENCE_LOGPROBS][at]
        aggregate = row_means if config.length_normalized else row_sums
        chosen, rejected = of_pairs(aggregate(ratio, row, len(batch)), trains)
        chosen_logprob, rejected_logprob = of_pairs(row_sums(current, row, len(batch)), trains)

        margin = chosen - rejected
        num_pairs = denominators.sequences / 2
        loss = pair_loss(margin, config).sum() / num_pairs
        sums = {}
        means = {
            "train/accuracy": margin > 0,
            "train/reward_margin": config.beta * margin,
            "train/chosen_reward": config.beta * chosen,
            "train/rejected_reward": config.beta * rejected,
            "train/chosen_logprob": chosen_logprob,
            "train/rejected_logprob": rejected_logprob,
        }
        if config.sft_coef > 0:
            nll, _ = of_pairs(-row_means(current, row, len(batch)), trains)
            sums["train/preference_loss"] = loss
            means["train/chosen_nll"] = nll
            loss = loss + config.sft_coef * nll.sum() / num_pairs
        sums["train/loss"] = loss
        return loss, as_metrics(sums=sums, means=means)


def pair_loss(margin: Tensor, config: PreferenceLossConfig) -> Tensor:
    """Loss of each pair for ``margin`` = log ratio of chosen - that of rejected, any shape.

    >>> margin = torch.tensor(2.0)
    >>> kinds = ("sigmoid", "ipo", "hinge")
    >>> losses = [pair_loss(margin, PreferenceLossConfig(kind=kind)) for kind in kinds]
    >>> [round(loss.item(), 6) for loss in losses]
    [0.598139, 9.0, 0.8]
    """

    def clean(margin: Tensor) -> Tensor:
        match config.kind:
            case "sigmoid" | "robust":
                return sigmoid_loss(margin, config.beta, config.target_margin)
            case "hinge":
                return (1 + config.target_margin - config.beta * margin).relu()
            case "ipo":  # Eq. 17 of arXiv:2310.12036, where tau is our beta
                return (margin - 1 / (2 * config.beta)).square()

    return smoothed(clean, margin, config.label_smoothing, robust=config.kind == "robust")


def sigmoid_loss(margin: Tensor, beta: float = 1.0, target: float = 0.0) -> Tensor:
    """-log sigmoid(beta * margin - target), any shape: DPO, Eq. 7 of arXiv:2305.18290.

    >>> [round(v, 6) for v in sigmoid_loss(torch.tensor([2.0, 0.0]), beta=0.1).tolist()]
    [0.598139, 0.693147]
    """
    return -logsigmoid(beta * margin - target)


def smoothed(
    loss: Callable[[Tensor], Tensor], margin: Tensor, share: float, *, robust: bool = False
) -> Tensor:
    """``loss`` of pairs of which ``share`` < 0.5 is labelled the wrong way round, any shape.

    The expected loss, or if ``robust`` the unbiased estimate of what right labels would give
    (arXiv:2403.00409), which has no lower bound. The target margin stays; TRL's SimPO negates it.
    """
    if share == 0:
        return loss(margin)
    right, wrong = loss(margin), loss(-margin)
    if robust:
        return ((1 - share) * right - share * wrong) / (1 - 2 * share)
    return (1 - share) * right + share * wrong


def training_pairs(row: Tensor, num_rows: int) -> Tensor:
    """Bool [B / 2]: pairs that train, from the row [M] of each trained token."""
    trains = torch.bincount(row, minlength=num_rows) > 0
    assert num_rows % 2 == 0, f"{num_rows} rows do not make pairs"
    chosen, rejected = trains[0::2], trains[1::2]
    assert torch.equal(chosen, rejected), "only one row of a pair has trained tokens"
    return chosen


def of_pairs(of_row: Tensor, trains: Tensor) -> tuple[Tensor, Tensor]:
    """Entries [P] of the chosen rows and of the rejected rows, from [B], of pairs that train."""
    return of_row[0::2][trains], of_row[1::2][trains]


@dataclass(frozen=True)
class RewardModelLoss:
    """Mean over the pairs of the *global* batch of -log sigmoid(chosen - rejected score).

    Bradley-Terry, plus center_coef * the mean of
    (chosen + rejected score)^2 (Eq. 2 of arXiv:2312.09244). Pairs are as in ``preference``.
    """

    config: RewardModelLossConfig
    needs = Needs()

    def __call__(
        self, values: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """``values`` [N] with gradient: the scalar head's output where the model has read that
        token.

        A row's score is that of its last token, trained or not. A tie is not a win in the accuracy.
        """
        config = self.config
        last = batch.starts + batch.lengths - 1
        _, row = trained_tokens(batch)
        at_chosen, at_rejected = of_pairs(last, training_pairs(row, len(batch)))
        chosen, rejected = values[at_chosen].float(), values[at_rejected].float()
        difference = chosen - rejected
        per_pair = smoothed(sigmoid_loss, difference, config.label_smoothing)
        per_pair = per_pair + config.center_coef * (chosen + rejected).square()
        loss = per_pair.sum() / (denominators.sequences / 2)
        means = {
            "train/accuracy": difference > 0,
            "train/reward_margin": difference,
            "train/chosen_reward": chosen,
            "train/rejected_reward": rejected,
        }
        return loss, as_metrics(sums={"train/loss": loss}, means=means)
