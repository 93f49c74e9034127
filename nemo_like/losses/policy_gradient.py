"""The policy-gradient loss of PPO, GRPO, DAPO, Dr. GRPO, GSPO, CISPO and REINFORCE.

Legend: ``B`` rows and ``N`` tokens of the micro-batch, ``M`` trained tokens among them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import OBJECTIVES, KLEstimator, LossConfig, RatioLevel
from nemo_like.losses.protocol import (
    MAX_EXPONENT,
    Denominators,
    GlobalMean,
    Needs,
    as_metrics,
    row_means,
    row_sums,
    trained_tokens,
)
from nemo_like.observe.metrics import Metrics


@dataclass(frozen=True)
class ClippedPGLoss:
    """Mean of w * (objective + kl_coef * KL - entropy_coef * entropy) over the *global* batch.

    The objective has the ratio r = exp(current - policy logprobs). A batch without the column of
    policy logprobs is on-policy: they are the current ones, without gradient, so r is 1. The KL
    term's own ratio is always that of its token.

    w, without gradient, corrects for sampling with another engine. A token whose w is 0 adds
    nothing, but counts in the mean: denominators are known before the first pass, and w is not.
    """

    config: LossConfig
    """``constant_tokens`` must be a number where the normalization is ``constant``."""

    def __post_init__(self) -> None:
        constant = self.config.normalization == "constant"
        assert not constant or self.config.constant_tokens is not None

    @property
    def needs(self) -> Needs:
        return Needs(entropy=self.config.entropy_coef > 0)

    def __call__(
        self, logprobs: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
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
    return log_ratio.clamp(max=MAX_EXPONENT).exp()


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
        term = torch.minimum(term, most)
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
    raw = exponent.clamp(max=MAX_EXPONENT).exp()
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


def kl_estimate(log_ratio: Tensor, kind: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) from d = ``log_ratio`` = reference - policy logprobs.

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (http://joschu.net/blog/kl-approx.html), any shape.
    Value and gradient are finite for finite input; NaN stays NaN.

    >>> [round(v, 6) for v in kl_estimate(torch.tensor([-1.0, 0.0, 1.0]), "k3").tolist()]
    [0.367879, 0.0, 0.718282]
    """
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return log_ratio.clamp(max=MAX_EXPONENT).exp() - log_ratio - 1


def kl_loss(log_ratio: Tensor, importance: Tensor, kind: KLEstimator) -> Tensor:
    """Per-token term whose expected *gradient* is that of KL(policy || reference).

    A plain ``kl_estimate`` under a loss misses the gradient of the sampling distribution: k1 then
    has no effect on average (its reference drops out), k3 gives that of KL(reference || policy).
    Weighting by the ratio with gradient, E_old[ratio * k] = E_policy[k], restores it for k1 and k3.
    k2 is not an unbiased value, but its plain gradient, -d * grad log policy, already is the right
    one, so its ratio is detached.

    ``importance`` = current policy / sampling policy, with gradient, same shape as ``log_ratio``.

    >>> current = torch.zeros(3, requires_grad=True)
    >>> d = torch.tensor([1.0, 25.0, -100.0]) - current
    >>> kl_loss(d, current.exp(), "k3").sum().backward()
    >>> current.grad.tolist()
    [-1.0, -25.0, 100.0]
    """
    if kind == "k1":
        return importance * kl_estimate(log_ratio, kind)
    weight = importance.detach()
    smooth = weight * kl_estimate(log_ratio, "k2")
    if kind == "k2":
        return smooth
    # The gradient of ratio * k3 is that of k2 too: exp(d) cancels between the ratio's part and
    # k3's own, which float32, and the bound of the exponent, would leave huge and of either sign.
    return (weight * kl_estimate(log_ratio, kind)).detach() + (smooth - smooth.detach())


def kl_of_rows(
    policy_logprobs: Tensor, reference_logprobs: Tensor, batch: TensorBatch, kind: KLEstimator
) -> Tensor:
    """Estimate of each row's KL(policy || reference), summed over its trained tokens: float64 [B].

    Subtracted from rewards (``loss.kl_in=reward``; Eq. 2 of arXiv:2203.02155), it acts through the
    gradient of the sampling distribution only, which is that of the KL for k1 alone. Logprobs are
    [N]; a row that does not train has 0.
    """
    at, row = trained_tokens(batch)
    log_ratio = reference_logprobs[at].double() - policy_logprobs[at].double()
    return row_sums(kl_estimate(log_ratio, kind), row, len(batch))
