"""The policy-gradient loss and KL: values worked by hand, gradients against analytic ones."""

import math

import pytest
import torch

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.choices import KLEstimator, Normalization
from nemo_like.config.schema import LossConfig
from nemo_like.losses.kl import kl_estimate, kl_loss
from nemo_like.losses.policy_gradient import ClippedPGLoss
from nemo_like.losses.protocol import Denominators


def make_batch(
    lengths, advantages, *, policy=None, generation=None, reference=None, mask=None, sample=None
):
    n = sum(lengths)
    policy = torch.zeros(n) if policy is None else torch.tensor(policy)
    tokens = {
        keys.LOSS_MASK: torch.tensor(mask) if mask else torch.ones(n, dtype=torch.bool),
        keys.POLICY_LOGPROBS: policy,
        keys.GENERATION_LOGPROBS: policy if generation is None else torch.tensor(generation),
    }
    if reference is not None:
        tokens[keys.REFERENCE_LOGPROBS] = torch.tensor(reference)
    sample = torch.tensor(sample) if sample else torch.ones(len(lengths), dtype=torch.bool)
    rows = {keys.ADVANTAGES: torch.tensor(advantages), keys.SAMPLE_MASK: sample}
    return TensorBatch(lengths=torch.tensor(lengths), tokens=tokens, rows=rows)


def denominators_of(batch):
    trained = batch.tokens[keys.LOSS_MASK] & batch.rows[keys.SAMPLE_MASK][batch.row_of_token]
    rows = batch.row_of_token[trained].unique()
    return Denominators(tokens=float(trained.sum()), sequences=float(len(rows)))


def loss_of(batch, logprobs, config=None, denominators=None):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    loss, metrics = ClippedPGLoss(config or LossConfig())(
        logprobs, batch, denominators or denominators_of(batch)
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient, metrics


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1.0, 1.25, -1.25), (1.0, 1.30, -1.28), (-1.0, 0.75, 0.8), (-1.0, 1.3, 1.3), (1.0, 0.5, -0.5)],
)
def test_clip_bounds_are_asymmetric(advantage, ratio, expected):
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    loss, _, _ = loss_of(make_batch([1], [advantage]), [math.log(ratio)], config)
    assert loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("advantage", "ratio", "clipped"),
    [(1.0, 0.5, 0.0), (1.0, 1.5, 1.0), (-1.0, 0.5, 1.0), (-1.0, 1.5, 0.0)],
)
def test_clip_share_counts_only_tokens_whose_gradient_is_gone(advantage, ratio, clipped):
    _, gradient, metrics = loss_of(make_batch([1], [advantage]), [math.log(ratio)])
    assert metrics["train/clip_share"].value == clipped
    assert (gradient.item() == 0) == bool(clipped)


def test_on_policy_loss_by_normalization():
    batch = make_batch([2, 6], [1.0, -1.0])
    sequence = LossConfig(normalization=Normalization.sequence)
    assert loss_of(batch, [0.0] * 8, sequence)[0] == pytest.approx(0.0, abs=1e-6)
    assert loss_of(batch, [0.0] * 8)[0] == pytest.approx(0.5)


def test_kl_uses_the_same_mean_as_the_policy_term():
    batch = make_batch([1, 3], [0.0, 0.0], reference=[1.0, 0.0, 0.0, 0.0])
    k3 = math.e - 2
    token = LossConfig(kl_coef=1.0)
    sequence = LossConfig(kl_coef=1.0, normalization=Normalization.sequence)
    assert loss_of(batch, [0.0] * 4, token)[0] == pytest.approx(k3 / 4)
    assert loss_of(batch, [0.0] * 4, sequence)[0] == pytest.approx(k3 / 2)


def test_importance_weight_is_truncated_and_has_no_gradient():
    batch = make_batch(
        [2], [1.0], policy=[math.log(0.9), math.log(0.2)], generation=[math.log(0.3)] * 2
    )
    logprobs = [math.log(0.9), math.log(0.2)]
    loss, gradient, metrics = loss_of(batch, logprobs)
    assert loss == pytest.approx(-(2.0 + 2 / 3) / 2, abs=1e-5)
    assert gradient.tolist() == pytest.approx([-1.0, -1 / 3], abs=1e-5)
    assert metrics["train/importance_capped_share"].value == 0.5
    assert loss_of(batch, logprobs, LossConfig(importance_cap=None))[0] == pytest.approx(-1.0)


def test_ratio_is_that_of_the_new_policy_to_the_old_one():
    batch = make_batch([1], [1.0], policy=[-2.0], generation=[-2.0])
    config = LossConfig(clip_low=0.9, clip_high=9.0)
    assert loss_of(batch, [-1.5], config)[0] == pytest.approx(-math.exp(0.5), abs=1e-5)


