"""Sections of losses that compare: pairs of completions, values with returns, student with teacher.

See ``schema``.
"""

from dataclasses import dataclass

from nemo_like.config.choices import Divergence, PreferenceKind, TeacherTail


@dataclass(kw_only=True)
class DPOLossConfig:
    """The loss over pairs of a chosen and a rejected completion.

    Its margin is the log ratio policy / reference of the chosen completion minus that of the
    rejected one.
    """

    kind: PreferenceKind = PreferenceKind.sigmoid
    """Loss of a margin m. ``sigmoid``: -log sigmoid(beta * m) (DPO, arXiv:2305.18290); ``ipo``:
    (m - 1 / (2 * beta))^2 (arXiv:2310.12036); ``hinge``: max(0, 1 - beta * m)
    (arXiv:2305.10425)."""
    beta: float = 0.1
    """How closely the policy is held to the reference; ``ipo`` aims at a margin of
    1 / (2 * beta)."""
    length_normalized: bool = False
    """Log ratios are means over a completion's tokens instead of sums. For ``ipo`` its paper has
    sums (false); TRL, and the paper's experiments according to TRL, have means (true)."""
    reference_free: bool = False
    """Log ratios are the policy's own logprobs: no reference model."""
    target_margin: float = 0.0
    """Subtracted from beta * m (sigmoid, hinge). SimPO (arXiv:2405.14734) is ``sigmoid`` with
    ``reference_free``, ``length_normalized`` and this as its gamma."""
    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round, in [0, 0.5). The loss is the
    expected one (cDPO, https://ericmitchell.ai/cdpo.pdf)."""
    robust: bool = False
    """With ``label_smoothing``: the estimate, without bias, of the loss that right labels would
    give where that share is wrong (arXiv:2403.00409)."""
    sft_coef: float = 0.0
    """Weight of the chosen completions' negative log-likelihood, a mean over pairs of the mean over
    tokens (RPO, arXiv:2404.19733)."""


@dataclass(kw_only=True)
class RewardModelLossConfig:
    """The Bradley-Terry loss: -log sigmoid(score of the chosen - score of the rejected row)."""

    center_coef: float = 0.0
    """Weight of the mean of (chosen + rejected score)^2, which keeps scores around 0
    (arXiv:2312.09244)."""
    margin: float = 0.0
    """Difference of scores that is subtracted before the sigmoid (arXiv:2307.09288)."""
    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round, in [0, 0.5)."""


@dataclass(kw_only=True)
class ValueLossConfig:
    """The loss of PPO's critic: half the squared error of values against returns."""

    clip: float | None = 0.2
    """Largest change of a value in one step that still has a gradient towards the return. None:
    values are not clipped. (In the first optimizer step on a batch none has changed.)"""


@dataclass(kw_only=True)
class DistillationLossConfig:
    """How far the student's next-token distribution is from the teacher's."""

    kind: Divergence = Divergence.forward_kl
    """``forward_kl``: KL(teacher || student); ``reverse_kl``: KL(student || teacher); ``jsd``:
    alpha * KL(teacher || m) + (1 - alpha) * KL(student || m) with m = alpha * teacher +
    (1 - alpha) * student (arXiv:2306.13649); ``mixed``: alpha * forward + (1 - alpha) * reverse."""
    alpha: float = 0.5
    """Weight of the teacher's side, in (0, 1) (jsd, mixed)."""
    tail: TeacherTail = TeacherTail.bucket
    """Tokens outside the teacher's K most likely ones. ``bucket``: together they are one more
    outcome, a lower bound of the whole divergence; ``renormalize``: both distributions are scaled
    to 1 over the K; ``ignore``: terms of the K only, which may add up to less than 0."""
