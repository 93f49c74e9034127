"""Losses and KL: values worked by hand, gradients against analytic ones, parts against wholes."""

import math
from typing import get_args

import pytest
import torch

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.batch import keys
from nemo_like.batch.micro_batches import plan_micro_batches
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import (
    OBJECTIVES,
    KLEstimator,
    LossConfig,
    Normalization,
    PreferenceLossConfig,
    RatioLevel,
)
from nemo_like.config.section import choices
from nemo_like.errors import UserError
from nemo_like.losses.cross_entropy import CrossEntropyLoss
from nemo_like.losses.policy_gradient import ClippedPGLoss, kl_estimate, kl_loss, kl_of_rows
from nemo_like.losses.preference import PreferenceLoss
from nemo_like.losses.protocol import Denominators, Needs, apply_loss
from nemo_like.observe.metrics import merge, values
from tests.small_runs import accept


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
    loss = ClippedPGLoss(config or LossConfig())
    return apply(loss, batch, logprobs, denominators)


def apply(function, batch, logprobs, denominators=None):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    loss, metrics = function(logprobs, batch, denominators or denominators_of(batch))
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
    sequence = LossConfig(normalization="sequence")
    assert loss_of(batch, [0.0] * 8, sequence)[0] == pytest.approx(0.0, abs=1e-6)
    assert loss_of(batch, [0.0] * 8)[0] == pytest.approx(0.5)


def test_kl_uses_the_same_mean_as_the_policy_term():
    batch = make_batch([1, 3], [0.0, 0.0], reference=[1.0, 0.0, 0.0, 0.0])
    k3 = math.e - 2
    token = LossConfig(kl_coef=1.0)
    sequence = LossConfig(kl_coef=1.0, normalization="sequence")
    assert loss_of(batch, [0.0] * 4, token)[0] == pytest.approx(k3 / 4)
    assert loss_of(batch, [0.0] * 4, sequence)[0] == pytest.approx(k3 / 2)
    batch.tokens[keys.GENERATION_LOGPROBS] = torch.tensor([1 / 1.5, 1, 1, 1]).log()  # its weights
    assert loss_of(batch, [0.0] * 4, token)[0] == pytest.approx(1.5 * k3 / 4)


TOKEN, SEQUENCE = choices(LossConfig.model_fields["importance_level"].annotation)
NONE, TRUNCATE, MASK = choices(LossConfig.model_fields["importance"].annotation)


@pytest.mark.parametrize(
    ("importance", "level", "floor", "weights", "cut"),
    [
        # Ratios 3 and 2/3 in the first row (product 2), 0.5 in the second.
        (NONE, TOKEN, 0.0, [1.0, 1.0, 1.0], None),
        (TRUNCATE, TOKEN, 0.0, [2.5, 2 / 3, 0.5], 1 / 3),
        (TRUNCATE, SEQUENCE, 0.0, [2.0, 2.0, 0.5], 0.0),
        (MASK, TOKEN, 0.6, [0.0, 2 / 3, 0.0], 2 / 3),
        (MASK, SEQUENCE, 0.6, [2.0, 2.0, 0.0], 1 / 3),
    ],
    ids=str,
)
def test_importance_weights_by_hand_carry_no_gradient(importance, level, floor, weights, cut):
    policy = [math.log(0.9), math.log(0.2), math.log(0.25)]
    generation = [math.log(0.3), math.log(0.3), math.log(0.5)]
    batch = make_batch([2, 1], [1.0, 1.0], policy=policy, generation=generation)
    config = LossConfig(
        importance=importance, importance_level=level, importance_cap=2.5, importance_floor=floor
    )
    loss, gradient, metrics = loss_of(batch, policy, config)
    assert loss == pytest.approx(-sum(weights) / 3, abs=1e-5)
    assert gradient.tolist() == pytest.approx([-w / 3 for w in weights], abs=1e-5)
    share = metrics.get("mismatch/clipped_share")
    assert (share and share.value) == (cut if cut is None else pytest.approx(cut))


def test_weights_of_whole_sequences_do_not_overflow():
    batch = make_batch([3], [1.0], policy=[-1.0] * 3, generation=[-90.0] * 3)
    config = LossConfig(importance=MASK, importance_level=SEQUENCE, importance_cap=1e30)
    loss, gradient, _ = loss_of(batch, [-1.0] * 3, config)
    assert loss == pytest.approx(-math.exp(20), rel=1e-5)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("level", get_args(RatioLevel))
