"""Sections of what is optimised: losses.

Published methods are choices of these keys; each key names the papers that it is from.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_like.config.section import Count, Instead, NonNegative, OnlyIf, Positive, Section
from nemo_like.doors import Door

KLEstimator = Literal["k1", "k2", "k3"]

RatioLevel = Literal["token", "sequence"]
Normalization = Literal["token", "sequence", "constant"]
TeacherTail = Literal["bucket", "renormalize", "ignore"]
PreferenceKind = Literal["sigmoid", "ipo", "hinge", "robust"]
Divergence = Literal["forward_kl", "reverse_kl", "jsd", "mixed"]

OBJECTIVES = Door(
    "nemo_like.objectives",
    dict.fromkeys(
        ("clip", "cispo", "reinforce"), "nemo_like.losses.policy_gradient:policy_objective"
    ),
)

ONE_UPDATE = OnlyIf(
    lambda _, run: run.loop.num_updates > 1,
    "with one optimizer step per batch the ratio is always 1; raise num_mini_batches or "
    "num_epochs_per_batch too",
)
_HAS_RATIO = OnlyIf(
    lambda here, _: here.objective != "reinforce", "loss.objective=reinforce has no ratio"
)
_HAS_KL = OnlyIf(
    lambda here, _: here.kl_coef > 0,
    "loss.kl_coef is 0, so there is no KL term; set loss.kl_coef too",
)
_CORRECTS = OnlyIf(
    lambda here, _: here.importance != "none", "loss.importance=none corrects nothing"
)
_Smoothing = Annotated[
    float, Field(ge=0, lt=0.5), Instead("if most labels are wrong, swap chosen and rejected")
]


class LossConfig(Section):
    """The policy-gradient loss: r = new / old probability, A = advantage."""

    objective: Annotated[str, OBJECTIVES] = "clip"
    """What a token adds to the loss. ``clip``: -min(r A, clip(r) A) (PPO, arXiv:1707.06347 Eq. 7;
    GRPO); ``cispo``: -clip(r) A log p, clip(r) without gradient (MiniMax-M1, arXiv:2506.13585
    Eq. 4); ``reinforce``: -A log p, without r (Williams 1992). Or a function of your own,
    ``file.py:function`` or ``package.module.function``; see ``examples/custom_loss``."""
    ratio_level: Annotated[RatioLevel, _HAS_RATIO] = "token"
    """``token``: each token has its own r; ``sequence``: all tokens of a completion share the
    geometric mean of theirs (GSPO, arXiv:2507.18071 Eq. 5-7, with ``normalization=sequence``)."""
    clip_low: Annotated[
        float | None,
        Field(ge=0, le=1),
        Instead("ratios are above 0; null is no lower bound"),
        _HAS_RATIO,
        ONE_UPDATE,
    ] = 0.2
    """clip(r) is at least 1 - clip_low, in [0, 1]. None: no lower bound. (In the first optimizer
    step on a batch r is 1, so bounds need several.)"""
    clip_high: Annotated[NonNegative | None, _HAS_RATIO, ONE_UPDATE] = 0.2
    """clip(r) is at most 1 + clip_high (larger than clip_low in DAPO, arXiv:2503.14476 Eq. 10).
    None: no upper bound."""
    dual_clip: Annotated[
        float | None,
        Field(gt=1),
        Instead("else tokens lose their gradient before the policy moves; null is no bound"),
        OnlyIf(lambda here, _: here.objective == "clip", "only loss.objective=clip has it"),
        ONE_UPDATE,
    ] = None
    """For a negative advantage a token's loss is at most dual_clip |A|, > 1 (arXiv:1912.09729;
    ``objective=clip``). None: it has no bound."""
    normalization: Normalization = "token"
    """What the sum over tokens is divided by. ``token``: all trained tokens of the optimizer step
    (DAPO, Eq. 12); ``sequence``: each sequence's tokens, and then the number of sequences (GRPO,
    Eq. 3); ``constant``: the number of sequences times ``constant_tokens`` (Dr. GRPO,
    arXiv:2503.20783). All counts are global: ranks and micro-batches do not change them."""
    constant_tokens: Annotated[
        Count | None,
        OnlyIf(
            lambda here, _: here.normalization == "constant",
            "only loss.normalization=constant divides by it",
        ),
    ] = None
    """The constant of ``normalization=constant``. None: ``generation.max_new_tokens``."""
    importance: Literal["none", "truncate", "mask"] = "truncate"
    """Correction for sampling with another engine, by w = exp(policy_logprobs -
    generation_logprobs). ``truncate``: the loss is weighted by min(w, importance_cap); ``mask``: by
    w where it lies in [importance_floor, importance_cap], and by 0 elsewhere, though the mean
    counts these tokens too; ``none``. (The papers of configs/recipes have none; w is 1 where engine
    and policy agree.)"""
    importance_level: Annotated[Literal["token", "sequence"], _CORRECTS] = "token"
    """``token``: each token has its own w; ``sequence``: all tokens of a completion share the
    product of theirs."""
    importance_cap: Annotated[Positive, _CORRECTS] = 2.0
    """Upper bound of w."""
    importance_floor: Annotated[
        NonNegative,
        OnlyIf(
            lambda here, _: here.importance == "mask",
            "only loss.importance=mask has a lower bound",
        ),
    ] = 0.0
    """Lower bound of w (mask)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy of the policy's distributions, which is subtracted from the loss with
    the same mean as the rest (arXiv:1707.06347 Eq. 9)."""
    kl_coef: NonNegative = 0.0
    """Weight of KL(policy || reference). 0: no reference model is loaded."""
    kl_estimator: Annotated[KLEstimator, _HAS_KL] = "k3"
    """Estimator of that KL, by d = log reference - log policy. ``k1``: -d; ``k2``: d^2 / 2;
    ``k3``: exp(d) - d - 1 (GRPO, Eq. 4)."""
    kl_in: Annotated[Literal["loss", "reward"], _HAS_KL] = "loss"
    """``loss``: a term of the loss, whose gradient is that of the KL for each estimator;
    ``reward``: a completion's KL, summed over its tokens, is subtracted from its reward before
    advantages; in PPO each token's from the reward of that token (arXiv:2203.02155 Eq. 2; only k1
    has the gradient of the KL there)."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Bounds that leave something to train."""
        floor, cap = self.importance_floor, self.importance_cap
        if floor >= cap:
            yield (
                f"{here}.importance_floor={floor:g} must be below {here}.importance_cap={cap:g}: "
                "no weight lies between them, and nothing would train."
            )


