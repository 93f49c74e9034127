"""Advantages of single tokens: what ranks compute of rows whose tokens the driver never sees.

Each class is called with the rows of one rank (``RemoteModel.derive``) and gives token columns,
and a summary for the driver. Legend: ``N`` tokens of the rows, ``M`` trained ones among them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import KLEstimator
from nemo_like.losses.advantages import Moments, gae, still_to_come
from nemo_like.losses.aggregate import trained_tokens
from nemo_like.losses.kl import kl_estimate


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """Columns ``advantages`` and ``returns`` by GAE; the moments of the rank's advantages.

    Without a column of values they are 0. What a completion earned belongs to its last token, and
    what later ones earned that train in other rows to the last trained token of the row. Each
    trained token's reward is less by its own KL to the reference, where ``kl_coef`` is above 0
    (arXiv:2203.02155 Eq. 2).
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
        """float64 [N]: what each trained token of ``at`` [M], in rows ``row`` [M], earns."""
        rewards = torch.zeros(batch.num_tokens, dtype=torch.float64)
        if self.kl_coef > 0:
            log_ratio = batch.tokens[keys.REFERENCE_LOGPROBS] - batch.tokens[keys.POLICY_LOGPROBS]
            rewards[at] = -self.kl_coef * kl_estimate(log_ratio[at].double(), self.kl_estimator)
        if keys.STEP_REWARDS in batch.rows:
            earned = batch.rows[keys.STEP_REWARDS].nan_to_num(0.0)
            turn = batch.tokens[keys.TURNS][at]
        else:  # a row that does not train may have no reward at all
            earned = batch.rows[keys.REWARDS].double().nan_to_num(0.0)[:, None]
            turn = torch.zeros_like(at)
        to_come = still_to_come(earned)[row, turn]
        same_row = row[1:] == row[:-1]
        rewards[at] += (
            to_come - torch.cat([to_come[1:] * same_row, to_come.new_zeros(1)])[: len(at)]
        )
        return rewards


@dataclass(frozen=True)
class WhitenedAdvantages:
    """Column ``advantages`` once more, by the moments of all ranks' advantages."""

    moments: Moments

    def __call__(self, batch: TensorBatch) -> tuple[dict[str, Tensor], None]:
        """float32 [N], 0 where a token does not train."""
        at, _ = trained_tokens(batch)
        advantages = batch.tokens[keys.ADVANTAGES].clone()
        advantages[at] = self.moments.whiten(advantages[at])
        return {keys.ADVANTAGES: advantages}, None