def test_a_ratio_does_not_overflow(level):
    batch = make_batch([1], [-1.0], policy=[-100.0])
    loss, gradient, _ = loss_of(batch, [0.0], LossConfig(ratio_level=level))
    assert loss == pytest.approx(math.exp(20))
    assert torch.isfinite(gradient).all()


def test_rows_without_policy_logprobs_are_on_policy():
    generation, now = [-1.0, -2.0, -0.5], [-1.2, -1.5, -0.6]
    given = make_batch([1, 2], [1.0, -2.0], policy=now, generation=generation)
    reused = make_batch([1, 2], [1.0, -2.0], policy=now, generation=generation)
    del reused.tokens[keys.POLICY_LOGPROBS]
    for config in (LossConfig(), LossConfig(importance=MASK, importance_level=SEQUENCE)):
        expected, gradient, _ = loss_of(given, now, config)
        loss, own_gradient, metrics = loss_of(reused, now, config)
        assert loss == expected
        assert torch.equal(own_gradient, gradient)
        assert "train/max_log_ratio" not in metrics


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", get_args(KLEstimator))
def test_kl_and_its_gradient_are_finite_however_far_the_reference_is(kind, dtype):
    d = torch.tensor([-100.0, -1.0, 0.0, 1.0, 100.0], dtype=dtype, requires_grad=True)
    value = kl_estimate(d, kind)
    (gradient,) = torch.autograd.grad(value.sum(), d)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()


def test_k3_values_by_hand():
    d = torch.tensor([-1.0, 0.0, 1.0])
    assert kl_estimate(d, "k3").tolist() == pytest.approx([0.367879, 0, 0.718282], abs=1e-5)
    assert kl_estimate(d, "k2").tolist() == [0.5, 0, 0.5]
    assert kl_estimate(d, "k1").tolist() == [1, 0, -1]


def test_a_nan_in_the_kl_stays_visible():
    for kind in get_args(KLEstimator):
        assert torch.isnan(kl_estimate(torch.tensor(float("nan")), kind))


@pytest.mark.parametrize("kind", get_args(KLEstimator))
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


@pytest.mark.parametrize("kind", get_args(KLEstimator))
def test_in_the_reward_only_k1_has_the_gradient_of_the_kl(kind):
    reference = torch.log_softmax(torch.tensor([0.3, -0.2, 1.0]), 0)
    logits = torch.tensor([1.0, 0.5, -0.5], requires_grad=True)
    policy = torch.log_softmax(logits, 0)
    (expected,) = torch.autograd.grad(
        (policy.exp() * (policy - reference)).sum(), logits, retain_graph=True
    )
    # One row of one token for each of the three actions, weighted by its probability.
    batch = make_batch([1, 1, 1], [0.0] * 3)
    penalty = kl_of_rows(policy.detach(), reference, batch, kind)
    (actual,) = torch.autograd.grad((policy.detach().exp() * penalty * policy).sum(), logits)
    assert torch.allclose(actual, expected, atol=1e-6) == (kind == "k1")


def test_kl_in_the_reward_is_no_term_of_the_loss():
    batch = make_batch([1, 2], [1.0, -2.0])  # without a column of reference logprobs
    expected = loss_of(batch, [-0.1, 0.2, 0.3])
    actual = loss_of(batch, [-0.1, 0.2, 0.3], LossConfig(kl_coef=0.5, kl_in="reward"))
    assert actual[0] == expected[0]
    assert torch.equal(actual[1], expected[1])
    assert actual[2].keys() == expected[2].keys()


@pytest.mark.parametrize("kind", get_args(KLEstimator))
def test_the_kl_term_is_that_of_tokens_whatever_the_objective_is(kind):
    batch = make_batch([1, 2], [0.0, 0.0], policy=[-1.0, -1.2, -0.8], reference=[-0.9, -1.0, -1.3])
    now = [-0.7, -1.5, -1.0]
    expected = loss_of(batch, now, LossConfig(kl_coef=0.5, kl_estimator=kind))
    for objective in OBJECTIVES.ours:
        for level in get_args(RatioLevel):
            config = LossConfig(
                kl_coef=0.5, kl_estimator=kind, objective=objective, ratio_level=level
            )
            loss, gradient, _ = loss_of(batch, now, config)
            assert loss == pytest.approx(expected[0])
            assert gradient.tolist() == pytest.approx(expected[1].tolist())


