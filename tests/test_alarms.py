"""Alarms fire on what they name, once, and are silent on runs that learn."""

import json
import logging

import pytest

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.config.typed import flat
from nemo_like.observe.alarms import Alarms
from nemo_like.observe.metrics import Metric
from nemo_like.run.run import Run
from tests.small_runs import ROOT, small_config

GOOD = sorted((ROOT / "benchmarks" / "results").glob("*.metrics.jsonl"))
MEASURED_SINCE = {
    "rollout/reward_std": 0.4,
    "rollout/slowest_rank": 2.0,
    "rollout/slowest_over_median": 1.2,
    "rollout/memory_gib": 1.5,
    "train/memory_gib": 2.5,
    "train/gpu_memory_retries": 0.0,
}
"""Numbers of a good run that the kept ones did not measure."""
SETTINGS = flat(GRPOConfig().model_dump())


def steps_of(path):
    return [json.loads(line) | MEASURED_SINCE for line in path.open()]


def find_alarms(rows, settings):
    alarms = Alarms(settings)
    return [alarm for row in rows for alarm in alarms.add(row)]


def names(rows, **settings):
    return [alarm.name for alarm in find_alarms(rows, SETTINGS | settings)]


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name.split(".")[0])
def test_a_run_that_learns_raises_no_alarm(path):
    assert names(steps_of(path)) == []


FAULTS = {
    "groups_without_signal": (
        {"rollout/zero_variance_share": lambda _, __: 1.0, "rollout/reward": lambda _, __: 0.0},
        ["of groups all rewards are equal", "grpo.dynamic_sampling=true"],
    ),
    "equal_rewards": (
        {"rollout/reward_std": lambda _, __: 0.0, "rollout/reward": lambda _, __: 0.0},
        ["the same reward, 0;", "environment.reward=reasoning_gym"],
    ),
    "entropy_collapse": (
        {"policy/entropy": lambda _, __: 0.004},
        ["entropy fell from 0.", "policy.optimizer.lr=3e-05"],
    ),
    "length_explosion": (
        {
            "rollout/completion_tokens": lambda value, _: 4 * value,
            "rollout/reward": lambda _, __: 0.1,
        },
        ["the reward did not", "lr=3e-05", "advantage.overlong_buffer_tokens="],
    ),
    "length_collapse": (
        {"rollout/completion_tokens": lambda _, __: 1.0, "rollout/reward": lambda _, __: 0.1},
        ["completions shrank from ", "environment.reward=reasoning_gym pays for short"],
    ),
    "truncation": (
        {"rollout/truncated_share": lambda _, __: 0.75},
        ["of completions are cut off", "generation.max_new_tokens=128"],
    ),
    "mismatch_growth": (
        {"mismatch/mean_abs": lambda _, after: 1e-4 * after},
        ["mismatch.action=mask mismatch.max_mean_abs=0.000"],
    ),
    "memory_growth": (
        {"rollout/memory_gib": lambda value, after: value + 0.1 * after},
        ["rollout/memory_gib grew from 1.50 to ", "checkpoint.every_minutes=10"],
    ),
    "tight_memory": (
        {"train/gpu_memory_retries": lambda _, after: 64.0 if after > 0 else 0.0},
        [
            "ran out of memory 32 times in a step",
            "policy.micro_batch_tokens=4096",
            "(policy.offload)",
        ],
    ),
    "slow_steps": (
        {
            "time/step_s": lambda value, _: value + 3,
            "time/rollout_s": lambda value, _: value + 3,
            "train/tokens_per_s": lambda value, _: value / 4,
        },
        ["time/rollout_s went from", "environment.num_processes=2"],
    ),
    "straggler": (
        {
            "rollout/slowest_rank": lambda _, __: 3.0,
            "rollout/slowest_over_median": lambda _, __: 2.5,
        },
        ["generation rank 3 takes ", "check what else runs there"],
    ),
}


def faulty(name):
    """A good run, which has that fault from step 21 on."""
    path = ROOT / "benchmarks" / "results" / "grpo-embedded-cpu-seed0.metrics.jsonl"
    rows = [row for row in steps_of(path) if row["step"]]
    rows += [row | {"step": row["step"] + 40} for row in rows]
    for row in rows[20:]:
        changes, _ = FAULTS[name]
        row |= {key: made(row[key], row["step"] - 20) for key, made in changes.items()}
    return rows


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_raises_its_alarm_once_with_a_key_and_a_value(name):
    (alarm,) = find_alarms(faulty(name), SETTINGS)
    assert alarm.name == name
    assert 20 < alarm.step <= 50
    assert [part for part in FAULTS[name][1] if part not in alarm.text] == []


