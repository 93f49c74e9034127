"""The mismatch report: numbers by hand and by numpy, the same however a step is divided."""

import gc
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nemo_like.algorithms.checks import (
    MAX_LOG_RATIO,
    MAX_MEAN_MISMATCH,
    MAX_MISMATCH,
    check_ratios,
    check_sampled,
    mismatch_check,
    warn_of_mismatch,
)
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.errors import RunError
from nemo_like.losses.mismatch import MismatchSums, mismatch_of_rows
from nemo_like.observe.metrics import Metric, merge, values
from tests.small_runs import small_config

CPU = torch.device("cpu")


def batch_of(generation, mask=None):
    """One row, all of whose tokens train unless ``mask`` says otherwise."""
    n = len(generation)
    return TensorBatch(
        lengths=torch.tensor([n]),
        tokens={
            keys.LOSS_MASK: torch.ones(n, dtype=torch.bool) if mask is None else torch.tensor(mask),
            keys.GENERATION_LOGPROBS: torch.as_tensor(generation),
        },
        rows={keys.SAMPLE_MASK: torch.tensor([True])},
    )


def report(*parts):
    """Metrics of ``(policy logprobs, batch)`` pairs; the entropies are 1, 2, 3 ..."""
    sums = MismatchSums(CPU)
    for policy, batch in parts:
        policy = torch.as_tensor(policy)
        sums.add(policy, torch.arange(1.0, len(policy) + 1), batch)
    return values(sums.metrics())


def test_numbers_by_hand():
    logprob_diffs = [math.log(1.5), -math.log(2), 0.0]
    nan = math.nan
    generation = torch.tensor([nan, *(-1.0 - logprob_diff for logprob_diff in logprob_diffs)])
    numbers = report(([nan, -1.0, -1.0, -1.0], batch_of(generation, [False, True, True, True])))
    weights = [1.5, 0.5, 1.0]
    expected = {
        "mismatch/mean_abs": (math.log(1.5) + math.log(2)) / 3,
        "mismatch/max_abs": math.log(2),
        "mismatch/mean_exp_abs": (1.5 + 2 + 1) / 3,
        "mismatch/kl": sum(
            w - 1 - logprob_diff for w, logprob_diff in zip(weights, logprob_diffs, strict=True)
        )
        / 3,
        "mismatch/effective_sample_size": 3**2 / (3 * (1.5**2 + 0.5**2 + 1)),
        "policy/logprob": -1.0,
        "policy/entropy": 3.0,
    }
    quantile = numbers.pop("mismatch/p999_abs")
    assert numbers == pytest.approx(expected, rel=1e-6)
    assert math.log(2) <= quantile < 1.03 * math.log(2)


def test_the_effective_sample_size_counts_samples_whatever_their_weights_add_up_to():
    policy = [0.0, 0.0]
    batch = batch_of(torch.tensor([-math.log(2), 0.0]), [True, True])
    # Weights 2 and 1: 3^2 / (2 (2^2 + 1^2)).
    assert report((policy, batch))["mismatch/effective_sample_size"] == pytest.approx(0.9)


def test_gaps_of_rows_by_hand():
    n, nan = 6, math.nan
    batch = TensorBatch(
        lengths=torch.tensor([3, 2, 1]),
        tokens={
            keys.LOSS_MASK: torch.tensor([False, True, True, True, True, True]),
            keys.GENERATION_LOGPROBS: torch.tensor([nan, -1.0, -2.0, -1.0, -1.0, nan]),
        },
        rows={keys.SAMPLE_MASK: torch.tensor([True, False, True])},
    )
    logprob_diffs = mismatch_of_rows(torch.full((n,), -1.5), batch)
    assert logprob_diffs.tolist()[:2] == [0.5, 0.0]  # the second row does not train
    assert logprob_diffs[2].isnan()


def test_equal_logprobs_have_no_gap_at_all():
    numbers = report(([-1.0, -2.0], batch_of([-1.0, -2.0])))
    assert [numbers[f"mismatch/{name}"] for name in ("mean_abs", "p999_abs", "max_abs")] == [0] * 3
    assert numbers["mismatch/effective_sample_size"] == 1