# Ratios, objectives, entropy.


def test_a_ratio_of_a_sequence_has_gradient_through_all_of_its_tokens():
    # Ratios e^0.1 and e^-0.1 of the rows; row 2 has advantage -2, neither is clipped.
    batch = make_batch([2, 3], [1.0, -2.0])
    config = LossConfig(ratio_level="sequence", normalization="sequence")
    loss, gradient, metrics = loss_of(batch, [0.4, -0.2, -0.3, -0.3, 0.3], config)
    first, second = math.exp(0.1), math.exp(-0.1)
    assert loss == pytest.approx(-(first - 2 * second) / 2)
    # d/dx of -s A / 2, where s = exp(mean x): -s A / (2 * length).
    expected = [-first / 4] * 2 + [2 * second / 6] * 3
    assert gradient.tolist() == pytest.approx(expected)
    assert metrics["train/clip_share"].value == 0


def test_a_clipped_sequence_has_no_gradient_at_all():
    batch = make_batch([2, 1], [1.0, 1.0])
    config = LossConfig(ratio_level="sequence", clip_high=0.2)
    # Mean log ratio 0.3, ratio 1.35, though its second token alone is below 1.
    loss, gradient, metrics = loss_of(batch, [1.0, -0.4, 0.0], config)
    assert loss == pytest.approx(-(1.2 + 1.2 + 1) / 3)
    assert gradient.tolist() == pytest.approx([0, 0, -1 / 3])
    assert metrics["train/clip_share"].value == pytest.approx(2 / 3)


def test_cispo_bounds_the_weight_of_a_token_and_keeps_its_gradient():
    batch = make_batch([4], [1.0], policy=[-1.0] * 4)
    now = [-1 + math.log(r) for r in (3.0, 0.1, 1.1, 1.0)]
    bounded = LossConfig(objective="cispo", clip_low=0.5, clip_high=0.28)
    _, gradient, metrics = loss_of(batch, now, bounded)
    assert gradient.tolist() == pytest.approx([-w / 4 for w in (1.28, 0.5, 1.1, 1.0)])
    assert metrics["train/clip_share"].value == 0.5
    open_below = LossConfig(objective="cispo", clip_low=None, clip_high=0.28)
    _, gradient, _ = loss_of(batch, now, open_below)
    assert gradient.tolist() == pytest.approx([-w / 4 for w in (1.28, 0.1, 1.1, 1.0)])


def test_reinforce_ignores_the_ratio_and_counts_no_clips():
    batch = make_batch([2], [2.0], policy=[-1.0, -1.0])
    loss, gradient, metrics = loss_of(batch, [-3.0, -0.5], LossConfig(objective="reinforce"))
    assert loss == pytest.approx(2 * 3.5 / 2)
    assert gradient.tolist() == [-1, -1]
    assert "train/clip_share" not in metrics


def test_without_bounds_the_surrogate_is_the_plain_ratio():
    batch = make_batch([2], [1.0])
    config = LossConfig(clip_low=None, clip_high=None)
    loss, gradient, metrics = loss_of(batch, [math.log(5), math.log(0.1)], config)
    assert loss == pytest.approx(-5.1 / 2)
    assert gradient.tolist() == pytest.approx([-2.5, -0.05])
    assert metrics["train/clip_share"].value == 0


def test_beyond_the_dual_clip_a_token_has_no_gradient_and_is_counted():
    batch = make_batch([1, 1], [-1.0, 1.0])
    _, gradient, metrics = loss_of(batch, [math.log(10), 0.0], LossConfig(dual_clip=3.0))
    assert gradient.tolist() == [0, -0.5]
    assert metrics["train/clip_share"].value == 0.5


def test_the_dual_clip_bounds_no_token_with_a_positive_advantage():
    batch = make_batch([1, 1], [1.0, -1.0])
    config = LossConfig(dual_clip=3.0, clip_high=None)
    _, gradient, metrics = loss_of(batch, [math.log(4), math.log(4)], config)
    assert gradient.tolist() == [-2, 0]
    assert metrics["train/clip_share"].value == 0.5