@pytest.mark.parametrize(
    ("engine", "remedy"),
    [
        ({"generation.backend": "vllm"}, "policy.lora.refit=adapters"),
        ({"generation.backend": "graph"}, "mismatch.action=mask"),
        ({"generation.quantization": "fp8"}, "mismatch.action=mask"),
    ],
)
def test_adapters_are_recommended_where_the_engine_takes_them(engine, remedy):
    merged = {"policy.lora.rank": 8, "policy.lora.refit": "merged"}
    (alarm,) = find_alarms(faulty("mismatch_growth"), SETTINGS | merged | engine)
    assert remedy in alarm.text


def test_a_gpu_that_is_short_of_memory_now_and_then_is_told_by_how_much():
    retries = [2.0] * 9 + [0.0]
    rows = [
        {"step": i, "time/step_s": 1.0, "train/gpu_memory_retries": one}
        for i, one in enumerate(retries)
    ]
    (alarm,) = find_alarms(rows, SETTINGS)
    assert "ran out of memory 2 times in a step" in alarm.text


def test_a_straggler_is_named_with_its_node():
    alarms = Alarms(SETTINGS)
    alarms.hosts = {"generation-3": "gpu17"}
    (found,) = [one for row in faulty("straggler") for one in alarms.add(row)]
    assert "generation rank 3 on node gpu17 takes " in found.text
    assert """(Slurm: 'cluster.slurm.extra=["--exclude=gpu17"]')""" in found.text


def test_the_value_depends_on_the_run():
    rows = [{"step": i, "time/step_s": 1.0, "rollout/truncated_share": 0.8} for i in range(1, 20)]
    (alarm,) = find_alarms(rows, SETTINGS | {"generation.max_new_tokens": 300})
    assert alarm.text == "80% of completions are cut off; set generation.max_new_tokens=600"
    assert alarm.step == 10
    stale = {"rollout/zero_variance_share": 1.0, "rollout/reward": 0.0}
    (alarm,) = find_alarms([row | stale for row in rows[:10]], SETTINGS)[:1]
    assert "grpo.dynamic_sampling=true" in alarm.text
    sampled = {"grpo.dynamic_sampling": True}
    (alarm,) = find_alarms([row | stale for row in rows[:10]], SETTINGS | sampled)
    assert alarm.name == "truncation"
    grown = [row | {"rollout/memory_gib": i} for i, row in enumerate(rows * 3)]
    often = {"checkpoint.every_minutes": 5.0}
    texts = {one.name: one.text for one in find_alarms(grown, SETTINGS | often)}
    assert texts["memory_growth"].endswith(
        "leaks; when memory has run out, continue with run.resume=true"
    )
    lengths = ({"rollout/completion_tokens": 10.0 if i < 10 else 40.0} for i in range(38))
    longer = [
        row | one | {"rollout/reward": 0.0} for row, one in zip(rows * 2, lengths, strict=True)
    ]
    texts = {
        one.name: one.text
        for one in find_alarms(longer, SETTINGS | {"generation.max_new_tokens": 100})
    }
    assert "advantage.overlong_buffer_tokens=80" in texts["length_explosion"]
    grown = [row | {"mismatch/mean_abs": 0.01 * row["step"] ** 2} for row in rows * 2]
    adapters = {"policy.lora.rank": 4, "policy.lora.refit": "merged"}
    assert "policy.lora.refit=adapters" in find_alarms(grown, SETTINGS | adapters)[-1].text


def test_what_is_missing_or_not_finite_raises_no_alarm():
    rows = [{"step": i, "time/step_s": 1.0, "policy/entropy": float("nan")} for i in range(60)]
    assert names([*rows, {"step": 60, "validation/reward": 0.0}]) == []
    alarms = Alarms({})
    assert [alarms.add({"step": i, "time/step_s": None}) for i in range(60)] == [[]] * 60


def test_an_alarm_stands_once_in_the_log_and_the_metrics(tmp_path, caplog):
    with Run(small_config(tmp_path), "grpo") as run, caplog.at_level(logging.WARNING):
        for _ in run.rounds(12):
            run.log({"rollout/truncated_share": Metric(0.9)})
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [one["step"] for one in kept if "alarm/truncation" in one] == [10]
    said = "Alarm at step 10: 90% of completions are cut off; set generation.max_new_tokens=64."
    assert caplog.text.count(said) == 1
    assert (tmp_path / "run.log").read_text().count(said) == 1
