"""Advantages: values worked by hand, in the cases that users of such systems have tripped over."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.advantages import group_advantages, zero_variance_share
from nemo_like.config.choices import AdvantageScale, Baseline
from nemo_like.config.schema import AdvantageConfig

LOO_STD = AdvantageConfig(baseline=Baseline.leave_one_out, scale=AdvantageScale.std)
LOO = AdvantageConfig(baseline=Baseline.leave_one_out, scale=AdvantageScale.none)
MEAN_STD = AdvantageConfig(baseline=Baseline.mean, scale=AdvantageScale.std)
MEAN = AdvantageConfig(baseline=Baseline.mean, scale=AdvantageScale.none)


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


@pytest.mark.parametrize("value", [0.95, 0.35, 0.4, 0.3])
def test_equal_float32_rewards_leave_no_residue_to_divide_by(value):
    rewards = torch.tensor([0.0] + [value] * 7, dtype=torch.float32).tolist()
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
    for config in (MEAN, MEAN_STD, LOO, LOO_STD):
        with_failure = advantages([1, nan, 0, 0], config, valid=[True, False, True, True])
        without = advantages([1, 0, 0], config)
        assert with_failure == pytest.approx([without[0], 0.0, *without[1:]])


def test_a_lone_valid_row_has_no_baseline_and_no_advantage():
    nan = float("nan")
    assert advantages([1, nan], LOO_STD, valid=[True, False]) == [0.0, 0.0]
    assert advantages([1, nan], MEAN_STD, valid=[True, False]) == [0.0, 0.0]


def test_equal_rewards_carry_no_signal_and_are_counted():
    for config in (MEAN, MEAN_STD, LOO, LOO_STD):
        assert advantages([0.3] * 8, config) == pytest.approx([0.0] * 8)
    valid = torch.ones(4, dtype=torch.bool)
    groups = torch.tensor([0, 0, 1, 1])
    assert zero_variance_share(torch.tensor([1.0, 0, 1, 1]), groups, valid) == 0.5
    assert zero_variance_share(torch.ones(4), groups, valid) == 1.0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8), st.floats(-100, 100))
def test_adding_a_constant_to_all_rewards_changes_nothing(rewards, shift):
    for config in (MEAN, LOO):
        shifted = advantages([r + shift for r in rewards], config)
        assert shifted == pytest.approx(advantages(rewards, config), abs=1e-4)
