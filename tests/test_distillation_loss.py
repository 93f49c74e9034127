"""Distillation: divergences worked by hand, over the whole vocabulary, and over a part of it."""

import itertools
import math
from typing import get_args

import pytest
import torch

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import DistillationLossConfig, Divergence, TeacherTail
from nemo_like.losses.distillation import DistillationLoss, divergence
from nemo_like.losses.protocol import Denominators
from nemo_like.observe.metrics import merge, values

FORWARD, REVERSE, JSD, MIXED = "forward_kl", "reverse_kl", "jsd", "mixed"
IGNORE, RENORMALIZE, BUCKET = "ignore", "renormalize", "bucket"
VOCABULARY = 8

LN2 = math.log(2)
# Forward: .5 ln 2 + .25 ln(1/2); reverse the same. Of the mixture (.375, .25, .375):
HALF_JSD = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)


def log(*probabilities):
    return torch.tensor([probabilities]).log()


@pytest.mark.parametrize("tail", get_args(TeacherTail))
@pytest.mark.parametrize(
    ("kind", "alpha", "expected"),
    [
        (FORWARD, 0.5, 0.25 * LN2),
        (REVERSE, 0.5, 0.25 * LN2),
        (MIXED, 0.5, 0.25 * LN2),
        (JSD, 0.5, HALF_JSD),
    ],
)
def test_divergences_of_three_outcomes_by_hand(kind, alpha, expected, tail):
    config = DistillationLossConfig(kind=kind, alpha=alpha, tail=tail)
    actual = divergence(log(0.5, 0.25, 0.25), log(0.25, 0.25, 0.5), config)
    assert actual.item() == pytest.approx(expected, abs=1e-6)


def test_alpha_is_the_weight_of_the_teacher():
    teacher, student = log(0.8, 0.2), log(0.4, 0.6)
    forward = 0.8 * LN2 + 0.2 * math.log(1 / 3)
    reverse = 0.4 * math.log(1 / 2) + 0.6 * math.log(3)
    mixed = divergence(teacher, student, DistillationLossConfig(kind=MIXED, alpha=0.25))
    assert mixed.item() == pytest.approx(0.25 * forward + 0.75 * reverse, abs=1e-6)
    # The mixture is (.5, .5).
    to_teacher = 0.8 * math.log(1.6) + 0.2 * math.log(0.4)
    to_student = 0.4 * math.log(0.8) + 0.6 * math.log(1.2)
    jsd = divergence(teacher, student, DistillationLossConfig(kind=JSD, alpha=0.25))
    assert jsd.item() == pytest.approx(0.25 * to_teacher + 0.75 * to_student, abs=1e-6)


@pytest.mark.parametrize(
    ("tail", "probabilities", "expected"),
    [
        # One token: the teacher's .5 against .25, and .5 against .75 for all others.
        (IGNORE, ((0.5,), (0.25,)), 0.5 * LN2),
        (RENORMALIZE, ((0.5,), (0.25,)), 0.0),
        (BUCKET, ((0.5,), (0.25,)), 0.5 * LN2 + 0.5 * math.log(2 / 3)),
        # Two: (2/3, 1/3) against (1/2, 1/2) if renormalized; .25 against .5 for all others.
        (IGNORE, ((0.5, 0.25), (0.25, 0.25)), 0.5 * LN2),
        (
            RENORMALIZE,
            ((0.5, 0.25), (0.25, 0.25)),
            2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3),
        ),
        (BUCKET, ((0.5, 0.25), (0.25, 0.25)), 0.25 * LN2),
    ],
)
def test_tails_by_hand(tail, probabilities, expected):
    teacher, student = (log(*each) for each in probabilities)
    actual = divergence(teacher, student, DistillationLossConfig(tail=tail))
    assert actual.item() == pytest.approx(expected, abs=1e-6)


def test_an_ignored_tail_can_make_a_negative_divergence():
    config = DistillationLossConfig(tail=IGNORE)
    assert divergence(log(0.25), log(0.5), config).item() == pytest.approx(-0.25 * LN2)


def random_logits(num_tokens=40):
    torch.manual_seed(0)
    return 2 * torch.randn(2, num_tokens, VOCABULARY)


def top(teacher, student, k):
    """Logprobs [M, k] of both at the teacher's ``k`` most likely tokens."""
    logprobs, ids = teacher.log_softmax(-1).topk(k, dim=-1)
    return logprobs, student.log_softmax(-1).gather(-1, ids)


