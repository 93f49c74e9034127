"""Losses over pairs and of values: numbers worked by hand, parts against wholes, refusals."""

import math
from typing import get_args

import pytest
import torch

from nemo_like.algorithms.distillation.config import DistillationConfig
from nemo_like.algorithms.dpo.config import DPOConfig
from nemo_like.algorithms.ppo.config import PPOConfig
from nemo_like.algorithms.rm.config import RewardModelConfig
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import (
    PreferenceKind,
    PreferenceLossConfig,
    RewardModelLossConfig,
    ValueLossConfig,
)
from nemo_like.errors import UserError
from nemo_like.losses.preference import PreferenceLoss, RewardModelLoss, pair_loss, sigmoid_loss
from nemo_like.losses.protocol import Denominators
from nemo_like.losses.value import ValueLoss, explained_variance
from nemo_like.observe.metrics import merge, values
from tests.small_runs import accept

SIGMOID, IPO, HINGE, ROBUST = get_args(PreferenceKind)
NAN = math.nan


def make_batch(lengths, *, mask=None, sample=None, **columns):
    """Rows of ``lengths`` tokens; ``columns`` are token columns by name."""
    n = sum(lengths)
    tokens = {name: torch.tensor(column) for name, column in columns.items()}
    tokens[keys.LOSS_MASK] = torch.tensor(mask if mask else [True] * n)
    sample = torch.tensor(sample if sample else [True] * len(lengths))
    return TensorBatch(
        lengths=torch.tensor(lengths), tokens=tokens, rows={keys.SAMPLE_MASK: sample}
    )


def denominators_of(batch):
    trained = batch.tokens[keys.LOSS_MASK] & batch.rows[keys.SAMPLE_MASK][batch.row_of_token]
    rows = batch.row_of_token[trained].unique()
    return Denominators(tokens=float(trained.sum()), sequences=float(len(rows)))


def apply(function, batch, output, denominators=None):
    """Loss, its gradient with respect to ``output``, and metrics by name."""
    output = torch.tensor(output, requires_grad=True)
    loss, metrics = function(output, batch, denominators or denominators_of(batch))
    (gradient,) = torch.autograd.grad(loss, output)
    return loss.item(), gradient, metrics


def numbers(metrics):
    return {name: metric.value for name, metric in metrics.items()}


# The loss of a margin.


@pytest.mark.parametrize(
    ("margin", "beta", "expected"),
    [(2.0, 0.1, 0.598139), (0.0, 0.1, 0.693147), (-2.0, 0.1, 0.798139), (-1e4, 1.0, 1e4)],
)
def test_sigmoid_loss_by_margin(margin, beta, expected):
    assert sigmoid_loss(torch.tensor(margin), beta).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("config", "margin", "expected", "slope"),
    [
        ({"kind": SIGMOID}, 2.0, 0.598139, -0.1 / (1 + math.exp(0.2))),
        ({"kind": SIGMOID}, 0.0, 0.693147, -0.05),
        ({"kind": HINGE}, 2.0, 0.8, -0.1),
        ({"kind": HINGE}, 11.0, 0.0, 0.0),
        ({"kind": IPO}, 2.0, 9.0, -6.0),
        ({"kind": IPO}, 5.0, 0.0, 0.0),
        # beta * margin - target = 0.2 - 0.5 = -0.3.
        ({"target_margin": 0.5}, 2.0, math.log1p(math.exp(0.3)), -0.1 / (1 + math.exp(-0.3))),
        ({"kind": HINGE, "target_margin": 0.5}, 2.0, 1.3, -0.1),
        # The wrong way round the sigmoid loss is 0.798139, hinge 1.2, ipo 49.
        ({"label_smoothing": 0.25}, 2.0, 0.75 * 0.598139 + 0.25 * 0.798139, None),
        ({"kind": HINGE, "label_smoothing": 0.25}, 2.0, 0.9, -0.05),
        ({"kind": IPO, "label_smoothing": 0.25}, 2.0, 19.0, -1.0),
        ({"kind": ROBUST, "label_smoothing": 0.25}, 2.0, 0.498139, None),
    ],
    ids=str,
)
def test_pair_loss_by_hand(config, margin, expected, slope):
    margin = torch.tensor(margin, requires_grad=True)
    loss = pair_loss(margin, PreferenceLossConfig(beta=0.1, **config))
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    if slope is not None:
        assert torch.autograd.grad(loss, margin)[0].item() == pytest.approx(slope, abs=1e-6)


