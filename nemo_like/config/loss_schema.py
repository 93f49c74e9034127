"""Sections of what is optimised: advantages and losses; see ``schema``."""

from dataclasses import dataclass

from nemo_like.config.choices import (
    AdvantageScale,
    Baseline,
    ImportanceCorrection,
    ImportanceLevel,
    KLEstimator,
    Normalization,
)


@dataclass(kw_only=True)
class AdvantageConfig:
    """From rewards to advantages, within the group of one prompt."""

    baseline: Baseline = Baseline.leave_one_out
    """``leave_one_out``: mean reward of siblings (RLOO); ``mean``: of the whole group (GRPO)."""
    scale: AdvantageScale = AdvantageScale.std
    """``std``: divide by the unbiased standard deviation of the baseline's rewards; ``none``: do
    not."""


@dataclass(kw_only=True)
class LossConfig:
    """The clipped policy-gradient loss."""

    clip_low: float = 0.2
    """Ratios below 1 - clip_low carry no gradient for negative advantages."""
    clip_high: float = 0.2
    """Ratios above 1 + clip_high carry no gradient for positive advantages."""
    normalization: Normalization = Normalization.token
    """``token``: mean over all trained tokens of the step; ``sequence``: mean over sequences of the
    mean over their tokens. Both denominators are global: ranks and micro-batches do not change
    them."""
    importance: ImportanceCorrection = ImportanceCorrection.truncate
    """Correction for sampling with another engine, by w = exp(policy_logprobs -
    generation_logprobs). ``truncate``: the loss is weighted by min(w, importance_cap); ``mask``: by
    w where it lies in [importance_floor, importance_cap], and by 0 elsewhere; ``none``."""
    importance_level: ImportanceLevel = ImportanceLevel.token
    """``token``: each token has its own w; ``sequence``: all tokens of a completion share the
    product of theirs."""
    importance_cap: float = 2.0
    """Upper bound of w."""
    importance_floor: float = 0.0
    """Lower bound of w (mask)."""
    kl_coef: float = 0.0
    """Weight of KL(policy || reference) in the loss. 0: no reference model is loaded."""
    kl_estimator: KLEstimator = KLEstimator.k3
    """Estimator of that KL."""