@pytest.mark.parametrize("kind", get_args(Divergence))
def test_over_the_whole_vocabulary_all_tails_have_the_divergence_and_its_gradient(kind):
    teacher, student = random_logits().unbind()
    student.requires_grad_()
    p, q = teacher.softmax(-1).double(), student.softmax(-1).double()
    kl = lambda a, b: (a * (a / b).log()).sum()  # noqa: E731
    middle = 0.3 * p + 0.7 * q
    expected = {
        FORWARD: kl(p, q),
        REVERSE: kl(q, p),
        MIXED: 0.3 * kl(p, q) + 0.7 * kl(q, p),
        JSD: 0.3 * kl(p, middle) + 0.7 * kl(q, middle),
    }[kind]
    (slope,) = torch.autograd.grad(expected, student)
    for tail in get_args(TeacherTail):
        config = DistillationLossConfig(kind=kind, alpha=0.3, tail=tail)
        actual = divergence(*top(teacher, student, VOCABULARY), config).sum()
        (gradient,) = torch.autograd.grad(actual, student)
        assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
        assert torch.allclose(gradient, slope, atol=1e-5)


@pytest.mark.parametrize("kind", get_args(Divergence))
def test_a_bucket_is_a_lower_bound_that_rises_with_k(kind):
    # Double, as the logarithm of a small tail has few digits in float32.
    teacher, student = random_logits().double().unbind()
    config = DistillationLossConfig(kind=kind, alpha=0.3, tail=BUCKET)
    bounds = [divergence(*top(teacher, student, k), config) for k in range(1, VOCABULARY + 1)]
    for lower, higher in itertools.pairwise(bounds):
        assert (lower <= higher + 1e-6).all()
    assert (bounds[0] >= -1e-6).all()
    assert bounds[0].mean() < 0.8 * bounds[-1].mean()


