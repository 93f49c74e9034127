"""What GRPO's relatives add to its loop: which groups train, on what rewards, in which updates."""

import math
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from nemo_like.algorithms.checks import RewardWatch, warn_of_adapters
from nemo_like.algorithms.grpo.loop import (
    add_advantages,
    choose_rows,
    signal,
)
from nemo_like.algorithms.policy_gradient import (
    PolicyGradient,
    make_loss,
    mini_batches,
    training_metrics,
)
from nemo_like.batch import keys
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import UserError
from nemo_like.losses.protocol import Denominators
from nemo_like.observe.metrics import Metric, Reduce, mean_of_steps, values
from nemo_like.rollout.rounds import join
from tests.small_runs import run, small_config


def batch_of(rewards, groups, **columns):
    count = len(rewards)
    rows = {
        keys.REWARDS: torch.tensor(rewards, dtype=torch.float64),
        keys.GROUP_IDS: torch.tensor(groups),
        keys.SIBLINGS: torch.arange(len(groups)),
        keys.SAMPLE_MASK: torch.ones(count, dtype=torch.bool),
        keys.NUM_LOSS_TOKENS: torch.full((count,), 8),
        keys.TRUNCATED: torch.zeros(count, dtype=torch.bool),
    }
    rows |= {name: torch.tensor(column) for name, column in columns.items()}
    return RemoteBatch(lengths=torch.full((count,), 10), rows=rows)


def config_of(*overrides):
    return small_config("never-made", *overrides)


def advantages(batch, *overrides):
    """What the loop does of a batch between its logprobs and its train step."""
    config = config_of("advantage.baseline=mean", "advantage.scale=none", *overrides)
    choose_rows(batch, config)
    add_advantages(batch, config)
    return batch.rows[keys.ADVANTAGES].tolist()


def test_the_overlong_penalty_is_added_to_rewards_before_the_baseline():
    # 32 tokens at most, the last 16 of them penalised: 24 tokens cost (32 - 16 - 24) / 16 = -0.5.
    batch = batch_of([1, 1], [0, 0], **{keys.NUM_LOSS_TOKENS: [24, 8]})
    assert advantages(batch, "advantage.overlong_buffer_tokens=16") == [-0.25, 0.25]


@pytest.mark.parametrize("masked", [0, 1])
def test_a_trajectory_of_two_rows_counts_if_one_of_them_trains(masked):
    """Rewards 1, 0 and 0, of which the first has two rows, whichever the engine saw otherwise."""
    mismatches = [0.0] * 4
    mismatches[masked] = 9.0
    columns = {keys.MEAN_MISMATCHES: mismatches, keys.SIBLINGS: [0, 0, 1, 2], keys.TASKS: [0] * 4}
    batch = batch_of([1, 1, 0, 0], [0] * 4, **columns)
    found = advantages(batch, "mismatch.action=mask", "mismatch.max_mean_abs=0.2")
    assert found == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])


def test_kl_in_the_reward_is_subtracted_before_the_baseline():
    batch = batch_of([1, 1], [0, 0], **{keys.REFERENCE_KL: [2.0, 1.0]})
    inside = ("loss.kl_coef=0.1", "loss.kl_in=reward", "loss.kl_estimator=k1")
    assert advantages(batch, *inside) == pytest.approx([-0.05, 0.05])


MASKED = ("grpo.mask_truncated=true", "mismatch.action=mask", "mismatch.max_mean_abs=0.2")


def one_of_each_kind():
    """Three completions that train (rewards 1, 0, 0); one cut off, one that the engine sees
    otherwise, one without tokens and one without a reward; all of one group."""
    return batch_of(
        [1, 0, 0, 1, 1, 1, math.nan],
        [0] * 7,
        **{
            keys.SAMPLE_MASK: [True] * 6 + [False],
            keys.TRUNCATED: [False] * 3 + [True] + [False] * 3,
            keys.MEAN_MISMATCHES: [0.1] * 3 + [0.3, 0.3, 0.1, 0.1],
            keys.NUM_LOSS_TOKENS: [8] * 5 + [0, 8],
        },
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # Of 1, 0, 0: mean 1/3, squares 4/9 + 2/9 = 2/3, unbiased deviation sqrt(1/3).
        ("", [2 / 3, -1 / 3, -1 / 3]),
        ("advantage.scale=std", [2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]),
        # Others of row 0: 0, 0; of the others: 1, 0.
        ("advantage.baseline=leave_one_out", [1, -1 / 2, -1 / 2]),
        # The whole step is this group: as with std.
        ("advantage.scale=batch", [2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]),
        # Of 1, 0, 0, 1, 1, 1: mean 2/3, squares 4/9 + 8/9 = 4/3, deviation sqrt(4/15).
        ("advantage.count_untrained=true", [1 / 3, -2 / 3, -2 / 3]),
        (
            "advantage.count_untrained=true advantage.scale=std",
            [x / math.sqrt(4 / 15) for x in (1 / 3, -2 / 3, -2 / 3)],
        ),
        # Others of row 0: 0, 0, 1, 1, 1; of row 1: 1, 0, 1, 1, 1.
        (
            "advantage.count_untrained=true advantage.baseline=leave_one_out",
            [2 / 5, -4 / 5, -4 / 5],
        ),
    ],
)
def test_completions_that_do_not_train_count_in_no_baseline_unless_asked_to(overrides, expected):
    batch = one_of_each_kind()
    found = advantages(batch, *MASKED, *overrides.split())
    assert batch.rows[keys.SAMPLE_MASK].tolist() == [True] * 3 + [False] * 4
    assert found[:3] == pytest.approx(expected)


