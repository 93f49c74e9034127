"""The clipped policy-gradient loss of PPO and GRPO.

Legend: ``N`` tokens of the micro-batch, ``M`` trained tokens among them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.choices import ImportanceCorrection, ImportanceLevel, Normalization
from nemo_like.config.loss_schema import LossConfig
from nemo_like.losses.aggregate import as_metrics, trained_tokens
from nemo_like.losses.kl import kl_estimate, kl_loss
from nemo_like.losses.protocol import Denominators
from nemo_like.observe.metrics import Metrics

# A ratio of e^20 has long left any trust region; above it float32 would overflow in the backward.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class ClippedPGLoss:
    """-mean of w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * w * KL.

    r = exp(current - policy logprobs) (PPO, Eq. 7 of arXiv:1707.06347; clip bounds of DAPO, Eq. 10
    of arXiv:2503.14476). A batch without the column of policy logprobs is on-policy: they are the
    current ones, without gradient, so r is 1. w, also without gradient, corrects for sampling with
    another engine; see ``importance_weights``. The mean is over tokens or sequences of the *global*
    batch, and the KL term uses the same mean. A token whose w is 0 counts in it like any other:
    denominators are known before the first forward pass, and w is not.
    """

    config: LossConfig
    mask_rows_above: float | None = None
    """Rows whose mean |policy - generation logprob| is above this do not train. None: all do."""

    def __call__(
        self, logprobs: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; see ``Loss``."""
        config = self.config
        at, row = trained_tokens(batch)
        current = logprobs[at].float()
        on_policy = keys.POLICY_LOGPROBS not in batch.tokens
        policy = current.detach() if on_policy else batch.tokens[keys.POLICY_LOGPROBS][at]
        advantage = batch.rows[keys.ADVANTAGES][row]

        log_ratio = (current - policy).clamp(max=_MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        gap = policy - batch.tokens[keys.GENERATION_LOGPROBS][at]
        weight, was_cut = importance_weights(gap, row, len(batch), config)

        mean = _Mean(config.normalization, row, len(batch), denominators)
        means = {"train/clip_share": _is_clipped(ratio, advantage, config)}
        sums = {}
        if config.importance is not ImportanceCorrection.none:
            means["mismatch/clipped_share"] = was_cut
        if self.mask_rows_above is not None:
            # Not "above", so that a gap of NaN masks its row.
            kept = _row_means(gap.abs(), row, len(batch)) <= self.mask_rows_above
            weight = torch.where(kept[row], weight, 0.0)
            sums["mismatch/masked_rows"] = (~kept).sum()
        loss = mean(-weight * surrogate)
        sums["train/policy_loss"] = loss
        if config.kl_coef > 0:
            to_reference = batch.tokens[keys.REFERENCE_LOGPROBS][at] - current
            kl = mean(weight * kl_loss(to_reference, ratio, config.kl_estimator))
            loss = loss + config.kl_coef * kl
            means["train/kl"] = kl_estimate(to_reference, config.kl_estimator)
        sums["train/loss"] = loss
        maxima = {} if on_policy else {"train/max_log_ratio": (current - policy).abs()}
        return loss, as_metrics(sums=sums, means=means, maxima=maxima)


def importance_weights(
    gap: Tensor, row: Tensor, num_rows: int, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Weights [M] for ``gap`` = policy - generation logprobs [M], and where a bound changed one.

    ``truncate``: min(exp(gap), cap) (truncated importance sampling, Ionides 2008;
    https://fengyao.notion.site/off-policy-rl). ``mask``: exp(gap) within [floor, cap], 0 outside
    (as in IcePop). At the level of sequences the exponent is the sum over the row: the weight of
    the whole completion, exact and of high variance.
    """
    exponent = gap
    if config.importance_level is ImportanceLevel.sequence:
        exponent = gap.new_zeros(num_rows).index_add(0, row, gap)[row]
    raw = exponent.clamp(max=_MAX_LOG_RATIO).exp()
    match config.importance:
        case ImportanceCorrection.none:
            return torch.ones_like(raw), torch.zeros_like(raw, dtype=torch.bool)
        case ImportanceCorrection.truncate:
            return raw.clamp(max=config.importance_cap), raw > config.importance_cap
        case ImportanceCorrection.mask:
            inside = (raw >= config.importance_floor) & (raw <= config.importance_cap)
            return torch.where(inside, raw, 0.0), ~inside


def _row_means(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Mean of ``values`` [M] over each row [B]; 0 for a row without any."""
    count = torch.bincount(row, minlength=num_rows).clamp(min=1)
    return values.new_zeros(num_rows).index_add(0, row, values) / count


@dataclass(frozen=True)
class _Mean:
    """This micro-batch's share of the global mean over tokens or over sequences."""

    normalization: Normalization
    row: Tensor
    num_rows: int
    denominators: Denominators

    def __call__(self, per_token: Tensor) -> Tensor:
        """``per_token`` [M] -> scalar."""
        if self.normalization is Normalization.token:
            return per_token.sum() / self.denominators.tokens
        count = torch.bincount(self.row, minlength=self.num_rows)
        return (per_token / count[self.row]).sum() / self.denominators.sequences


def _is_clipped(ratio: Tensor, advantage: Tensor, config: LossConfig) -> Tensor:
    """Bool [M]: tokens whose gradient the clip removes (not all whose ratio is out of bounds)."""
    above = (advantage > 0) & (ratio > 1 + config.clip_high)
    below = (advantage < 0) & (ratio < 1 - config.clip_low)
    return above | below