def test_the_robust_loss_over_wrong_labels_is_the_loss_of_right_ones():
    share = 0.2
    noisy = PreferenceLossConfig(kind=ROBUST, label_smoothing=share)
    margin = torch.tensor([-3.0, 0.5, 4.0])
    expected = (1 - share) * pair_loss(margin, noisy) + share * pair_loss(-margin, noisy)
    assert torch.allclose(expected, pair_loss(margin, PreferenceLossConfig()), atol=1e-5)


# Preference pairs.


def preference(**config):
    return PreferenceLoss(PreferenceLossConfig(beta=0.1, **config))


def one_pair():
    """Log ratios: chosen (-1 + 2) + (-1 + 1.5) = 1.5, rejected -2 + 1.5 = -0.5; margin 2."""
    mask = [False, True, True, False, True]
    batch = make_batch([3, 2], mask=mask, reference_logprobs=[9.0, -2.0, -1.5, 9.0, -1.5])
    return batch, [0.0, -1.0, -1.0, 0.0, -2.0]


def test_preference_loss_of_one_pair_by_hand():
    loss, gradient, metrics = apply(preference(), *one_pair())
    assert loss == pytest.approx(0.598139, abs=1e-6)
    slope = 0.1 / (1 + math.exp(0.2))  # beta * sigmoid(-beta * margin)
    assert gradient.tolist() == pytest.approx([0, -slope, -slope, 0, slope])
    assert numbers(metrics) == pytest.approx(
        {
            "train/loss": loss,
            "train/accuracy": 1,
            "train/reward_margin": 0.2,
            "train/chosen_reward": 0.15,
            "train/rejected_reward": -0.05,
            "train/chosen_logprob": -2,
            "train/rejected_logprob": -2,
        }
    )


