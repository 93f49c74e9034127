"""PPO's critic loss, and the advantages that each rank computes for its own rows.

``RemoteModel.derive`` sends instances of the advantage classes to ranks, since the driver never
sees tokens. Legend: ``N`` tokens of the rows, ``M`` trained ones among them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import KLEstimator, ValueLossConfig
from nemo_like.losses.advantages import Moments, gae, reward_to_go
from nemo_like.losses.policy_gradient import kl_estimate
from nemo_like.losses.protocol import Denominators, Needs, as_metrics, trained_tokens
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

        The entry of a token, as in the columns ``keys.VALUES`` and ``keys.RETURNS``, predicts the
        return from the state in which it was sampled: the scalar head's output at the token before.
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
    """1 - Var(return - value) / Var(return); NaN where all returns are equal.

    ``numbers``: merged metrics of ``ValueLoss``, so any split into micro-batches gives the same.

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


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """Columns ``advantages`` and ``returns`` by GAE; the moments of the rank's advantages.

    Without a column of values, values are 0. A completion's reward belongs to its last token;
    rewards of later completions that train in other rows belong to the last trained token of the
    row. If ``kl_coef`` is above 0, each trained token's own KL to the reference is subtracted from
    its reward (arXiv:2203.02155 Eq. 2).
    """

    gamma: float
    lam: float
    kl_coef: float
    kl_estimator: KLEstimator

    def __call__(self, batch: TensorBatch) -> tuple[dict[str, Tensor], Moments]:
        """float32 [N] each, 0 where a token does not train; see the class."""
        at, row = trained_tokens(batch)
        trained = torch.zeros(batch.num_tokens, dtype=torch.bool)
        trained[at] = True
        advantages, returns = gae(
            self._rewards(batch, at, row),
            batch.tokens.get(keys.VALUES, torch.zeros(batch.num_tokens)),
            trained,
            batch.lengths,
            self.gamma,
            self.lam,
        )
        columns = {keys.ADVANTAGES: advantages, keys.RETURNS: returns}
        return columns, Moments.of(advantages[at])

    def _rewards(self, batch: TensorBatch, at: Tensor, row: Tensor) -> Tensor:
        """float64 [N]: reward of each trained token, at ``at`` [M] in rows ``row`` [M]."""
        rewards = torch.zeros(batch.num_tokens, dtype=torch.float64)
        if self.kl_coef > 0:
            log_ratio = batch.tokens[keys.REFERENCE_LOGPROBS] - batch.tokens[keys.POLICY_LOGPROBS]
            rewards[at] = -self.kl_coef * kl_estimate(log_ratio[at].double(), self.kl_estimator)
        if keys.STEP_REWARDS in batch.rows:
            earned = batch.rows[keys.STEP_REWARDS].nan_to_num(0.0)
            turn = batch.tokens[keys.TURNS][at]
        else:
            earned = batch.rows[keys.REWARDS].double()[:, None]
            turn = torch.zeros_like(at)
        to_come = reward_to_go(earned)[row, turn]
        rewards[at] += to_come
        rewards[at[:-1]] -= to_come[1:] * (row[1:] == row[:-1])  # minus what the next token keeps
        return rewards


@dataclass(frozen=True)
class WhitenedAdvantages:
    """Column ``advantages``, whitened by the moments of all ranks' advantages."""

    moments: Moments

    def __call__(self, batch: TensorBatch) -> tuple[dict[str, Tensor], None]:
        at, _ = trained_tokens(batch)
        advantages = batch.tokens[keys.ADVANTAGES].clone()
        advantages[at] = self.moments.whiten(advantages[at])
        return {keys.ADVANTAGES: advantages}, None