def test_rows_count_as_masked_for_their_gap_only_if_they_would_have_trained():
    metrics = choose_rows(one_of_each_kind(), config_of(*MASKED))
    assert metrics["mismatch/masked_rows"].value == 1  # the one that was cut off is out already


def test_a_group_of_which_one_completion_trains_has_no_baseline_and_no_signal():
    masked = {keys.TRUNCATED: [False, True, False, False]}
    of_those_that_train = ("grpo.mask_truncated=true",)
    of_all = (*of_those_that_train, "advantage.count_untrained=true")
    for overrides, has_signal, flat_share, expected in (
        (of_those_that_train, [False, False, True, True], 0.5, [0, 0, 0.5, -0.5]),
        (of_all, [True, True, True, True], 0, [0.5, -0.5, 0.5, -0.5]),
    ):
        batch = batch_of([1, 0, 1, 0], [0, 0, 1, 1], **masked)
        assert signal(batch, config_of(*overrides)).tolist() == has_signal
        metrics = choose_rows(batch, config_of(*overrides))
        assert metrics["rollout/zero_variance_share"].value == flat_share
        assert advantages(batch, *overrides) == expected
        assert batch.rows[keys.SAMPLE_MASK].tolist() == [True, False, True, True]


def test_without_masks_a_truncated_completion_trains_and_counts():
    batch = batch_of([1, 0], [0, 0], **{keys.TRUNCATED: [False, True]})
    assert advantages(batch) == [0.5, -0.5]
    assert batch.rows[keys.SAMPLE_MASK].all()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("", "all scored completions train; set grpo.mask_truncated=true or mismatch.action=mask"),
        (
            "grpo.mask_truncated=true advantage.baseline=none advantage.scale=none",
            "advantage.baseline=none and advantage.scale=none count nothing",
        ),
    ],
)
def test_count_untrained_is_refused_where_it_would_do_nothing(overrides, said):
    with pytest.raises(UserError, match=f"advantage.count_untrained.*{said}"):
        config_of("advantage.count_untrained=true", *overrides.split())


def test_a_group_has_a_signal_by_its_raw_rewards():
    # Answers that are all wrong stay without one, however long they are (field report E05).
    batch = batch_of([0, 0, 1, 0], [0, 0, 1, 1], **{keys.NUM_LOSS_TOKENS: [32, 8, 8, 8]})
    advantages(batch, "advantage.overlong_buffer_tokens=16")
    assert signal(batch, config_of()).tolist() == [False, False, True, True]