@pytest.mark.parametrize("scale", [1e-7, 1e-2, 3.0])
def test_the_quantile_is_numpys_to_the_width_of_a_bin(scale):
    logprob_diffs = np.random.default_rng(0).exponential(scale, 100_000)
    numbers = report((-1.0 - logprob_diffs, batch_of(np.full(len(logprob_diffs), -1.0))))
    exact = np.quantile(logprob_diffs, 0.999, method="inverted_cdf")
    assert exact * 0.999 <= numbers["mismatch/p999_abs"] <= exact * 1.03
    of_thousand = report(([*[scale] * 999, 50.0], batch_of(torch.zeros(1000))))
    assert scale * 0.999 <= of_thousand["mismatch/p999_abs"] <= scale * 1.03


def test_a_step_in_parts_gives_the_report_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    policy, generation = torch.randn(2, 60, generator=generator)
    whole = report((policy, batch_of(generation)))
    cuts = [(0, 7), (7, 7), (7, 60)]
    parts = report(*((policy[a:b], batch_of(generation[a:b])) for a, b in cuts))
    reverse = report(*((policy[a:b], batch_of(generation[a:b])) for a, b in cuts[::-1]))
    for numbers in (whole, parts, reverse):
        numbers.pop("policy/entropy")
    assert parts == pytest.approx(whole, rel=1e-12)
    assert reverse == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gap_that_is_no_number_shows(bad):
    numbers = report(([bad, -1.0], batch_of([-1.0, -1.0])), ([-1.0], batch_of([-1.0])))
    assert not math.isfinite(numbers["mismatch/mean_abs"])
    assert not math.isfinite(numbers["mismatch/max_abs"])


@pytest.mark.parametrize("logprob_diff", [99.0, 250.0, math.inf, math.nan])
def test_differences_above_all_bins_are_in_the_last_one(logprob_diff):
    assert report(([logprob_diff], batch_of([0.0])))["mismatch/p999_abs"] == pytest.approx(100)


def test_the_kl_of_tiny_gaps_does_not_cancel():
    generation = torch.tensor([0.0], dtype=torch.float64)
    numbers = report((torch.tensor([1e-7], dtype=torch.float64), batch_of(generation)))
    assert numbers["mismatch/kl"] == pytest.approx(1e-14 / 2, rel=1e-6, abs=0)


@pytest.mark.parametrize("logprob_diff", [30.0, -30.0, math.inf, -math.inf])
def test_the_kl_is_never_negative(logprob_diff):
    assert report(([logprob_diff], batch_of([0.0])))["mismatch/kl"] > 0


def test_weights_that_vanish_are_reported():
    numbers = report(([-800.0], batch_of([0.0])))
    assert numbers["mismatch/mean_abs"] == 800
    assert math.isnan(numbers["mismatch/effective_sample_size"])


def test_the_sums_keep_no_graph():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    alive = weakref.ref(logprobs)
    sums = MismatchSums(CPU)
    sums.add(logprobs * 1, logprobs * 2, batch_of([-1.0]))
    del logprobs
    gc.collect()
    assert alive() is None


def test_nothing_measured_is_no_report():
    assert MismatchSums(CPU).metrics() == {}


def report_of_my_half():
    """On rank 2, which has no tokens, and the halves of one step on ranks 0 and 1."""
    rank = dist.get_rank()
    policy, generation = torch.randn(2, 60, generator=torch.Generator().manual_seed(0))
    sums = MismatchSums(CPU)
    if rank < 2:
        mine = slice(30 * rank, 30 * rank + 30)
        sums.add(policy[mine], torch.ones(30), batch_of(generation[mine]))
    sums.all_reduce()
    return sums.metrics()


def test_every_rank_has_the_report_of_all(pool):
    reports = pool.run(3, "tests.test_mismatch:report_of_my_half")
    policy, generation = torch.randn(2, 60, generator=torch.Generator().manual_seed(0))
    sums = MismatchSums(CPU)
    sums.add(policy, torch.ones(60), batch_of(generation))
    assert all(values(one) == pytest.approx(values(sums.metrics())) for one in reports)
    assert values(merge(reports)) == values(reports[0])