@pytest.mark.parametrize("kind", get_args(Divergence))
def test_rounding_is_no_tail(kind):
    torch.manual_seed(0)
    # Probabilities that add up to 1 in float32 give or take a few bits, on each side its own.
    teacher, student = (3 * torch.randn(2, 100, 2000)).log_softmax(-1).unbind()
    student.requires_grad_()
    values, gradients = [], []
    for tail in (BUCKET, IGNORE):
        value = divergence(teacher, student, DistillationLossConfig(kind=kind, tail=tail))
        values.append(value)
        gradients.append(torch.autograd.grad(value.sum(), student)[0])
    assert torch.allclose(*values, rtol=0, atol=2e-6)
    assert torch.allclose(*gradients, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tail", get_args(TeacherTail))
@pytest.mark.parametrize("kind", get_args(Divergence))
def test_equal_distributions_have_no_divergence_and_no_gradient(kind, tail):
    teacher = random_logits()[0]
    student = teacher.clone().requires_grad_()
    config = DistillationLossConfig(kind=kind, tail=tail)
    value = divergence(*top(teacher, student, 3), config)
    assert value.abs().max().item() < 1e-6
    if tail is not IGNORE:
        assert torch.autograd.grad(value.sum(), student)[0].abs().max().item() < 1e-6


@pytest.mark.parametrize("tail", get_args(TeacherTail))
@pytest.mark.parametrize("kind", get_args(Divergence))
@pytest.mark.parametrize("far", [30.0, 200.0, math.inf])
def test_tiny_probabilities_have_finite_values_and_gradients(kind, tail, far):
    teacher = torch.tensor([[0.0, -far, -far], [0.0, -far, -far], [-far, 0.0, -2 * far]])
    student = torch.tensor([[-far, 0.0, -far], [0.0, -far, -far], [-1.0, -1.0, -1.0]])
    student.requires_grad_()
    value = divergence(teacher, student, DistillationLossConfig(kind=kind, tail=tail))
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()


# The loss of a batch.

LENGTHS = [2, 5, 3, 4]
LOSSES = {
    f"{kind}_{tail}": DistillationLoss(DistillationLossConfig(kind=kind, tail=tail))
    for kind in get_args(Divergence)
    for tail in get_args(TeacherTail)
}


def random_batch(sample=(True, True, True, True)):
    """Rows with a teacher's three most likely tokens, and the student's logprobs of these."""
    n = sum(LENGTHS)
    teacher, student = top(*random_logits(n).unbind(), 3)
    mask = torch.tensor([i % 4 != 0 for i in range(n)])
    return TensorBatch(
        lengths=torch.tensor(LENGTHS),
        tokens={keys.LOSS_MASK: mask, keys.TEACHER_LOGPROBS: teacher.clone()},
        rows={keys.SAMPLE_MASK: torch.tensor(sample)},
    ), student


def denominators_of(batch):
    trained = batch.tokens[keys.LOSS_MASK] & batch.rows[keys.SAMPLE_MASK][batch.row_of_token]
    rows = batch.row_of_token[trained].unique()
    return Denominators(tokens=float(trained.sum()), sequences=float(len(rows)))


def apply(loss_of, batch, student, denominators=None):
    student = student.clone().requires_grad_()
    loss, metrics = loss_of(student, batch, denominators or denominators_of(batch))
    (gradient,) = torch.autograd.grad(loss, student)
    return loss.item(), gradient, metrics


def test_the_loss_is_the_mean_over_trained_tokens_and_masses_are_reported():
    teacher = log(0.5, 0.25).repeat(3, 1)
    student = torch.cat([log(0.25, 0.25), log(0.5, 0.25), log(0.25, 0.25)])
    batch = TensorBatch(
        lengths=torch.tensor([3]),
        tokens={
            keys.LOSS_MASK: torch.tensor([True, True, False]),
            keys.TEACHER_LOGPROBS: teacher,
        },
        rows={keys.SAMPLE_MASK: torch.tensor([True])},
    )
    loss, gradient, metrics = apply(DistillationLoss(DistillationLossConfig()), batch, student)
    assert loss == pytest.approx((0.25 * LN2 + 0) / 2, abs=1e-6)
    # Of -p log q in the first row: -.5 and -.25 - and +.25 / .5 of each probability, of the rest.
    expected = [-0.5 + 0.25 * 0.25 / 0.5, -0.25 + 0.25 * 0.25 / 0.5]
    assert (2 * gradient[0]).tolist() == pytest.approx(expected, abs=1e-6)
    assert gradient[2].tolist() == [0, 0]
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(
        {
            "train/loss": loss,
            "train/divergence": loss,
            "train/teacher_mass": 0.75,
            "train/student_mass": (0.5 + 0.75) / 2,
        }
    )


@pytest.mark.parametrize("sample", [(True,) * 4, (True, False, True, True)])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_to_the_whole_batch(name, size, sample):
    batch, student = random_batch(sample)
    whole = denominators_of(batch)
    expected = apply(LOSSES[name], batch, student)
    total, gradients, metrics = 0.0, [], []
    per_row = student.split(LENGTHS)
    for first in range(0, 4, size):
        rows = range(first, first + size)
        part = torch.cat([per_row[row] for row in rows])
        loss, gradient, numbers = apply(LOSSES[name], batch.select(list(rows)), part, whole)
        total += loss
        gradients.append(gradient)
        metrics.append(numbers)
    assert total == pytest.approx(expected[0], abs=1e-6)
    assert torch.allclose(torch.cat(gradients), expected[1], rtol=0, atol=1e-6)
    assert values(merge(metrics)) == pytest.approx(values(expected[2]), abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_at_other_tokens_cannot_leak_in(name):
    batch, student = random_batch((True, False, True, True))
    clean = apply(LOSSES[name], batch, student)
    other = ~(batch.tokens[keys.LOSS_MASK] & batch.rows[keys.SAMPLE_MASK][batch.row_of_token])
    batch.tokens[keys.TEACHER_LOGPROBS][other] = math.nan
    student[other] = math.nan
    loss, gradient, metrics = apply(LOSSES[name], batch, student)
    assert loss == clean[0]
    assert torch.equal(gradient, clean[1])
    assert gradient[other].abs().sum() == 0
    assert metrics == clean[2]


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_without_trained_tokens_has_zero_loss_and_a_graph(name):
    batch, student = random_batch((False,) * 4)
    whole = Denominators(tokens=3.0, sequences=2.0)
    for rows in ([0, 1, 2, 3], []):
        part = batch.select(rows)
        loss, gradient, metrics = apply(LOSSES[name], part, student[: part.num_tokens], whole)
        assert loss == 0
        assert gradient.abs().sum() == 0
        assert set(metrics) == {"train/loss"}