def test_bounds_of_importance_weights_belong_to_what_they_bound():
    # Engine and policy agree: w is 1.
    batch = make_batch([2], [1.0])
    for floor, cap in ((1.0, 2.0), (0.5, 1.0)):
        config = LossConfig(importance=MASK, importance_floor=floor, importance_cap=cap)
        loss, _, metrics = loss_of(batch, [0.0, 0.0], config)
        assert loss == pytest.approx(-1)
        assert metrics["mismatch/clipped_share"].value == 0


def test_each_token_can_have_its_own_advantage():
    batch = make_batch([2, 2], [9.0, 9.0], mask=[True, True, True, False])
    batch.tokens[keys.ADVANTAGES] = torch.tensor([1.0, 2.0, -4.0, float("nan")])
    loss, gradient, _ = loss_of(batch, [0.0] * 4)
    assert loss == pytest.approx((-1 - 2 + 4) / 3)
    assert gradient.tolist() == pytest.approx([-1 / 3, -2 / 3, 4 / 3, 0])


@pytest.mark.parametrize("normalization", get_args(Normalization))
def test_the_entropy_bonus_has_the_mean_and_the_weights_of_the_policy_term(normalization):
    config = LossConfig(
        entropy_coef=0.5, normalization=normalization, constant_tokens=4, importance_cap=1.5
    )
    logprob_diff = [math.log(2), 0.0, math.log(0.5)]  # of which the first weight is cut to 1.5
    batch = make_batch([2, 1], [0.0, 0.0], policy=logprob_diff, generation=[0.0] * 3)
    entropies = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss, metrics = apply_loss(
        ClippedPGLoss(config),
        torch.stack([torch.tensor(logprob_diff), entropies]),
        batch,
        denominators_of(batch),
    )
    (gradient,) = torch.autograd.grad(loss, entropies)
    shares = {"token": [1 / 3] * 3, "sequence": [0.25, 0.25, 0.5], "constant": [1 / 8] * 3}
    expected = [-0.5 * w * s for w, s in zip((1.5, 1, 0.5), shares[normalization], strict=True)]
    assert gradient.tolist() == pytest.approx(expected)
    assert loss.item() == pytest.approx(
        sum(g * h for g, h in zip(expected, (1, 2, 3), strict=True))
    )
    assert metrics["train/entropy"].value == 2
    assert metrics["train/policy_loss"].value == 0


def test_only_a_loss_that_needs_entropies_is_given_them():
    batch = make_batch([1], [1.0])
    seen = []

    def loss(logprobs, batch, denominators):
        seen.append(keys.ENTROPIES in batch.tokens)
        return logprobs.sum(), {}

    loss.needs = Needs()
    apply_loss(loss, torch.zeros(2, 1), batch, denominators_of(batch))
    loss.needs = Needs(entropy=True)
    apply_loss(loss, torch.zeros(2, 1), batch, denominators_of(batch))
    assert seen == [False, True]
    assert keys.ENTROPIES not in batch.tokens  # which would keep the graph of every micro-batch


# Supervised fine-tuning.


def test_cross_entropy_is_the_mean_over_all_trained_tokens():
    mask = [False, True, True, True, False, True]
    batch = make_batch([2, 4], [0.0, 0.0], mask=mask)
    logprobs = [math.log(p) for p in (0.9, 0.5, 0.25, 0.5, 0.1, 0.125)]
    loss, gradient, metrics = apply(CrossEntropyLoss(), batch, logprobs)
    assert loss == pytest.approx((1 + 2 + 1 + 3) * math.log(2) / 4)
    assert gradient.tolist() == [0, -0.25, -0.25, -0.25, 0, -0.25]
    assert metrics["train/loss"].value == metrics["train/nll"].value == pytest.approx(loss)
    assert metrics["train/nll"].weight == 4


def test_the_nll_is_of_this_micro_batch_and_the_loss_a_share_of_the_whole():
    batch = make_batch([2], [0.0])
    whole = Denominators(tokens=8.0, sequences=3.0)
    loss, _, metrics = apply(CrossEntropyLoss(), batch, [-1.0, -3.0], whole)
    assert loss == 0.5
    assert metrics["train/loss"].value == 0.5
    assert metrics["train/nll"].value == 2


# Rules of the configuration.


