"""The policy-gradient loss of PPO, GRPO, DAPO, Dr. GRPO, GSPO, CISPO and REINFORCE.

Legend: ``B`` rows and ``N`` tokens of the micro-batch, ``M`` trained tokens among them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import OBJECTIVES, LossConfig, RatioLevel
from nemo_like.losses.aggregate import GlobalMean, as_metrics, row_means, row_sums, trained_tokens
from nemo_like.losses.kl import kl_estimate, kl_loss
from nemo_like.losses.protocol import Denominators, Needs
from nemo_like.observe.metrics import Metrics

# A ratio of e^20 has long left any trust region; above it float32 would overflow in the backward.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class ClippedPGLoss:
    """Mean of w * (objective + kl_coef * KL - entropy_coef * entropy) over the *global* batch.

    The objective is that of ``policy_objective``, with the ratio r = exp(current - policy
    logprobs). A batch without the column of policy logprobs is on-policy: they are the current
    ones, without gradient, so r is 1. The KL term's own ratio is always that of its token.

    w, without gradient, corrects for sampling with another engine; see ``importance_weights``. A
    token whose w is 0 adds nothing, but counts in the mean like any other: denominators are known
    before the first forward pass, and w is not.
    """

    config: LossConfig
    """``constant_tokens`` must be a number where the normalization is ``constant``."""

    def __post_init__(self) -> None:
        constant = self.config.normalization == "constant"
        assert not constant or self.config.constant_tokens is not None

    @property
    def needs(self) -> Needs:
        """Entropies, if they have a weight."""
        return Needs(entropy=self.config.entropy_coef > 0)

    def __call__(
        self, logprobs: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; see ``Loss``."""
        config = self.config
        at, row = trained_tokens(batch)
        current = logprobs[at].float()
        on_policy = keys.POLICY_LOGPROBS not in batch.tokens
        policy = current.detach() if on_policy else batch.tokens[keys.POLICY_LOGPROBS][at]
        mean = GlobalMean(
            config.normalization, row, len(batch), denominators, config.constant_tokens
        )
        logprob_diff = policy - batch.tokens[keys.GENERATION_LOGPROBS][at]
        weight, was_cut = importance_weights(logprob_diff, row, len(batch), config)

        ratio = probability_ratio(current, policy, row, len(batch), config.ratio_level)
        objective, was_clipped = OBJECTIVES.load("loss.objective", config.objective)(
            ratio, current, _advantages(batch, at, row), config
        )
        loss = mean(weight * objective)
        sums, means = {"train/policy_loss": loss}, {}
        if config.importance != "none":
            means["mismatch/clipped_share"] = was_cut
        if config.objective != "reinforce":
            means["train/clip_share"] = was_clipped
        if config.kl_coef > 0 and config.kl_in == "loss":
            to_reference = batch.tokens[keys.REFERENCE_LOGPROBS][at] - current
            of_token = probability_ratio(current, policy, row, len(batch), "token")
            kl = mean(weight * kl_loss(to_reference, of_token, config.kl_estimator))
            loss = loss + config.kl_coef * kl
            means["train/kl"] = kl_estimate(to_reference, config.kl_estimator)
        if self.needs.entropy:
            entropy = batch.tokens[keys.ENTROPIES][at].float()
            loss = loss - config.entropy_coef * mean(weight * entropy)
            means["train/entropy"] = entropy
        sums["train/loss"] = loss
        maxima = {} if on_policy else {"train/max_log_ratio": (current - policy).abs()}
        return loss, as_metrics(sums=sums, means=means, maxima=maxima)


def probability_ratio(
    current: Tensor, policy: Tensor, row: Tensor, num_rows: int, level: RatioLevel
) -> Tensor:
    """Current / old probability [M] of each trained token, from logprobs [M].

    ``sequence``: of its whole completion, to the power of 1 / length (GSPO, arXiv:2507.18071
    Eq. 7); the gradient reaches all of the row's tokens.

    >>> old, new, row = torch.zeros(3), torch.tensor([1.0, 3.0, 0.0]), torch.tensor([0, 0, 1])
    >>> probability_ratio(new, old, row, 2, "sequence").log().tolist()
    [2.0, 2.0, 0.0]
    """
    log_ratio = current - policy
    if level == "sequence":
        log_ratio = row_means(log_ratio, row, num_rows)[row]
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def policy_objective(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Each token's term of the loss [M], to be minimised, and where a bound changed its gradient.

    ``clip``: -min(r A, clip(r) A), and at most dual_clip |A| (PPO, arXiv:1707.06347 Eq. 7; bounds
    of DAPO, arXiv:2503.14476 Eq. 10; dual clip of arXiv:1912.09729): beyond the bound that is on
    the advantage's side a token has no gradient. ``cispo``: -clip(r) A log p, clip(r) without
    gradient (arXiv:2506.13585 Eq. 4): each token keeps a gradient, of bounded weight.
    ``reinforce``: -A log p.
    """
    if config.objective == "reinforce":
        return -advantages * logprobs, torch.zeros_like(ratio, dtype=torch.bool)
    low = 0.0 if config.clip_low is None else 1 - config.clip_low
    high = math.inf if config.clip_high is None else 1 + config.clip_high
    below, above, clipped = ratio < low, ratio > high, ratio.clamp(low, high)
    if config.objective == "cispo":
        return -clipped.detach() * advantages * logprobs, above | below
    term = -torch.minimum(ratio * advantages, clipped * advantages)
    was_clipped = (advantages > 0) & above | (advantages < 0) & below
    if config.dual_clip is not None:
        most = config.dual_clip * advantages.abs()
        term = torch.where(advantages < 0, torch.minimum(term, most), term)
        was_clipped |= (advantages < 0) & (ratio > config.dual_clip)
    return term, was_clipped


def importance_weights(
    logprob_diff: Tensor, row: Tensor, num_rows: int, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Weights [M] of tokens, and where a bound changed one.

    With d = ``logprob_diff`` [M] = policy - generation logprobs: ``truncate`` is min(exp(d), cap)
    (truncated importance sampling, Ionides 2008; https://fengyao.notion.site/off-policy-rl),
    ``mask`` is exp(d) within [floor, cap] and 0 outside (as in IcePop). At the level of sequences
    d is summed over the row: the weight of the full completion, exact and of high variance.
    """
    exponent = logprob_diff
    if config.importance_level == "sequence":
        exponent = row_sums(logprob_diff, row, num_rows)[row]
    raw = exponent.clamp(max=_MAX_LOG_RATIO).exp()
    match config.importance:
        case "none":
            return torch.ones_like(raw), torch.zeros_like(raw, dtype=torch.bool)
        case "truncate":
            return raw.clamp(max=config.importance_cap), raw > config.importance_cap
        case "mask":
            inside = (raw >= config.importance_floor) & (raw <= config.importance_cap)
            return torch.where(inside, raw, 0.0), ~inside


def _advantages(batch: TensorBatch, at: Tensor, row: Tensor) -> Tensor:
    """[M], from a token column if there is one (GAE), else from the row column."""
    if keys.ADVANTAGES in batch.tokens:
        return batch.tokens[keys.ADVANTAGES][at]
    return batch.rows[keys.ADVANTAGES][row]