def test_rewards_that_teach_nothing_for_five_steps_are_said_once(caplog):
    equal, mixed = batch_of([0, 0], [0, 1]), batch_of([0, 1], [0, 1])
    masked = batch_of([0, 1], [0, 1], **{keys.SAMPLE_MASK: [True, False]})
    watch, unanswered = RewardWatch("reasoning_gym"), {"rollout/answered": Metric(0.0)}
    for batch in [equal] * 4 + [mixed] + [equal] * 4:
        watch(batch, unanswered)
    assert not caplog.records
    watch(masked, unanswered)
    assert caplog.records
    for _ in range(8):
        watch(equal, unanswered)
    (record,) = caplog.records
    assert record.message == (
        "All completions of 5 steps in a row had the reward 0, which teaches nothing: read some in "
        "trajectories.jsonl; none states an answer as environment.reward=reasoning_gym reads it "
        "(<answer>...</answer>): ask for that in data.system_prompt, or use "
        "environment.reward=math."
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "policy.dtype=bfloat16",
            "With policy.lora.refit=merged in bfloat16, small LoRA updates are lost to",
        ),
        ("policy.dtype=float16 policy.lora.refit=adapters", None),
        (
            "policy.dtype=bfloat16 policy.lora.refit=adapters policy.compile=true",
            "With policy.compile=true in bfloat16, small LoRA updates are lost to",
        ),
        ("policy.dtype=float32", None),
        (
            "policy.dtype=bfloat16 generation.backend=graph",
            "With policy.lora.refit=merged in bfloat16, small LoRA updates are lost to rounding in "
            "the engine, which then samples from a policy that lags behind (mismatch/mean_abs); "
            "policy.dtype=float16 loses less.",
        ),
        (
            "policy.dtype=float16 generation.backend=vllm generation.quantization=fp8",
            "With policy.lora.refit=merged in float16, small LoRA updates are lost to rounding in "
            "the engine, which then samples from a policy that lags behind (mismatch/mean_abs).",
        ),
    ],
)
def test_adapters_that_engines_would_round_away_are_said(caplog, overrides, said):
    warn_of_adapters(config_of("policy.lora.rank=4", *overrides.split()))
    assert [record.message[: len(said or "")] for record in caplog.records] == [said] * bool(said)


def test_without_a_signal_dynamic_sampling_trains_on_no_penalty_either():
    penalty = ("advantage.overlong_buffer_tokens=16", "grpo.dynamic_sampling=true")
    batch = batch_of([0, 0, 1, 0], [0, 0, 1, 1], **{keys.NUM_LOSS_TOKENS: [32, 8, 8, 8]})
    assert advantages(batch, *penalty) == [0, 0, 0.5, -0.5]
    assert batch.rows[keys.SAMPLE_MASK].tolist() == [False, False, True, True]


def test_rows_with_too_large_a_gap_leave_the_step_and_their_groups_baseline():
    gaps = {
        keys.MEAN_MISMATCHES: [0.3, 0.1, math.nan, 0.2],
        keys.SAMPLE_MASK: [True, True, True, False],
    }
    batch = batch_of([1, 0, 1, math.nan], [0, 0, 1, 1], **gaps)
    options = ("mismatch.action=mask", "mismatch.max_mean_abs=0.2")
    metrics = choose_rows(batch, config_of(*options))
    assert batch.rows[keys.SAMPLE_MASK].tolist() == [False, True, False, False]
    assert metrics["mismatch/masked_rows"].value == 2
    assert advantages(batch, *options) == [0, 0, 0, 0]  # row 1 has no sibling left


def test_metrics_of_a_batch_count_what_trains_and_what_was_scored():
    batch = batch_of(
        [1, 0, math.nan],
        [0, 0, 0],
        **{
            keys.TRUNCATED: [False, True, False],
            keys.SAMPLE_MASK: [True, True, False],
            keys.REFERENCE_KL: [2.0, 1.0, 0.0],
        },
    )
    advantages(batch, "grpo.mask_truncated=true")
    found = values(training_metrics(batch))
    assert found == {
        "train/num_tokens": 8,
        "rollout/reference_kl": 1.5,
        "train/advantage_mean": 0,  # the only row that counts has no sibling
        "train/advantage_std": 0,
    }


