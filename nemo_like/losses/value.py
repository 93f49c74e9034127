"""PPO's critic loss, and the advantages (GAE) that each rank computes for its own rows.

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
from nemo_like.losses.advantages import Moments, grid, reward_to_go
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


def gae(
    rewards_per_token: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    lengths: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438 Eq. 16): advantages and returns.

    ``rewards_per_token``, ``values`` and ``loss_mask`` [N] -> float32 [N] each, 0 where the mask is
    False; ``lengths`` [B]. The value of a token is that of the state in which it was sampled. A
    step goes from one trained token to the next one of its row, however many tokens of prompts or
    tools are between, and nothing follows a row's last. Rewards of tokens that are not trained
    belong to the trained token before them. Returns are advantages + values.

    >>> mask = torch.tensor([True, False, False, True, False])
    >>> reward, no_values = torch.tensor([0.0, 0, 0, 0, 1]), torch.zeros(5)
    >>> gae(reward, no_values, mask, torch.tensor([5]), gamma=0.5, lam=1.0)[0].tolist()
    [0.5, 0.0, 0.0, 1.0, 0.0]
    """
    row_of_token = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    at = loss_mask.nonzero(as_tuple=True)[0]
    advantages, returns = torch.zeros(2, len(loss_mask), device=values.device)
    if len(at) == 0:
        return advantages, returns
    # The trained token [M] that each token's reward belongs to; none before a row's first.
    before = loss_mask.long().cumsum(0) - 1
    owned = (before >= 0) & (row_of_token[at[before.clamp(min=0)]] == row_of_token)
    earned = torch.zeros(len(at), dtype=torch.float64, device=values.device)
    earned.index_add_(0, before[owned], rewards_per_token[owned].double())

    # One line a row, one column a step.
    line, slot, shape = grid(row_of_token[at])
    reward, value = torch.zeros(2, *shape, dtype=torch.float64, device=values.device)
    reward[line, slot], value[line, slot] = earned, values[at].double()
    advantage = torch.zeros_like(value)
    after = next_value = torch.zeros(shape[0], dtype=torch.float64, device=values.device)
    for step in reversed(range(shape[1])):
        delta = reward[:, step] + gamma * next_value - value[:, step]
        after = advantage[:, step] = delta + gamma * lam * after
        next_value = value[:, step]
    advantages[at] = advantage[line, slot].float()
    returns[at] = (advantage + value)[line, slot].float()
    return advantages, returns


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