def test_environment_tokens_get_no_gradient_and_cannot_leak_in():
    nan = float("nan")
    mask = [False, True, False, True]
    clean = make_batch([4], [1.0], reference=[0.0, 0.5, 0.0, 0.5], mask=mask)
    dirty = make_batch(
        [4], [1.0], policy=[nan, 0.0, nan, 0.0], reference=[nan, 0.5, 1e30, 0.5], mask=mask
    )
    config = LossConfig(kl_coef=0.1)
    expected = loss_of(clean, [0.0] * 4, config)
    actual = loss_of(dirty, [nan, 0.0, nan, 0.0], config)
    assert actual[0] == expected[0]
    assert actual[1].tolist() == expected[1].tolist()
    assert actual[1][[0, 2]].tolist() == [0, 0]
    assert actual[2]["train/kl"] == expected[2]["train/kl"]


@pytest.mark.parametrize("normalization", list(Normalization))
@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_micro_batches_add_up_to_the_whole_batch(normalization, estimator):
    torch.manual_seed(0)
    lengths = [2, 6, 3, 5]
    n = sum(lengths)
    draw = lambda: (torch.randn(n) * 0.3 - 1).tolist()  # noqa: E731
    batch = make_batch(
        lengths,
        [1.0, -1.0, 0.5, 2.0],
        policy=draw(),
        generation=draw(),
        reference=draw(),
        mask=[i % 5 != 0 for i in range(n)],
        sample=[True, True, False, True],
    )
    config = LossConfig(kl_coef=0.1, kl_estimator=estimator, normalization=normalization)
    whole = denominators_of(batch)
    logprobs = torch.tensor(draw())
    expected, gradient, _ = loss_of(batch, logprobs.tolist(), config, whole)
    starts = batch.starts.tolist()
    for parts in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3], [0, 1, 2]]):
        total, grad = 0.0, torch.zeros(n)
        for rows in parts:
            at = torch.cat([torch.arange(starts[r], starts[r] + lengths[r]) for r in rows])
            part, g, _ = loss_of(batch.select(rows), logprobs[at].tolist(), config, whole)
            total += part
            grad[at] = g
        assert total == pytest.approx(expected, abs=1e-6)
        assert torch.allclose(grad, gradient, atol=1e-6)


def test_a_masked_row_counts_in_no_divisor():
    batch = make_batch([2, 3, 2, 4], [1.0, 2.0, -1.0, 5.0], sample=[True, True, True, False])
    without = batch.select([0, 1, 2])
    for normalization in Normalization:
        config = LossConfig(normalization=normalization)
        assert loss_of(batch, [0.1] * 11, config)[0] == pytest.approx(
            loss_of(without, [0.1] * 7, config)[0]
        )


def test_a_micro_batch_without_trained_tokens_has_zero_loss_and_a_graph():
    batch = make_batch([2], [1.0], mask=[False, False])
    loss, gradient, metrics = loss_of(
        batch, [0.0, 0.0], denominators=Denominators(tokens=3.0, sequences=1.0)
    )
    assert loss == 0
    assert gradient.tolist() == [0, 0]
    assert set(metrics) == {"train/loss", "train/policy_loss"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(KLEstimator))
def test_kl_and_its_gradient_are_finite_however_far_the_reference_is(kind, dtype):
    d = torch.tensor([-100.0, -1.0, 0.0, 1.0, 100.0], dtype=dtype, requires_grad=True)
    value = kl_estimate(d, kind)
    (gradient,) = torch.autograd.grad(value.sum(), d)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()


def test_k3_values_by_hand():
    d = torch.tensor([-1.0, 0.0, 1.0])
    assert kl_estimate(d, KLEstimator.k3).tolist() == pytest.approx(
        [0.367879, 0, 0.718282], abs=1e-5
    )
    assert kl_estimate(d, KLEstimator.k2).tolist() == [0.5, 0, 0.5]
    assert kl_estimate(d, KLEstimator.k1).tolist() == [1, 0, -1]


def test_a_nan_in_the_kl_stays_visible():
    for kind in KLEstimator:
        assert torch.isnan(kl_estimate(torch.tensor(float("nan")), kind))


@pytest.mark.parametrize("kind", list(KLEstimator))
def test_expected_gradient_of_the_kl_term_is_that_of_the_true_kl(kind):
    reference = torch.log_softmax(torch.tensor([0.3, -0.2, 1.0]), 0)
    logits = torch.tensor([1.0, 0.5, -0.5], requires_grad=True)
    policy = torch.log_softmax(logits, 0)
    true_kl = (policy.exp() * (policy - reference)).sum()
    (expected,) = torch.autograd.grad(true_kl, logits, retain_graph=True)
    # Enumerate the three actions, each weighted by the probability of sampling it.
    importance = (policy - policy.detach()).exp()
    term = (policy.detach().exp() * kl_loss(reference - policy, importance, kind)).sum()
    (actual,) = torch.autograd.grad(term, logits)
    assert torch.allclose(actual, expected, atol=1e-6)