def several_updates(**sections):
    """In the only step on a batch ratios are 1, and bounds of them have no effect."""
    return accept(GRPOConfig, grpo={"num_mini_batches": 2}, **sections)


@pytest.mark.parametrize(
    ("loss", "advantage", "message"),
    [
        ({"clip_low": 1.5}, {}, "loss.clip_low=1.5 must be in [0, 1]"),
        ({"clip_high": -0.1}, {}, "loss.clip_high=-0.1 must be at least 0"),
        ({"dual_clip": 1.0}, {}, "loss.dual_clip=1.0 must be above 1"),
        ({"entropy_coef": -1.0}, {}, "loss.entropy_coef=-1.0 must be at least 0"),
        ({"importance_floor": 3.0, "importance": MASK}, {}, "must be below loss.importance_cap=2"),
        (
            {"normalization": "constant", "constant_tokens": 0},
            {},
            "loss.constant_tokens=0 must be at least 1",
        ),
        ({"constant_tokens": 9}, {}, "only loss.normalization=constant divides by it"),
        ({"kl_in": "reward"}, {}, "loss.kl_coef is 0"),
        ({"kl_estimator": "k1"}, {}, "loss.kl_coef is 0"),
        ({"importance": NONE, "importance_cap": 3.0}, {}, "loss.importance=none corrects nothing"),
        ({"importance_floor": 0.1}, {}, "only loss.importance=mask has a lower bound"),
        *(
            ({"objective": "reinforce", **change}, {}, "loss.objective=reinforce has no")
            for change in (
                {"clip_low": None},
                {"clip_high": 0.3},
                {"ratio_level": "sequence"},
            )
        ),
        ({"objective": "cispo", "dual_clip": 3.0}, {}, "only loss.objective=clip has it"),
        ({}, {"overlong_buffer_tokens": 65}, "must be at most generation.max_new_tokens=64"),
    ],
)
def test_what_cannot_work_or_would_do_nothing_is_refused(loss, advantage, message):
    with pytest.raises(UserError) as error:
        several_updates(loss=loss, advantage=advantage)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "loss",
    [
        {"clip_low": None, "clip_high": None},
        {"clip_low": None, "clip_high": 4.0, "objective": "cispo"},
        {"dual_clip": 3.0, "ratio_level": "sequence"},
        {"objective": "reinforce", "importance": MASK, "importance_floor": 0.5},
        {"normalization": "constant"},
        {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    ],
    ids=str,
)
def test_combinations_that_work_are_let_through(loss):
    several_updates(loss=loss)


# What holds for every loss.

POLICY_GRADIENT = {
    f"policy_{normalization}_{estimator}": ClippedPGLoss(
        LossConfig(
            kl_coef=0.1, kl_estimator=estimator, normalization=normalization, constant_tokens=7
        )
    )
    for normalization in get_args(Normalization)
    for estimator in get_args(KLEstimator)
}
# Weights of ``random_batch`` lie on both sides of these bounds, and one row is above the limit.
CORRECTED = {
    f"{objective}_{ratio_level}_{importance}_{level}": ClippedPGLoss(
        LossConfig(
            objective=objective,
            ratio_level=ratio_level,
            dual_clip=1.3,
            importance=importance,
            importance_level=level,
            importance_cap=1.1,
            importance_floor=0.0 if importance is TRUNCATE else 0.7,
            entropy_coef=0.1,
            kl_coef=0.1,
        ),
    )
    for objective in OBJECTIVES.ours
    for ratio_level in get_args(RatioLevel)
    for importance in (TRUNCATE, MASK)
    for level in choices(LossConfig.model_fields["importance_level"].annotation)
}
LOSSES = (
    POLICY_GRADIENT
    | CORRECTED
    | {
        "cross_entropy": CrossEntropyLoss(),
        "preference": PreferenceLoss(PreferenceLossConfig(beta=0.1)),
    }
)
ROWS_PER_UNIT = {"preference": 2}
LENGTHS = [2, 6, 3, 5]
BOUNDS = [{"max_rows": 1}, {"max_rows": 2}, {"max_rows": 4}, {"max_tokens": 8}, {"min_bins": 2}]


