"""The clipped policy-gradient loss of PPO and GRPO.

Legend: ``N`` tokens of the micro-batch, ``M`` trained tokens among them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.choices import Normalization
from nemo_like.config.schema import LossConfig
from nemo_like.losses.aggregate import as_metrics, trained_tokens
from nemo_like.losses.kl import kl_estimate, kl_loss
from nemo_like.losses.protocol import Denominators
from nemo_like.observe.metrics import Metrics

# A ratio of e^20 has long left any trust region; above it float32 would overflow in the backward.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class ClippedPGLoss:
    """-mean of w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * KL.

    r = exp(current - policy logprobs) (PPO, Eq. 7 of arXiv:1707.06347; clip bounds of DAPO, Eq. 10
    of arXiv:2503.14476). w = min(exp(policy - generation logprobs), importance_cap), without
    gradient, corrects for sampling with another engine (truncated importance sampling,
    arXiv:1708.01867 and https://fengyao.notion.site/off-policy-rl). The mean is over tokens or
    sequences of the *global* batch, and the KL term uses the same mean.
    """

    config: LossConfig

    def __call__(
        self, logprobs: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; see ``Loss``."""
        config = self.config
        at, row = trained_tokens(batch)
        current = logprobs[at].float()
        policy = batch.tokens[keys.POLICY_LOGPROBS][at]
        advantage = batch.rows[keys.ADVANTAGES][row]

        log_ratio = (current - policy).clamp(max=_MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        raw_weight = (policy - batch.tokens[keys.GENERATION_LOGPROBS][at]).exp()
        weight = torch.ones_like(raw_weight)
        if config.importance_cap is not None:
            weight = raw_weight.clamp(max=config.importance_cap)

        mean = _Mean(config.normalization, row, len(batch), denominators)
        loss = mean(-weight * surrogate)
        sums = {"train/policy_loss": loss}
        means = {"train/clip_share": _is_clipped(ratio, advantage, config)}
        if config.importance_cap is not None:
            means["train/importance_capped_share"] = raw_weight > weight
        if config.kl_coef > 0:
            to_reference = batch.tokens[keys.REFERENCE_LOGPROBS][at] - current
            kl = mean(weight * kl_loss(to_reference, ratio, config.kl_estimator))
            loss = loss + config.kl_coef * kl
            means["train/kl"] = kl_estimate(to_reference, config.kl_estimator)
        sums["train/loss"] = loss
        maxima = {"train/max_log_ratio": (current - policy).abs()}
        return loss, as_metrics(sums=sums, means=means, maxima=maxima)


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