def test_each_pass_deals_whole_groups_to_mini_batches_anew():
    batch = batch_of([0.0] * 12, [i // 2 for i in range(12)])
    config = config_of("grpo.num_mini_batches=3", "grpo.num_epochs_per_batch=2")
    parts = [one.rows[keys.GROUP_IDS].tolist() for one in mini_batches(batch, config, 1)]
    assert [len(part) for part in parts] == [4] * 6
    for first in (0, 3):
        assert sorted(chain(*parts[first : first + 3])) == [i // 2 for i in range(12)]
    assert parts[:3] != parts[3:]
    again = [one.rows[keys.GROUP_IDS].tolist() for one in mini_batches(batch, config, 1)]
    assert again == parts
    next_step = [one.rows[keys.GROUP_IDS].tolist() for one in mini_batches(batch, config, 2)]
    assert next_step[:3] != parts[:3]
    seeded = config.replace(run=config.run.replace(seed=config.run.seed + 1))
    assert [one.rows[keys.GROUP_IDS].tolist() for one in mini_batches(batch, seeded, 1)] != parts


@pytest.mark.parametrize(("normalization", "divisor"), [("token", 12.0), ("sequence", 5.0)])
def test_a_step_of_groups_added_early_divides_by_the_counts_of_all(normalization, divisor):
    counts = [Denominators(tokens=8.0, sequences=2.0), Denominators(tokens=4.0, sequences=3.0)]
    left, divided_by = iter(counts * 2), []

    def add(part, loss, most):
        divided_by.append(most)
        return next(left)

    live = SimpleNamespace(
        policy=SimpleNamespace(add=add, finish=lambda count, _: count),
        session=SimpleNamespace(run=SimpleNamespace(span=lambda _: nullcontext())),
        mismatch_check=lambda: None,
    )
    config = config_of(
        "rollout.overlap=true", f"loss.normalization={normalization}", "grpo.num_prompts_per_step=3"
    )
    updates, batch = PolicyGradient(config, live), batch_of([1.0], [0])  # pyright: ignore
    for step in (1, 2):
        for _ in counts:
            updates.add(batch)
        assert updates.train(step, batch) * divided_by[0] == divisor
    (most,) = set(divided_by)
    bound = config.rows_per_step
    if normalization == "token":
        bound *= config.generation.max_new_tokens
    assert bound <= most < 2 * bound
    assert math.frexp(most)[0] == 0.5, "dividing by a power of two rounds nothing"


class Sampled:
    """A round of sampling, as ``join`` sees it."""

    def __init__(self, first, kept):
        groups = [first, first, first + 1, first + 1]
        self.batch = batch_of([1, 0, 1, 0], groups)
        self.kept = torch.tensor([i for i, group in enumerate(groups) if group in kept])
        self.num_kept = len(kept)
        self.results = []


def joined(rounds, num_prompts):
    for one in rounds:
        one.batch.rows[keys.NUM_LOSS_TOKENS] = torch.full((4,), 8)
    batch, metrics = join(rounds, num_prompts, {})
    return batch.rows[keys.GROUP_IDS].tolist(), metrics


def test_groups_without_a_signal_are_replaced_by_those_of_later_rounds(caplog):
    found, metrics = joined([Sampled(0, {1}), Sampled(2, {2, 3})], 2)
    assert found == [1, 1, 2, 2]  # the third one is to spare
    assert metrics["rollout/kept_share"].value == 0.75
    assert metrics["rollout/num_rounds"].value == 2
    for rounds in ([Sampled(0, {1}), Sampled(2, set())], [Sampled(0, {1})]):
        found, _ = joined(rounds, 2)
        assert found == [1, 1]
    assert "Only 1 of the 2 groups" in caplog.text


def test_without_any_signal_the_last_round_stands_for_itself():
    found, metrics = joined([Sampled(0, set()), Sampled(2, set())], 2)
    assert found == [2, 2, 3, 3]
    assert metrics["rollout/kept_share"].value == 0


def test_metrics_of_several_updates_are_one_record():
    first = {"loss": Metric(1.0, reduce=Reduce.sum), "norm": Metric(3.0, reduce=Reduce.max)}
    second = {"loss": Metric(2.0, reduce=Reduce.sum), "norm": Metric(2.0, reduce=Reduce.max)}
    found = mean_of_steps([first, second])
    assert (found["loss"].value, found["norm"].value) == (1.5, 3.0)
    assert mean_of_steps([first]) == first
    overflowed = {"norm": Metric(math.nan, reduce=Reduce.max)}
    assert math.isnan(mean_of_steps([first, overflowed])["norm"].value)


def test_the_constant_divisor_is_the_longest_completion_unless_it_is_given():
    assert make_loss(config_of("loss.normalization=constant")).config.constant_tokens == 32
    given = config_of("loss.normalization=constant", "loss.constant_tokens=7")
    assert make_loss(given).config.constant_tokens == 7


@pytest.mark.usefixtures("local_ray")
def test_several_updates_a_batch_move_the_ratio_and_are_counted(tmp_path):
    steps = run(
        tmp_path,
        "grpo.max_steps=2",
        "grpo.num_mini_batches=2",
        "grpo.num_epochs_per_batch=2",
        "grpo.dynamic_sampling=true",
        "loss.kl_coef=0.01",
        "loss.kl_in=reward",
        "loss.kl_estimator=k1",
        "loss.entropy_coef=0.001",
        "validation.every_steps=0",
        "checkpoint.every_steps=1",
    )
    assert steps[2]["train/max_log_ratio"] > 1e-4
    assert steps[1]["rollout/reference_kl"] == pytest.approx(0, abs=1e-4)
    assert steps[2]["rollout/reference_kl"] != 0
    resumed = run(
        tmp_path,
        "grpo.max_steps=3",
        "grpo.num_mini_batches=2",
        "validation.every_steps=0",
        "run.resume=true",
    )
    assert list(resumed) == [1, 2, 3]  # sampled with the weights of eight updates, not of two