@pytest.mark.parametrize(
    ("config", "margin"),
    [
        ({"length_normalized": True}, 0.75 + 0.5),
        ({"reference_free": True}, -2.0 + 2.0),
        ({"reference_free": True, "length_normalized": True}, -1.0 + 2.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", get_args(PreferenceKind))
def test_log_ratios_by_hand(config, margin, kind):
    batch, logprobs = one_pair()
    if config.get("reference_free"):
        del batch.tokens[keys.REFERENCE_LOGPROBS]
    loss, _, metrics = apply(preference(kind=kind, **config), batch, logprobs)
    expected = pair_loss(torch.tensor(margin), PreferenceLossConfig(kind=kind, beta=0.1))
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["train/reward_margin"].value == pytest.approx(0.1 * margin, abs=1e-6)


def test_a_tie_is_no_win():
    batch = make_batch([1, 1], reference_logprobs=[0.0, 0.0])
    assert apply(preference(), batch, [-1.0, -1.0])[2]["train/accuracy"].value == 0


def test_preference_loss_and_metrics_are_means_over_pairs_not_tokens():
    # Margins 2 and -2, of rows of unequal length.
    batch = make_batch([1, 1, 4, 1], reference_logprobs=[0.0] * 7)
    logprobs = [1.0, -1.0, -0.5, -0.5, -0.5, -0.5, 0.0]
    loss, _, metrics = apply(preference(), batch, logprobs)
    assert loss == pytest.approx((0.598139 + 0.798139) / 2, abs=1e-6)
    assert metrics["train/accuracy"].value == 0.5
    assert metrics["train/accuracy"].weight == 2
    assert metrics["train/reward_margin"].value == pytest.approx(0)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("kind", get_args(PreferenceKind))
def test_the_sft_term_is_the_mean_nll_of_the_chosen_tokens_whatever_the_variant(kind, normalized):
    # The chosen row's logprobs add up to -6 over 3 tokens: a term of 2, once, not divided again.
    batch = make_batch([3, 1], reference_logprobs=[-1.0] * 4)
    logprobs = [-1.0, -2.0, -3.0, -1.0]
    config = {"kind": kind, "length_normalized": normalized}
    plain, slope, _ = apply(preference(**config), batch, logprobs)
    loss, gradient, metrics = apply(preference(**config, sft_coef=0.5), batch, logprobs)
    assert loss - plain == pytest.approx(0.5 * 2, abs=1e-5)
    assert (gradient - slope).tolist() == pytest.approx([-0.5 / 3] * 3 + [0], abs=1e-6)
    assert metrics["train/chosen_nll"].value == pytest.approx(2)
    assert metrics["train/preference_loss"].value == pytest.approx(plain)
    assert metrics["train/loss"].value == pytest.approx(loss)


def test_the_sft_term_is_a_mean_over_pairs():
    batch = make_batch([1, 1, 3, 1])
    loss_of = preference(reference_free=True, sft_coef=1.0)
    _, _, metrics = apply(loss_of, batch, [-8.0, -1.0, -1.0, -2.0, -3.0, -1.0])
    assert metrics["train/chosen_nll"].value == pytest.approx((8 + 2) / 2)


def test_half_a_pair_is_refused():
    batch = make_batch([1, 1], reference_logprobs=[0.0] * 2, sample=[True, False])
    with pytest.raises(AssertionError, match="only one row of a pair"):
        apply(preference(), batch, [0.0, 0.0])
    with pytest.raises(AssertionError, match="1 rows do not make pairs"):
        apply(preference(), batch.select([0]), [0.0])


# Reward model.


def reward_model(**config):
    return RewardModelLoss(RewardModelLossConfig(**config))


@pytest.mark.parametrize(
    ("config", "expected", "slopes"),
    [
        # Scores 1.5 and -0.5 differ by 2: -log sigmoid(2) = 0.126928, sigmoid(-2) = 0.119203.
        ({}, 0.126928, (-0.119203, 0.119203)),
        # + 0.1 * (1.5 - 0.5)^2, with slope 0.2 on both.
        ({"center_coef": 0.1}, 0.226928, (0.080797, 0.319203)),
        # The wrong way round: -log sigmoid(-2) = 2.126928.
        ({"label_smoothing": 0.25}, 0.626928, (0.130797, -0.130797)),
    ],
    ids=str,
)
def test_reward_model_loss_by_hand_reads_the_last_tokens(config, expected, slopes):
    # What the head says elsewhere, and whether a last token trains, is of no matter.
    batch = make_batch([3, 2], mask=[False, True, True, True, False])
    loss, gradient, metrics = apply(reward_model(**config), batch, [NAN, NAN, 1.5, NAN, -0.5])
    assert loss == pytest.approx(expected, abs=1e-6)
    assert gradient.tolist() == pytest.approx([0, 0, slopes[0], 0, slopes[1]], abs=1e-6)
    assert numbers(metrics) == pytest.approx(
        {
            "train/loss": loss,
            "train/accuracy": 1,
            "train/reward_margin": 2,
            "train/chosen_reward": 1.5,
            "train/rejected_reward": -0.5,
        }
    )


def test_equal_scores_are_no_win_and_cost_log_2():
    loss, _, metrics = apply(reward_model(), make_batch([1, 1]), [3.0, 3.0])
    assert loss == pytest.approx(math.log(2))
    assert metrics["train/accuracy"].value == 0


# Values.


@pytest.mark.parametrize(
    ("value", "before", "target", "expected", "slope", "clipped"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9, False),  # within the bounds: (1 - 0.1)^2 / 2
        (0.5, 0.0, 1.0, 0.32, 0.0, True),  # too far towards the return: (1 - 0.2)^2 / 2
        (-0.5, 0.0, 1.0, 1.125, -1.5, False),  # too far away from it: still pulled back
        (1.5, 0.0, 0.1, 0.98, 1.4, False),  # beyond the return: pulled back
        (-0.5, 0.0, -1.0, 0.32, 0.0, True),  # the same downwards: (-1 + 0.2)^2 / 2
    ],
)
def test_a_value_that_has_moved_far_enough_towards_its_return_stops(
    value, before, target, expected, slope, clipped
):
    batch = make_batch([1], values=[before], returns=[target])
    loss, gradient, metrics = apply(ValueLoss(ValueLossConfig(clip=0.2)), batch, [value])
    assert loss == pytest.approx(expected, abs=1e-6)
    assert gradient.item() == pytest.approx(slope, abs=1e-6)
    assert metrics["train/clip_share"].value == clipped


def test_without_a_clip_old_values_are_not_needed():
    batch = make_batch([2, 1], returns=[1.0, 1.0, 0.0])
    loss, gradient, metrics = apply(ValueLoss(ValueLossConfig(clip=None)), batch, [0.0, 3.0, 1.0])
    assert loss == pytest.approx((1 + 4 + 1) / 2 / 3)
    assert gradient.tolist() == pytest.approx([-1 / 3, 2 / 3, 1 / 3])
    assert "train/clip_share" not in metrics


def test_explained_variance_of_parts_is_that_of_the_whole():
    torch.manual_seed(0)
    returns, value = torch.randn(8) + 3, torch.randn(8)
    whole = make_batch([1, 3, 2, 2], values=value.tolist(), returns=returns.tolist())
    loss_of, denominators = ValueLoss(ValueLossConfig()), denominators_of(whole)
    parts = [
        apply(loss_of, whole.select(rows), value[at].tolist(), denominators)[2]
        for rows, at in (([0], [0]), ([1, 2], range(1, 6)), ([3], [6, 7]))
    ]
    expected = 1 - (returns - value).var(correction=0) / returns.var(correction=0)
    assert explained_variance(values(merge(parts))) == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("same", [0.95, 0.35, -7.3])
def test_equal_returns_that_float32_rounds_leave_nothing_to_explain_either(same):
    torch.manual_seed(0)
    value = torch.randn(100).tolist()
    batch = make_batch([100], values=value, returns=[same] * 100)
    metrics = apply(ValueLoss(ValueLossConfig()), batch, value, denominators_of(batch))[2]
    assert math.isnan(explained_variance(values(metrics)))  # -4e8 for 0.95, if taken at its word


def test_constant_returns_leave_nothing_to_explain():
    batch = make_batch([2], values=[0.0, 0.0], returns=[1.0, 1.0])
    _, _, metrics = apply(ValueLoss(ValueLossConfig()), batch, [0.0, 1.0])
    assert math.isnan(explained_variance(values(metrics)))


# What holds for all of them.

LOSSES = {
    f"preference_{kind}": preference(kind=kind, label_smoothing=0.1, sft_coef=0.3)
    for kind in get_args(PreferenceKind)
} | {
    "simpo": preference(reference_free=True, length_normalized=True, target_margin=0.4),
    "reward_model": reward_model(center_coef=0.1, label_smoothing=0.1),
    "value": ValueLoss(ValueLossConfig(clip=0.2)),
}
LENGTHS = [2, 6, 3, 5, 4, 1, 2, 2]


def random_batch(sample):
    """Four pairs of unequal rows, and an output of the model to go with them."""
    torch.manual_seed(0)
    n = sum(LENGTHS)
    draw = lambda: (torch.randn(n) * 0.5 - 1).tolist()  # noqa: E731
    mask = [i not in (0, 2, 8, 11, 16) for i in range(n)]
    columns = {name: draw() for name in (keys.REFERENCE_LOGPROBS, keys.VALUES, keys.RETURNS)}
    return make_batch(LENGTHS, mask=mask, sample=sample, **columns), torch.tensor(draw())


def in_parts(loss_of, batch, output, parts):
    """Loss, gradient and merged metrics of micro-batches that hold the rows of ``parts``."""
    whole, starts = denominators_of(batch), batch.starts.tolist()
    total, gradient, metrics = 0.0, torch.zeros(len(output)), []
    for rows in parts:
        at = torch.cat([torch.arange(starts[r], starts[r] + LENGTHS[r]) for r in rows])
        value, gradient[at], part = apply(loss_of, batch.select(rows), output[at].tolist(), whole)
        total += value
        metrics.append(part)
    return total, gradient, values(merge(metrics))


PAIR_MASKED = [True, True, False, False, True, True, True, True]


@pytest.mark.parametrize("sample", [[True] * 8, PAIR_MASKED], ids=["all", "one pair masked"])
@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_to_the_whole_batch(name, num_parts, sample):
    batch, output = random_batch(sample)
    expected = in_parts(LOSSES[name], batch, output, [range(8)])
    size = 8 // num_parts
    parts = [range(i, i + size) for i in range(0, 8, size)]
    loss, gradient, metrics = in_parts(LOSSES[name], batch, output, parts)
    assert loss == pytest.approx(expected[0], rel=1e-6, abs=1e-6)
    assert torch.allclose(gradient, expected[1], rtol=0, atol=1e-6)
    assert metrics == pytest.approx(expected[2], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_masked_pair_counts_nowhere_even_if_it_is_nan(name):
    batch, output = random_batch(PAIR_MASKED)
    without = apply(
        LOSSES[name],
        batch.select([0, 1, 4, 5, 6, 7]),
        torch.cat([output[:8], output[16:]]).tolist(),
    )
    for column in (keys.REFERENCE_LOGPROBS, keys.VALUES, keys.RETURNS):
        batch.tokens[column][8:16] = NAN
    output[8:16] = NAN
    loss, gradient, metrics = apply(LOSSES[name], batch, output.tolist())
    assert loss == pytest.approx(without[0], abs=1e-7)
    assert gradient[8:16].tolist() == [0] * 8
    assert torch.equal(torch.cat([gradient[:8], gradient[16:]]), without[1])
    assert numbers(metrics) == pytest.approx(numbers(without[2]), abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_without_trained_rows_has_zero_loss_and_a_graph(name):
    batch, output = random_batch([False] * 8)
    whole = Denominators(tokens=3.0, sequences=2.0)
    for rows in (range(8), []):
        part = batch.select(list(rows))
        loss, gradient, metrics = apply(
            LOSSES[name], part, output[: part.num_tokens].tolist(), whole
        )
        assert loss == 0
        assert gradient.tolist() == [0] * part.num_tokens
        assert set(metrics) <= {"train/loss", "train/preference_loss"}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_float32_whatever_the_model_gives(name):
    batch, output = random_batch([True] * 8)
    loss, _ = LOSSES[name](output.bfloat16(), batch, denominators_of(batch))
    exact, _ = LOSSES[name](output.bfloat16().float(), batch, denominators_of(batch))
    assert loss.dtype == torch.float32
    assert loss.item() == exact.item()


# Refusals.


def dpo_run(**loss):
    return DPOConfig, {"loss": loss}


def reward_model_run(**loss):
    return RewardModelConfig, {"loss": loss}


def ppo_run(**loss):
    """Values are clipped from the second update on."""
    return PPOConfig, {"value_loss": loss, "ppo": {"num_mini_batches": 2}}


def distillation_run(**loss):
    return DistillationConfig, {"loss": loss, "teacher": {"model": "embedded"}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dpo_run(beta=0.0), "loss.beta=0.0 must be above 0"),
        (dpo_run(sft_coef=-1.0), "loss.sft_coef=-1.0 must be"),
        (dpo_run(label_smoothing=0.5), "must be in [0, 0.5); if most"),
        (dpo_run(kind=ROBUST), "loss.kind=robust would be sigmoid: set loss.label_smoothing too"),
        (
            dpo_run(kind=IPO, target_margin=0.5),
            "loss.target_margin=0.5 would have no effect: loss.kind=ipo aims at",
        ),
        (reward_model_run(center_coef=-0.1), "loss.center_coef=-0.1"),
        (reward_model_run(center_coef=math.inf), "loss.center_coef=inf"),
        (reward_model_run(label_smoothing=NAN), "loss.label_smoothing=nan must be a finite"),
        (ppo_run(clip=0.0), "value_loss.clip=0.0 must be above 0"),
        (distillation_run(kind="jsd", alpha=1.0), "loss.alpha=1.0 must be in"),
        (
            distillation_run(alpha=0.3),
            "loss.alpha=0.3 would have no effect: forward_kl and reverse_kl have one side",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_or_has_no_effect_is_refused_by_name(given, message):
    with pytest.raises(UserError) as refusal:
        accept(given[0], **given[1])
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("schema", "sections"),
    [
        dpo_run(),
        dpo_run(kind=HINGE, target_margin=0.5, label_smoothing=0.1),
        reward_model_run(),
        ppo_run(),
        ppo_run(clip=None),
        distillation_run(),
        distillation_run(kind="jsd", alpha=0.1),
    ],
    ids=str,
)
def test_defaults_and_their_combinations_pass(schema, sections):
    accept(schema, **sections)