def random_batch(sample):
    """Rows of ``LENGTHS`` with unequal columns, and logprobs to go with them."""
    torch.manual_seed(0)
    n = sum(LENGTHS)
    draw = lambda: (torch.randn(n) * 0.3 - 1).tolist()  # noqa: E731
    batch = make_batch(
        LENGTHS,
        [1.0, -1.0, 0.5, 2.0],
        policy=draw(),
        generation=draw(),
        reference=draw(),
        mask=[i % 5 != 0 for i in range(n)],
        sample=sample,
    )
    batch.tokens[keys.ENTROPIES] = torch.rand(n)
    return batch, torch.tensor(draw())


def in_parts(loss, batch, logprobs, parts):
    """Loss, gradient and merged metrics of micro-batches that hold the rows of ``parts``."""
    whole, starts = denominators_of(batch), batch.starts.tolist()
    total, gradient, metrics = 0.0, torch.zeros(len(logprobs)), []
    for rows in parts:
        at = torch.cat([torch.arange(starts[r], starts[r] + LENGTHS[r]) for r in rows])
        value, gradient[at], numbers = apply(loss, batch.select(rows), logprobs[at].tolist(), whole)
        total += value
        metrics.append(numbers)
    return total, gradient, values(merge(metrics))


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        (name, bounds)
        for name in LOSSES
        for bounds in BOUNDS
        if bounds.get("max_rows", 4) >= ROWS_PER_UNIT.get(name, 1)
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", ["none", "two"])
def test_micro_batches_add_up_to_the_whole_batch(name, bounds, masked):
    unit = ROWS_PER_UNIT.get(name, 1)
    first = masked == "none"
    batch, logprobs = random_batch([first, first, True, True])
    expected = in_parts(LOSSES[name], batch, logprobs, [range(4)])
    plan = plan_micro_batches(
        LENGTHS, num_ranks=1, rows_per_unit=unit, **{"max_tokens": 16, **bounds}
    )
    loss, gradient, metrics = in_parts(LOSSES[name], batch, logprobs, plan.bins[0])
    assert loss == pytest.approx(expected[0], abs=1e-6)
    assert torch.allclose(gradient, expected[1], rtol=0, atol=1e-6)
    assert metrics == pytest.approx(expected[2], abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_masked_rows_change_neither_loss_nor_metrics(name):
    batch, logprobs = random_batch([True, True, False, False])
    with_masked = in_parts(LOSSES[name], batch, logprobs, [range(4)])
    without = apply(LOSSES[name], batch.select([0, 1]), logprobs[:8].tolist())
    assert with_masked[0] == pytest.approx(without[0], abs=1e-7)
    assert with_masked[1][:8].tolist() == pytest.approx(without[1].tolist(), abs=1e-7)
    assert with_masked[1][8:].tolist() == [0] * 8
    assert with_masked[2] == pytest.approx(values(without[2]), abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_at_other_tokens_cannot_leak_in(name):
    batch, logprobs = random_batch([True, True, True, True])
    clean = apply(LOSSES[name], batch, logprobs.tolist())
    other = ~batch.tokens[keys.LOSS_MASK]
    for column in batch.tokens.keys() - {keys.LOSS_MASK}:
        batch.tokens[column][other] = float("nan")
    logprobs[other] = float("nan")
    dirty = apply(LOSSES[name], batch, logprobs.tolist())
    assert dirty[0] == clean[0]
    assert dirty[1].tolist() == clean[1].tolist()
    assert dirty[1][other].tolist() == [0] * int(other.sum())
    assert dirty[2] == clean[2]


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_without_trained_tokens_has_zero_loss_and_a_graph(name):
    batch, logprobs = random_batch([False] * 4)
    whole = Denominators(tokens=3.0, sequences=2.0)
    for rows in (range(4), []):
        part = batch.select(list(rows))
        loss, gradient, metrics = apply(
            LOSSES[name], part, logprobs[: part.num_tokens].tolist(), whole
        )
        assert loss == 0
        assert gradient.tolist() == [0] * part.num_tokens
        assert set(metrics) <= {"train/loss", "train/policy_loss"}
        assert {metric.value for metric in metrics.values()} == {0.0}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_float32_whatever_the_logprobs_are(name):
    batch, logprobs = random_batch([True] * 4)
    loss, _ = LOSSES[name](logprobs.bfloat16(), batch, denominators_of(batch))
    exact, _ = LOSSES[name](logprobs.bfloat16().float(), batch, denominators_of(batch))
    assert loss.dtype == torch.float32
    assert loss.item() == exact.item()
