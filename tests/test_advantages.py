"""Advantages: values worked by hand, in the cases that users of such systems have tripped over."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.advantages import AdvantageConfig
from nemo_like.config.section import choices
from nemo_like.losses.advantages import (
    group_advantages,
    has_signal,
    overlong_penalty,
    whiten,
    zero_variance_share,
)
from nemo_like.losses.value import gae

LOO_STD = AdvantageConfig(baseline="leave_one_out", scale="std")
LOO = AdvantageConfig(baseline="leave_one_out", scale="none")
MEAN_STD = AdvantageConfig(baseline="mean", scale="std")
MEAN = AdvantageConfig(baseline="mean", scale="none")
REINFORCE = AdvantageConfig(baseline="none", scale="none")
REINFORCE_PLUS_PLUS = AdvantageConfig(baseline="none", scale="batch")
MEAN_BATCH = AdvantageConfig(baseline="mean", scale="batch")
LOO_BATCH = AdvantageConfig(baseline="leave_one_out", scale="batch")
EVERY = [
    AdvantageConfig(baseline=baseline, scale=scale)
    for baseline in choices(AdvantageConfig.model_fields["baseline"].annotation)
    for scale in choices(AdvantageConfig.model_fields["scale"].annotation)
]


def advantages(rewards, config, groups=None, valid=None):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.zeros(len(rewards)) if groups is None else torch.tensor(groups)
    valid = torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)
    return group_advantages(rewards, groups, valid, config).tolist()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MEAN, [0.75, -0.25, -0.25, -0.25]),
        (MEAN_STD, [1.5, -0.5, -0.5, -0.5]),
        (LOO, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # Others of row 0 are all equal: no deviation, so its advantage stays 1. Others of row 1 are
        # [1, 0, 0]: deviation 0.57735.
        (LOO_STD, [1.0, -0.57735, -0.57735, -0.57735]),
    ],
)
def test_one_success_in_four(config, expected):
    assert advantages([1, 0, 0, 0], config) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.95, 0.35, 0.4, 0.3])
def test_equal_rewards_leave_no_residue_to_divide_by(value, dtype):
    """Seven times 0.95, or 0.4, have a mean in float64 that is not quite theirs."""
    rewards = torch.tensor([0.0] + [value] * 7, dtype=dtype).tolist()
    first, *others = advantages(rewards, LOO_STD)
    assert first == pytest.approx(-value)
    assert others == pytest.approx([0.377964] * 7, abs=1e-5)


def test_statistics_are_taken_within_the_prompt_in_any_row_order():
    grouped = advantages([1, 0, 1, 1], MEAN_STD, groups=[0, 0, 1, 1])
    assert grouped == pytest.approx([0.707107, -0.707107, 0, 0], abs=1e-5)
    interleaved = advantages([1, 1, 0, 1], MEAN_STD, groups=[0, 1, 0, 1])
    assert interleaved == pytest.approx([0.707107, 0, -0.707107, 0], abs=1e-5)


def test_failed_rows_take_no_part_in_any_statistic():
    nan = float("nan")
    for config in EVERY:
        with_failure = advantages([1, nan, 0, 0], config, valid=[True, False, True, True])
        without = advantages([1, 0, 0], config)
        assert with_failure == pytest.approx([without[0], 0.0, *without[1:]])


def test_a_lone_valid_row_has_no_baseline_and_no_advantage():
    nan = float("nan")
    assert advantages([1, nan], LOO_STD, valid=[True, False]) == [0.0, 0.0]
    assert advantages([1, nan], MEAN_STD, valid=[True, False]) == [0.0, 0.0]


def test_equal_rewards_carry_no_signal_and_are_counted():
    for config in (MEAN, MEAN_STD, LOO, LOO_STD, MEAN_BATCH, LOO_BATCH, REINFORCE_PLUS_PLUS):
        assert advantages([0.3] * 8, config) == pytest.approx([0.0] * 8)
    valid = torch.ones(4, dtype=torch.bool)
    groups = torch.tensor([0, 0, 1, 1])
    assert zero_variance_share(torch.tensor([1.0, 0, 1, 1]), groups, valid) == 0.5
    assert zero_variance_share(torch.ones(4), groups, valid) == 1.0


@pytest.mark.parametrize("reward", [0.1, -0.1, 0.7, -3.3])
def test_equal_rewards_have_no_advantage_whatever_their_sign_and_number(reward):
    for config, count in itertools.product((MEAN, MEAN_STD, LOO, LOO_STD, MEAN_BATCH), (3, 6, 7)):
        assert advantages([reward] * count, config) == [0.0] * count


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8), st.floats(-100, 100))
def test_adding_a_constant_to_all_rewards_changes_nothing(rewards, shift):
    for config in (MEAN, LOO):
        shifted = advantages([r + shift for r in rewards], config)
        assert shifted == pytest.approx(advantages(rewards, config), abs=1e-4)


def test_without_a_baseline_a_group_may_have_one_row():
    rewards, groups = [1.0, 0.0, 3.0], [0, 1, 2]
    assert advantages(rewards, REINFORCE, groups) == rewards
    # Mean 4/3, squares 1/9 + 16/9 + 25/9 = 42/9, deviation sqrt(21/9).
    expected = [x / 21**0.5 for x in (-1, -4, 5)]
    assert advantages(rewards, REINFORCE_PLUS_PLUS, groups) == pytest.approx(expected)


@pytest.mark.parametrize("config", [MEAN_BATCH, LOO_BATCH, REINFORCE_PLUS_PLUS], ids=str)
def test_a_step_of_one_scale_has_mean_zero_and_deviation_one(config):
    rewards = torch.rand(24, generator=torch.Generator().manual_seed(0)).tolist()
    scaled = torch.tensor(advantages(rewards, config, groups=[i % 6 for i in range(24)]))
    assert scaled.mean().item() == pytest.approx(0, abs=1e-6)
    assert scaled.std().item() == pytest.approx(1, abs=1e-6)


def test_rounding_that_a_baseline_leaves_is_not_scaled_up_by_the_step():
    # Groups of equal rewards whose float64 means are off by some 1e-17, and nothing else.
    rewards = [0.1] * 6 + [0.7] * 6
    assert advantages(rewards, MEAN_BATCH, groups=[0] * 6 + [1] * 6) == [0.0] * 12


def test_rounding_is_not_whitened_into_a_signal():
    # 0.1 + 0.2 is 0.30000000000000004: two equal rewards, added up in another order.
    nearly = torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.1 + 0.2], dtype=torch.float64)
    every = torch.ones(4, dtype=torch.bool)
    assert 0 < nearly.std() < 1e-15
    assert whiten(nearly, every).abs().max() < 1e-15
    rewards = [*nearly.tolist(), 5.0]
    assert advantages(rewards[:4], REINFORCE_PLUS_PLUS) == pytest.approx([0] * 4, abs=1e-15)


@pytest.mark.parametrize("sign", [1, -1])
def test_small_differences_between_large_rewards_are_a_signal(sign):
    rewards = [sign * reward for reward in (1000.0, 1000.01, 1000.0, 1000.01)]
    groups, every = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    root = math.sqrt(3) / 2  # of (x - mean) / deviation: 0.005 / sqrt(4 * 0.005^2 / 3)
    expected = [-sign * root, sign * root] * 2
    for config in (MEAN_STD, REINFORCE_PLUS_PLUS, MEAN_BATCH):
        assert advantages(rewards, config) == pytest.approx(expected, rel=1e-5)
    assert has_signal(torch.tensor(rewards, dtype=torch.float64), groups, every).all()
    assert advantages(rewards, MEAN) == pytest.approx([-sign * 0.005, sign * 0.005] * 2, rel=1e-5)


# Groups that carry a signal, and shaped rewards.


def test_a_penalty_for_length_makes_no_signal_where_every_answer_is_wrong():
    raw = torch.zeros(4, dtype=torch.float64)
    groups, valid = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    shaped = raw + overlong_penalty(torch.tensor([3, 4, 9, 10]), 10, 4)
    assert shaped.tolist() == [0, 0, -0.75, -1]
    assert not has_signal(raw, groups, valid).any()
    assert has_signal(shaped, groups, valid).all()
    assert has_signal(torch.tensor([1.0, 0, 0, 0]), groups, valid).all()


def test_only_scored_rows_make_a_signal_and_it_is_that_of_the_whole_group():
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, 0.0, 1.0, nan, 1.0, nan])
    groups = torch.tensor([7, 7, 7, 3, 3, 3, 5])
    valid = ~rewards.isnan()
    assert has_signal(rewards, groups, valid).tolist() == [True] * 3 + [False] * 4
    assert zero_variance_share(rewards, groups, valid) == 0.5  # group 5 has no reward at all
    assert math.isnan(zero_variance_share(rewards, groups, torch.zeros_like(valid)))


@pytest.mark.parametrize("value", [0.95, 0.1, -3.3])
def test_float32_rewards_that_were_equal_stay_equal(value):
    rewards = torch.full((8,), value, dtype=torch.float32)
    assert not has_signal(rewards, torch.zeros(8), torch.ones(8, dtype=torch.bool)).any()


# Advantages along a row.


def plain_gae(rewards, values, mask, lengths, gamma, lam):
    """The recursion of the paper, a row and a trained token at a time."""
    advantages, start = [0.0] * len(rewards), 0
    for length in lengths:
        trained = [t for t in range(start, start + length) if mask[t]]
        edges = [*trained, start + length]
        earned = [sum(rewards[a:b]) for a, b in itertools.pairwise(edges)]
        after = next_value = 0.0
        for t, reward in reversed(list(zip(trained, earned, strict=True))):
            after = reward + gamma * next_value - values[t] + gamma * lam * after
            advantages[t], next_value = after, values[t]
        start += length
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.0, 1.0), (1.0, 0.0)])
def test_gae_is_the_plain_recursion_over_trained_tokens(gamma, lam):
    generator = torch.Generator().manual_seed(1)
    lengths = [7, 1, 0, 12, 4]
    n = sum(lengths)
    rewards, values = torch.randn(2, n, generator=generator)
    mask = torch.rand(n, generator=generator) < 0.6
    mask[-4:] = False  # a row that has nothing to train
    actual, returns = gae(rewards, values, mask, torch.tensor(lengths), gamma, lam)
    expected = plain_gae(rewards.tolist(), values.tolist(), mask.tolist(), lengths, gamma, lam)
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)
    assert returns.tolist() == pytest.approx(((actual + values) * mask).tolist(), abs=1e-6)


def test_what_stands_at_tokens_that_do_not_train_cannot_leak_into_gae():
    nan = float("nan")
    mask = torch.tensor([False, True, False, True])
    values = torch.tensor([nan, 0.5, nan, 0.25])
    rewards = torch.tensor([5.0, 0.0, 0.0, 1.0])  # that of the prompt is no one's
    actual, returns = gae(rewards, values, mask, torch.tensor([4]), 1.0, 1.0)
    assert actual.tolist() == [0, 0.5, 0, 0.75]
    assert returns.tolist() == [0, 1, 0, 1]


def test_whitening_leaves_alone_what_is_masked():
    x = torch.tensor([[1.0, 5.0], [float("nan"), 9.0]])
    mask = torch.tensor([[True, True], [False, True]])
    white = whiten(x, mask)
    assert white[mask].tolist() == pytest.approx([-1, 0, 1])
    assert white[1, 0].isnan()