class PreferenceLossConfig(Section):
    """The loss over pairs of a chosen and a rejected completion.

    Its margin is the log ratio policy / reference of the chosen completion minus that of the
    rejected one.
    """

    kind: PreferenceKind = "sigmoid"
    """Loss of a margin m. ``sigmoid``: -log sigmoid(beta * m) (DPO, arXiv:2305.18290); ``ipo``:
    (m - 1 / (2 * beta))^2 (arXiv:2310.12036); ``hinge``: max(0, 1 - beta * m) (arXiv:2305.10425);
    ``robust``: an unbiased estimate of what ``sigmoid`` would be if the share ``label_smoothing``
    of pairs were labelled the right way round (arXiv:2403.00409)."""
    beta: Positive = 0.1
    """How closely the policy is held to the reference; ``ipo`` aims at a margin of
    1 / (2 * beta)."""
    length_normalized: bool = False
    """Log ratios are means over a completion's tokens instead of sums. For ``ipo`` its paper has
    sums (false); TRL, and the paper's experiments according to TRL, have means (true)."""
    reference_free: bool = False
    """Log ratios are the policy's own logprobs: no reference model."""
    target_margin: Annotated[
        NonNegative,
        OnlyIf(
            lambda here, _: here.kind != "ipo",
            "loss.kind=ipo aims at a margin of 1 / (2 * loss.beta); set loss.beta",
        ),
    ] = 0.0
    """Subtracted from beta * m (sigmoid, hinge). SimPO (arXiv:2405.14734) is ``sigmoid`` with
    ``reference_free``, ``length_normalized`` and this as its gamma."""
    label_smoothing: _Smoothing = 0.0
    """Share of pairs taken to be labelled the wrong way round, in [0, 0.5). The loss is the
    expected one (cDPO, https://ericmitchell.ai/cdpo.pdf)."""
    sft_coef: NonNegative = 0.0
    """Weight of the chosen completions' negative log-likelihood, a mean over pairs of the mean over
    tokens (RPO, arXiv:2404.19733)."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """A robust loss needs labels that are wrong."""
        if self.kind == "robust" and not self.label_smoothing:
            yield f"{here}.kind=robust would be sigmoid: set {here}.label_smoothing too."


class RewardModelLossConfig(Section):
    """The Bradley-Terry loss: -log sigmoid(score of the chosen - score of the rejected row)."""

    center_coef: NonNegative = 0.0
    """Weight of the mean of (chosen + rejected score)^2, which keeps scores around 0
    (arXiv:2312.09244)."""
    label_smoothing: _Smoothing = 0.0
    """Share of pairs taken to be labelled the wrong way round, in [0, 0.5)."""


class ValueLossConfig(Section):
    """The loss of PPO's critic: half the squared error of values against returns."""

    clip: Annotated[Positive | None, ONE_UPDATE] = 0.2
    """Largest change of a value in one step that still has a gradient towards the return. None:
    values are not clipped. (In the first optimizer step on a batch none has changed.)"""


class DistillationLossConfig(Section):
    """How far the student's next-token distribution is from the teacher's."""

    kind: Divergence = "forward_kl"
    """``forward_kl``: KL(teacher || student); ``reverse_kl``: KL(student || teacher); ``jsd``:
    alpha * KL(teacher || m) + (1 - alpha) * KL(student || m) with m = alpha * teacher +
    (1 - alpha) * student (arXiv:2306.13649); ``mixed``: alpha * forward + (1 - alpha) * reverse."""
    alpha: Annotated[
        float,
        Field(gt=0, lt=1),
        Instead("for one side alone set loss.kind to forward_kl or reverse_kl"),
        OnlyIf(
            lambda here, _: here.kind in ("jsd", "mixed"),
            "forward_kl and reverse_kl have one side; set loss.kind to jsd or mixed",
        ),
    ] = 0.5
    """Weight of the teacher's side, in (0, 1) (jsd, mixed)."""
    tail: Annotated[
        TeacherTail,
        OnlyIf(
            lambda _, run: run.teacher.top_k is not None,
            "teacher.top_k is null, so no token is left out; set teacher.top_k",
        ),
    ] = "bucket"
    """Tokens outside the teacher's K most likely ones. ``bucket``: together they are one more
    outcome, a lower bound of the full divergence; ``renormalize``: both distributions are scaled
    to 1 over the K; ``ignore``: terms of the K only, which may add up to less than 0."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        if run.teacher.top_k == 1 and self.tail == "renormalize":
            yield (
                f"{here}.tail=renormalize does not go with teacher.top_k=1: one outcome always has "
                f"probability 1; raise teacher.top_k, or set {here}.tail=bucket."
            )
