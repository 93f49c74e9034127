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
from nemo_like.losses.kl import kl_estimate, kl_loss
from nemo_like.losses.protocol import Denominators
from nemo_like.observe.metrics import Metric, Metrics, Reduce

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
        row_of_token = batch.row_of_token
        trained = batch.tokens[keys.LOSS_MASK] & batch.rows[keys.SAMPLE_MASK][row_of_token]
        # Everything below sees trained tokens only: what stands elsewhere, even NaN, can't leak in.
        at = trained.nonzero(as_tuple=True)[0]
        row = row_of_token[at]
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
        metrics: dict[str, Tensor] = {
            "train/policy_loss": mean(-weight * surrogate),
            "train/clip_share": _clip_share(ratio, advantage, config),
        }
        if config.importance_cap is not None:
            metrics["train/importance_capped_share"] = (raw_weight > weight).float().mean()
        loss = metrics["train/policy_loss"]
        if config.kl_coef > 0:
            to_reference = batch.tokens[keys.REFERENCE_LOGPROBS][at] - current
            kl = mean(weight * kl_loss(to_reference, ratio, config.kl_estimator))
            loss = loss + config.kl_coef * kl
            metrics["train/kl"] = kl_estimate(to_reference, config.kl_estimator).mean()
        metrics["train/loss"] = loss
        metrics["train/max_log_ratio"] = (current - policy).abs().amax() if len(at) else loss * 0
        return loss, _as_metrics(metrics, num_tokens=len(at))


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


def _clip_share(ratio: Tensor, advantage: Tensor, config: LossConfig) -> Tensor:
    """Share of tokens whose gradient the clip removes (not all whose ratio is out of bounds)."""
    above = (advantage > 0) & (ratio > 1 + config.clip_high)
    below = (advantage < 0) & (ratio < 1 - config.clip_low)
    return (above | below).float().mean()


_SUMS = {"train/loss", "train/policy_loss"}  # already divided by the global denominator
_MAXIMA = {"train/max_log_ratio"}


def _as_metrics(values: dict[str, Tensor], num_tokens: int) -> Metrics:
    """One transfer from the device for all of them; means weigh by this micro-batch's tokens."""
    numbers = torch.stack([value.detach().float() for value in values.values()]).tolist()
    metrics: Metrics = {}
    for name, number in zip(values, numbers, strict=True):
        if name in _SUMS:
            metrics[name] = Metric(number, reduce=Reduce.sum)
        elif num_tokens and name in _MAXIMA:
            metrics[name] = Metric(number, reduce=Reduce.max)
        elif num_tokens:
            metrics[name] = Metric(number, weight=num_tokens)
    return metrics
