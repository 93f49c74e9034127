"""The loss of PPO's critic.

Legend: ``N`` tokens of the micro-batch, ``M`` trained tokens among them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import ValueLossConfig
from nemo_like.losses.aggregate import as_metrics, trained_tokens
from nemo_like.losses.protocol import Denominators, Needs
from nemo_like.observe.metrics import Metrics

_ROUNDING = 1e-6


@dataclass(frozen=True)
class ValueLoss:
    """Mean over trained tokens of the *global* batch of max((v - R)^2, (clip(v) - R)^2) / 2.

    clip(v) is v within ``clip`` of the value before the step (PPO2; section 3 of
    arXiv:2005.12729), so a token that has moved further towards its return no longer trains.
    """

    config: ValueLossConfig
    needs = Needs()

    def __call__(
        self, values: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """``values`` [N] with gradient -> loss and metrics of one micro-batch; see ``Loss``.

        The entry of a token predicts the return from the state in which it was sampled, so it is
        the scalar head's output at the token before; the columns ``keys.VALUES`` and
        ``keys.RETURNS`` are alike. The metrics have what ``explained_variance`` is made of.
        """
        at, _ = trained_tokens(batch)
        value = values[at].float()
        returns = batch.tokens[keys.RETURNS][at]
        error = returns - value
        squared = error.square()
        means = {
            "train/value": value,
            "train/return": returns,
            "train/return_square": returns.square(),
            "train/value_error": error,
            "train/value_error_square": squared,
        }
        if self.config.clip is not None:
            before = batch.tokens[keys.VALUES][at]
            moved, clip = value - before, self.config.clip
            # Where nothing is clipped it is the value itself, without another rounding.
            clipped = torch.where(moved.abs() > clip, before + moved.clamp(-clip, clip), value)
            clipped_squared = (returns - clipped).square()
            means["train/clip_share"] = clipped_squared > squared
            squared = torch.maximum(squared, clipped_squared)
        loss = squared.sum() / 2 / denominators.tokens
        return loss, as_metrics(sums={"train/loss": loss}, means=means)


def explained_variance(numbers: Mapping[str, float]) -> float:
    """1 - Var(return - value) / Var(return) over all tokens that ``numbers`` are means of.

    ``numbers`` are the merged metrics of ``ValueLoss``, so any split into micro-batches gives the
    same. NaN where all returns are equal.

    >>> means = {"train/return": 1.0, "train/return_square": 5.0}
    >>> explained_variance(means | {"train/value_error": 1.0, "train/value_error_square": 2.0})
    0.75
    """
    of_returns = numbers["train/return_square"] - numbers["train/return"] ** 2
    of_errors = numbers["train/value_error_square"] - numbers["train/value_error"] ** 2
    # Squares are means in float32: less than this is what equal returns such as 0.95 leave.
    if of_returns <= _ROUNDING * numbers["train/return_square"]:
        return math.nan
    return 1 - of_errors / of_returns
