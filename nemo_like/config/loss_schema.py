"""Sections of what is optimised: advantages and losses; see ``schema``.

Published methods are choices of these keys; each key names the papers that it is from.
"""

from dataclasses import dataclass

from nemo_like.config.choices import (
    AdvantageScale,
    Baseline,
    ImportanceCorrection,
    ImportanceLevel,
    KLEstimator,
    KLPlace,
    Normalization,
    Objective,
    RatioLevel,
)


@dataclass(kw_only=True)
class AdvantageConfig:
    """From rewards to advantages."""

    baseline: Baseline = Baseline.leave_one_out
    """``leave_one_out``: mean reward of the prompt's other completions (RLOO, arXiv:2402.14740
    Eq. 7); ``mean``: of all of them (GRPO, arXiv:2402.03300 section 4.1.2; REINFORCE++-baseline);
    ``none``: the reward as it is (REINFORCE, REINFORCE++)."""
    scale: AdvantageScale = AdvantageScale.std
    """``std``: divide by the unbiased standard deviation of the baseline's rewards (GRPO), unless
    it is 0 or of one reward. (With ``leave_one_out`` it is that of the others: where these nearly
    agree, as scores of a reward model may, a reward far from them has a large advantage.)
    ``batch``: subtract the mean of all advantages of the step and divide by their unbiased standard
    deviation (REINFORCE++, arXiv:2501.03262); ``none``: neither (RLOO; Dr. GRPO,
    arXiv:2503.20783)."""
    count_untrained: bool = False
    """Whether completions that do not train (``grpo.mask_truncated``, ``mismatch.action=mask``)
    count in the mean and deviation of their group and step. True: as with the overlong filter of
    DAPO (arXiv:2503.14476 section 3.4), which takes them out of the loss alone. Completions whose
    reward failed never count."""
    overlong_buffer_tokens: int = 0
    """Completions within this many tokens of ``generation.max_new_tokens`` lose reward, in
    proportion to how far they are into the buffer (DAPO, arXiv:2503.14476 Eq. 13). 0: off."""
    overlong_penalty: float = 1.0
    """Reward lost at ``generation.max_new_tokens``, > 0 (DAPO: 1)."""


@dataclass(kw_only=True)
class LossConfig:
    """The policy-gradient loss: r = new / old probability, A = advantage."""

    objective: Objective = Objective.clip
    """What a token adds to the loss. ``clip``: -min(r A, clip(r) A) (PPO, arXiv:1707.06347 Eq. 7;
    GRPO); ``cispo``: -clip(r) A log p, clip(r) without gradient (MiniMax-M1, arXiv:2506.13585
    Eq. 4); ``reinforce``: -A log p, without r (Williams 1992)."""
    ratio_level: RatioLevel = RatioLevel.token
    """``token``: each token has its own r; ``sequence``: all tokens of a completion share the
    geometric mean of theirs (GSPO, arXiv:2507.18071 Eq. 5-7, with ``normalization=sequence``)."""
    clip_low: float | None = 0.2
    """clip(r) is at least 1 - clip_low, in [0, 1]. None: no lower bound. (In the first optimizer
    step on a batch r is 1, so bounds need several.)"""
    clip_high: float | None = 0.2
    """clip(r) is at most 1 + clip_high (larger than clip_low in DAPO, arXiv:2503.14476 Eq. 10).
    None: no upper bound."""
    dual_clip: float | None = None
    """For a negative advantage a token's loss is at most dual_clip |A|, > 1 (arXiv:1912.09729;
    ``objective=clip``). None: it has no bound."""
    normalization: Normalization = Normalization.token
    """What the sum over tokens is divided by. ``token``: all trained tokens of the optimizer step
    (DAPO, Eq. 12); ``sequence``: each sequence's tokens, and then the number of sequences (GRPO,
    Eq. 3); ``constant``: the number of sequences times ``constant_tokens`` (Dr. GRPO,
    arXiv:2503.20783).
    All counts are global: ranks and micro-batches do not change them."""
    constant_tokens: int | None = None
    """The constant of ``normalization=constant``, >= 1. None: ``generation.max_new_tokens``."""
    importance: ImportanceCorrection = ImportanceCorrection.truncate
    """Correction for sampling with another engine, by w = exp(policy_logprobs -
    generation_logprobs). ``truncate``: the loss is weighted by min(w, importance_cap); ``mask``: by
    w where it lies in [importance_floor, importance_cap], and by 0 elsewhere, though the mean
    counts these tokens too; ``none``. (The papers of configs/recipes have none; w is 1 where engine
    and policy agree.)"""
    importance_level: ImportanceLevel = ImportanceLevel.token
    """``token``: each token has its own w; ``sequence``: all tokens of a completion share the
    product of theirs."""
    importance_cap: float = 2.0
    """Upper bound of w."""
    importance_floor: float = 0.0
    """Lower bound of w (mask)."""
    entropy_coef: float = 0.0
    """Weight of the entropy of the policy's distributions, which is subtracted from the loss with
    the same mean as the rest (arXiv:1707.06347 Eq. 9), >= 0."""
    kl_coef: float = 0.0
    """Weight of KL(policy || reference). 0: no reference model is loaded."""
    kl_estimator: KLEstimator = KLEstimator.k3
    """Estimator of that KL, by d = log reference - log policy. ``k1``: -d; ``k2``: d^2 / 2;
    ``k3``: exp(d) - d - 1 (GRPO, Eq. 4)."""
    kl_in: KLPlace = KLPlace.loss
    """``loss``: a term of the loss, whose gradient is that of the KL for each estimator;
    ``reward``: a completion's KL, summed over its tokens, is subtracted from its reward before
    advantages; in PPO each token's from the reward of that token (arXiv:2203.02155 Eq. 2; only k1
    has the gradient of the KL there)."""