def report_of_a_nan_on(bad_rank):
    """Ranks with one token each, of which one has a difference of NaN."""
    policy = torch.tensor([math.nan if dist.get_rank() == bad_rank else -2.0])
    sums = MismatchSums(CPU)
    sums.add(policy, torch.ones(1), batch_of([-1.0]))
    sums.all_reduce()
    return values(sums.metrics())


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_nan_of_any_rank_reaches_every_rank(bad_rank, pool):
    for numbers in pool.run(2, "tests.test_mismatch:report_of_a_nan_on", bad_rank):
        assert math.isnan(numbers["mismatch/mean_abs"])
        assert math.isnan(numbers["mismatch/max_abs"])


# What a step must pass.


def refused(check, *arguments):
    try:
        check(*arguments)
    except RunError:
        return True
    return False


@pytest.mark.parametrize("action", ["warn", "ignore", "stop"])
def test_first_steps_may_differ_by_rounding_and_later_ones_by_what_is_configured(action):
    config = small_config("never-made")
    mismatch = config.mismatch.replace(action=action, max_mean_abs=1e-4)
    config = config.replace(mismatch=mismatch)
    usual, most = MAX_MEAN_MISMATCH["float32"], MAX_MISMATCH["float32"]
    of_first = [] if action == "ignore" else [("mean_abs", usual), ("max_abs", most)]
    always = [("mean_abs", 1e-4)] if action == "stop" else []
    for num_made, expected in ((1, of_first + always), (3, of_first + always), (4, always)):
        check = mismatch_check(config, num_made)
        found = [(one.metric.removeprefix("mismatch/"), one.limit) for one in check.limits]
        assert found == expected
        for name, limit in expected:
            metrics = {f"mismatch/{name}": Metric(min(limit, 1e-4))}
            assert not refused(check, metrics)
            for bad in (limit * 1.01, math.nan):
                assert refused(check, {f"mismatch/{name}": Metric(bad)})


def test_a_replayed_run_that_differs_is_not_blamed_on_the_refit():
    """No engine computes anything there."""
    config = small_config("never-made")
    config = config.replace(generation=config.generation.replace(backend="replay"))
    with pytest.raises(RunError, match="This policy is not that of the recorded run") as error:
        mismatch_check(config, 1)({"mismatch/mean_abs": Metric(1.0)})
    assert "refit" not in str(error.value)


def test_a_mismatch_above_its_limit_or_that_is_no_number_is_said(caplog):
    config = small_config("never-made", "mismatch.max_mean_abs=0.5")
    for number in (0.5, 0.51, math.nan):
        warn_of_mismatch(config, {"mismatch/mean_abs": Metric(number)})
    assert [record.args[0] for record in caplog.records] == pytest.approx(
        [0.51, math.nan], nan_ok=True
    )


def test_ratios_of_the_first_update_are_1():
    config = small_config("never-made")
    limit = MAX_LOG_RATIO["float32"]
    ratio = {"train/max_log_ratio": Metric(limit)}
    assert not refused(check_ratios, config, ratio, 1)
    assert not refused(check_ratios, config, {}, 1)
    for bad in (1.01 * limit, math.nan):
        ratio = {"train/max_log_ratio": Metric(bad)}
        assert refused(check_ratios, config, ratio, 1)
        assert not refused(check_ratios, config, ratio, 2)
        ignored = config.replace(mismatch=config.mismatch.replace(action="ignore"))
        assert not refused(check_ratios, ignored, ratio, 1)


def test_equal_seeds_of_the_first_steps_are_refused():
    config = small_config("never-made")
    rows = {
        keys.NUM_LOSS_TOKENS: torch.tensor([0, 1, 1]),
        keys.WEIGHT_VERSIONS: torch.tensor([-1, 5, 5]),  # of the row without tokens it is no matter
        keys.SEEDS: torch.tensor([3, 4, 3]),
    }
    batch = SimpleNamespace(rows=rows)
    assert refused(check_sampled, config, batch, 5, 3)
    assert not refused(check_sampled, config, batch, 5, 4)
    ignored = config.replace(mismatch=config.mismatch.replace(action="ignore"))
    assert not refused(check_sampled, ignored, batch, 5, 3)
