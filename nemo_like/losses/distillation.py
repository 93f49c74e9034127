"""The loss of a student that imitates a teacher's next-token distributions.

Legend: ``N`` tokens of the micro-batch, ``M`` trained tokens among them, ``K`` most likely tokens
of the teacher.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import DistillationLossConfig, TeacherTail
from nemo_like.losses.protocol import Denominators, Needs, as_metrics, trained_tokens
from nemo_like.observe.metrics import Metrics

# Of a logprob of -infinity, 0 * infinity would make NaN; the exponential of this is 0 as well.
_MIN_LOGPROB = -1e4
# K probabilities in float32 add up to 1 give or take this much: less is rounding, not a tail.
_MIN_TAIL = 1e-6


@dataclass(frozen=True)
class DistillationLoss:
    """Mean of ``divergence`` over the trained tokens of the *global* batch, in nats per token.

    No factor of temperature^2 is applied (arXiv:1503.02531): scale the learning rate if need be.
    """

    config: DistillationLossConfig
    vocabulary: int | None = None
    """Ids from here on are padding that the teacher does not have: the student's distribution is
    renormalised over the others. None: none."""

    @property
    def needs(self) -> Needs:
        return Needs(ids_column=keys.TEACHER_IDS, vocabulary=self.vocabulary)

    def __call__(
        self, logprobs_at: Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """``logprobs_at`` [N, K] with gradient: the student's logprobs of ``keys.TEACHER_IDS``,
        each under a softmax over its vocabulary (below ``vocabulary``), at the teacher's
        temperature.
        """
        at, _ = trained_tokens(batch)
        student = logprobs_at[at].float()
        teacher = batch.tokens[keys.TEACHER_LOGPROBS][at]
        per_token = divergence(teacher, student, self.config)
        loss = per_token.sum() / denominators.tokens
        means = {
            "train/divergence": per_token,
            "train/teacher_mass": teacher.exp().sum(-1),
            "train/student_mass": student.exp().sum(-1),
        }
        return loss, as_metrics(sums={"train/loss": loss}, means=means)


def divergence(teacher: Tensor, student: Tensor, config: DistillationLossConfig) -> Tensor:
    """Divergence [M] of logprobs [M, K], which are of the same K tokens on both sides.

    With ``bucket`` it is that of K + 1 outcomes, never above that of the whole vocabulary; a tail
    below 1e-6 counts as 1e-6, without gradient. Finite, as is its gradient, for any logprobs.

    >>> teacher, student = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    >>> for tail in ("ignore", "renormalize", "bucket"):
    ...     value = divergence(teacher, student, DistillationLossConfig(tail=tail)).item()
    ...     f"{tail} {value:.6f}"
    'ignore 0.346574'
    'renormalize 0.056633'
    'bucket 0.173287'
    """
    teacher = _with_tail(teacher.clamp(min=_MIN_LOGPROB), config.tail)
    student = _with_tail(student.clamp(min=_MIN_LOGPROB), config.tail)
    alpha = config.alpha
    match config.kind:
        case "forward_kl":
            return _kl(teacher, student)
        case "reverse_kl":
            return _kl(student, teacher)
        case "mixed":
            return alpha * _kl(teacher, student) + (1 - alpha) * _kl(student, teacher)
        case "jsd":  # Eq. 1 of arXiv:2306.13649, where beta is our alpha, P the teacher
            mixture = torch.logaddexp(teacher + math.log(alpha), student + math.log1p(-alpha))
            return alpha * _kl(teacher, mixture) + (1 - alpha) * _kl(student, mixture)


def _with_tail(logprobs: Tensor, tail: TeacherTail) -> Tensor:
    """Logprobs [M, K], or [M, K + 1] with the rest of the mass as the last outcome."""
    match tail:
        case "ignore":
            return logprobs
        case "renormalize":
            return logprobs.log_softmax(-1)
        case "bucket":
            rest = 1 - logprobs.exp().sum(-1, keepdim=True)
            return torch.cat([logprobs, rest.clamp(min=_MIN_TAIL).log()], dim=-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Sum over outcomes of exp(p) * (p - q), [M, K] -> [M]."""
    return (p.exp() * (p - q)).sum(-1)
