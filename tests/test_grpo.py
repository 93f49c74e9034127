"""The whole loop in one process tree, with the ``hf`` engine: fast, and exact to the last bit."""

import json
import logging
import os
import re
import shutil
import signal

import pytest

from nemo_like.algorithms.grpo import loop
from nemo_like.algorithms.sampling import start_sampling
from nemo_like.algorithms.session import opened
from nemo_like.batch import keys
from nemo_like.distributed import waiting
from nemo_like.errors import RunError, StoppedError, UserError
from nemo_like.viewer.trajectories import Trajectories
from tests.small_runs import ROOT, SMALL_ON_A_FILE, numbers, records, run, small_config

pytestmark = pytest.mark.usefixtures("local_ray")

# What a resumed run must repeat; times and folders differ.


@pytest.fixture(scope="module")
def straight_steps(straight):
    """Records of six steps without interruption."""
    return records(straight)


def test_a_run_leaves_everything_that_it_promises(straight):
    steps = records(straight)
    assert list(steps) == list(range(7))
    for step in (0, 2, 4, 6):
        assert "validation/accuracy" in steps[step]
    assert "validation/accuracy" not in steps[1]
    assert steps[1]["mismatch/max_abs"] < 1e-5
    assert steps[2]["rollout/num_failed"] == 0
    for phase in ("rollout", "train", "refit", "step", "driver", "waiting"):
        assert steps[2][f"time/{phase}_s"] > 0
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["generation_backend"] == "hf"
    assert summary["final"] == str(straight / "final")
    assert summary["next"] == (
        f"nemo-like eval policy.model={straight}/final generation.backend=hf "
        "generation.max_new_tokens=32 data.num_validation_rows=8"
    )
    log = (straight / "run.log").read_text()
    assert f"The model is in {straight}/final. Next: nemo-like eval" in log
    assert log.count("Validation at step 6\n    prompt: ") == 2
    assert summary["val_accuracy_start"] == steps[0]["validation/accuracy"]
    assert summary["val_accuracy_end"] == steps[6]["validation/accuracy"]
    trajectories = [json.loads(line) for line in (straight / "trajectories.jsonl").open()]
    assert [t["step"] for t in trajectories] == [step for step in range(1, 7) for _ in range(4)]
    assert all(t["prompt"] and t["completion"] for t in trajectories)
    assert (straight / "final" / "chat_template.jinja").is_file()
    assert (straight / "checkpoints" / "step_6" / "files.json").is_file()
    assert list((straight / "tensorboard").iterdir())
    assert "max_steps: 6" in (straight / "config.yaml").read_text()


def test_a_run_without_lag_has_the_groups_seeds_and_numbers_that_it_always_had(straight_steps):
    """Tokens, reward, loss and gradient norm: groups, seeds and order decide all of them."""
    names = ("train/num_tokens", "rollout/reward", "train/loss", "train/grad_norm")
    for step, expected in {
        1: (162, 0.03125, 0.0644058958, 0.3622475863),
        2: (289, 0.3125, -0.3384702802, 0.5576899648),
        3: (254, 0.1875, -0.2993437946, 0.5721804500),
        4: (243, 0.125, 0.0675951615, 0.3560669124),
    }.items():
        found = [straight_steps[step][name] for name in names]
        assert found == pytest.approx(expected, abs=1e-5)


class StopError(Exception):
    """Ends a run at once, as a fault of its own would."""


def kept(folder):
    """Every trajectory in ``trajectories/``, by what it is and how it ended."""
    found = Trajectories(folder / "trajectories")
    found.refresh()
    every = found.read(found.chosen({}))
    assert len(every) == 6 * 16 + 4 * 8
    names = ("phase", "step", "group", "index", "reward", "text", "rows")
    return sorted([str(one[name]) for name in names] for one in every)


def test_stop_and_resume_repeats_the_uninterrupted_run_bit_for_bit(
    tmp_path, straight, straight_steps
):
    """Stopped before its first checkpoint, which makes it start afresh, and after it."""
    options = ["grpo.max_steps=6", "checkpoint.every_steps=2", "validation.every_steps=2"]
    with pytest.raises(StopError):
        run_until(small_config(tmp_path, *options), 2)
    with pytest.raises(UserError, match="already holds a run"):
        run(tmp_path, *options)
    options.append("run.resume=true")
    with pytest.raises(StopError):
        run_until(small_config(tmp_path, *options), 3)
    resumed = run(tmp_path, *options)
    assert list(resumed) == list(range(7))
    for step in range(7):
        assert numbers(resumed[step]) == numbers(straight_steps[step]), step
    trajectories = [json.loads(line)["step"] for line in (tmp_path / "trajectories.jsonl").open()]
    assert trajectories == [step for step in range(1, 7) for _ in range(4)]
    assert kept(tmp_path) == kept(straight)


def test_a_run_that_is_told_to_stop_saves_its_step_and_goes_on_from_there(tmp_path, straight_steps):
    """``slurm/ray.sbatch`` tells it so shortly before the job's time limit."""
    options = ["grpo.max_steps=6", "validation.every_steps=2"]
    with pytest.raises(StoppedError, match="after step 1 of 6, which is saved"):
        run_until(small_config(tmp_path, *options), 1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    resumed = run(tmp_path, *options, "run.resume=true")
    assert {step: numbers(resumed[step]) for step in range(7)} == {
        step: numbers(straight_steps[step]) for step in range(7)
    }


def stop():
    raise StopError


def run_until(config, step, act=stop, noting=None):
    """Run as ``run_grpo`` does and ``act`` in the middle of ``step``, after its rollout.

    ``noting``: gets the groups of each step.
    """
    with opened(config, "grpo") as session:
        live = start_sampling(config, session)
        next_batch = live.rollouts.next_batch

        def breaking(current, *keep):
            batch = next_batch(current, *keep)
            if noting is not None:
                noting[current] = batch[0].rows[keys.GROUP_IDS].unique().tolist()
            if current == step:
                act()
            return batch

        live.rollouts.next_batch = breaking
        loop.train(config, live)


def test_resuming_a_finished_run_trains_nothing_more(tmp_path, straight):
    folder = shutil.copytree(straight, tmp_path / "run")
    again = run(folder, "grpo.max_steps=6", "validation.every_steps=2", "run.resume=true")
    assert again == records(straight)


def test_a_finished_run_goes_on_and_its_best_checkpoint_is_one_whose_metric_was_measured(
    tmp_path, straight
):
    folder = shutil.copytree(straight, tmp_path / "run")
    steps = run(
        folder,
        "grpo.max_steps=9",
        "run.resume=true",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=1",
        "validation.every_steps=2",
    )
    assert list(steps) == list(range(10))
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    metrics = [
        json.loads((folder / "checkpoints" / name / "driver.json").read_text())["metric"]
        for name in kept
    ]
    assert "step_7" not in kept, "step 7 was not validated"
    assert None not in metrics


def test_another_model_is_no_continuation(tmp_path, tiny_model, straight):
    folder = shutil.copytree(straight, tmp_path / "run")
    with pytest.raises(UserError, match="is not that of the run to continue, embedded"):
        run(folder, "grpo.max_steps=7", "run.resume=true", f"policy.model={tiny_model()}")


def test_two_policy_ranks_and_two_replicas_take_the_same_steps(tmp_path, straight_steps):
    """Everything that is sampled depends on seeds alone, and the gradient on no layout."""
    steps = run(
        tmp_path, "grpo.max_steps=3", "validation.every_steps=2", "cluster.cpu_workers_per_node=2"
    )
    for step in (1, 2, 3):
        for name in ("rollout/reward", "train/loss", "train/grad_norm", "rollout/num_tokens"):
            assert steps[step][name] == pytest.approx(straight_steps[step][name], abs=1e-5), name


def same_steps(steps, straight):
    for step in (1, 2):
        for name in ("rollout/reward", "train/loss", "train/grad_norm", "mismatch/p999_abs"):
            assert steps[step][name] == pytest.approx(straight[step][name], abs=1e-5), name


@pytest.mark.parametrize(
    "overrides",
    [
        # Two ranks that train, and two engines in the bundle that samples.
        (
            "cluster.cpu_workers_per_node=3",
            "generation.num_engines_per_bundle=2",
            "cluster.num_generation_workers=1",
        ),
        pytest.param(
            ("generation.num_engines_per_bundle=2", "refit.transport=broadcast"),
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda overrides: overrides[-1],
)
def test_every_placement_and_transport_takes_the_same_steps(tmp_path, straight_steps, overrides):
    same_steps(run(tmp_path, "grpo.max_steps=2", *overrides), straight_steps)


EARLY_LOGPROBS = ["loss.kl_coef=0.1", "loss.kl_in=reward"]


def test_a_logprob_pass_of_its_own_changes_nothing(tmp_path, straight_steps):
    steps = run(tmp_path, "grpo.max_steps=2", "mismatch.action=mask", "mismatch.max_mean_abs=9")
    same_steps(steps, straight_steps)
    entropy = straight_steps[2]["policy/entropy"]
    assert steps[2]["policy/entropy"] == pytest.approx(entropy, abs=1e-5)
    assert steps[1]["train/max_log_ratio"] < 1e-5
    assert steps[1]["time/logprobs_s"] > 0
    assert "time/logprobs_s" not in straight_steps[1]


@pytest.mark.parametrize("overrides", [[], pytest.param(EARLY_LOGPROBS, marks=pytest.mark.full)])
def test_a_gap_above_the_limit_stops_the_run_before_the_step(tmp_path, overrides):
    with pytest.raises(RunError, match=r"mismatch/mean_abs=.* limit 1e-12.*mismatch.action=stop"):
        run(tmp_path, *overrides, "mismatch.action=stop", "mismatch.max_mean_abs=1e-12")
    assert list(records(tmp_path)) == [0]


def test_a_gap_above_the_limit_is_said_or_masked(tmp_path, straight, straight_steps):
    log = (straight / "run.log").read_text()
    assert log.count("(limit 1e-12, mismatch.max_mean_abs); mismatch.action=warn") == 6
    limit = f"mismatch.max_mean_abs={straight_steps[1]['mismatch/mean_abs']}"
    masked = run(tmp_path, "grpo.max_steps=1", limit, "mismatch.action=mask")[1]
    assert masked["mismatch/masked_rows"] > 0
    # The mean is over the others: they are what its divisor counts.
    assert 0 < masked["train/num_tokens"] < straight_steps[1]["train/num_tokens"]


def test_kl_to_the_reference_starts_at_zero_and_is_logged(tmp_path):
    steps = run(tmp_path, "grpo.max_steps=2", "loss.kl_coef=0.1", "loss.kl_estimator=k3")
    assert steps[1]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[2]["train/kl"] > 0


def test_bytes_through_the_driver_do_not_grow_with_completions(tmp_path, tiny_model):
    """A random model seldom stops, so its completions are nearly as long as they may be."""
    used = {}
    for most in (16, 64):
        steps = run(
            tmp_path / str(most),
            "grpo.max_steps=2",
            f"policy.model={tiny_model()}",
            f"generation.max_new_tokens={most}",
        )
        assert steps[2]["rollout/completion_tokens"] > 0.75 * most
        used[most] = steps[2]["driver/bytes"]
    assert used[64] == pytest.approx(used[16], rel=0.02)


# Rewards of the user's own.


def write_reward(tmp_path, body):
    path = tmp_path / "reward.py"
    path.write_text(
        f"import os, sys, time\nKEPT = []\n\n\ndef reward(prompt, completion):\n    {body}\n"
    )
    return [
        f"environment.reward={path}:reward",
        f"data.train={ROOT}/examples/custom_reward/rows.jsonl",
    ]


def test_the_custom_reward_example_learns(tmp_path):
    example = ROOT / "examples" / "custom_reward"
    steps = run(
        tmp_path / "run",
        f"data.train={example}/rows.jsonl",
        f"environment.reward={example}/reward.py:reward",
        "grpo.max_steps=20",
        "grpo.num_prompts_per_step=8",
        "policy.optimizer.lr=1e-3",
        small=SMALL_ON_A_FILE,
    )
    last = [steps[step]["rollout/reward"] for step in (18, 19, 20)]
    assert sum(last) / 3 > steps[1]["rollout/reward"] + 0.05


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 1 / (len(completion) % 2)", "ZeroDivisionError"),
        # Of the pool alone they are in test_reward_processes.py.
        pytest.param(
            "time.sleep(len(completion) % 2 * 9)\n    return 1.0",
            "took longer than",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "os.write(int(sys.argv[1]), b'x' * (len(completion) % 2 * 9))\n    return 1.0",
            "something else to its socket",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_reward_that_fails_in_some_way_costs_those_rows_only(tmp_path, caplog, body, reason):
    steps = run(
        tmp_path / "run",
        *write_reward(tmp_path, body),
        "grpo.max_steps=1",
        "grpo.num_prompts_per_step=2",
        "environment.timeout_s=1",
        "environment.num_processes=4",
        small=SMALL_ON_A_FILE,
    )
    failed = steps[1]["rollout/num_failed"]
    assert 0 < failed < 8
    assert steps[1]["rollout/reward"] == 1.0
    assert steps[1]["train/num_tokens"] < steps[1]["rollout/num_tokens"]
    assert f"failed on {failed:.0f} of 8 completions of step 1" in caplog.text
    assert reason in caplog.text


def test_who_waits_long_for_a_reward_is_told_so(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(waiting, "_PROGRESS_EVERY_S", 1.0)
    run(
        tmp_path / "run",
        *write_reward(tmp_path, "time.sleep(4)\n    return 1.0"),
        "grpo.max_steps=1",
        "grpo.num_prompts_per_step=1",
        "grpo.num_generations_per_prompt=2",
        "environment.num_processes=2",
        small=SMALL_ON_A_FILE,
    )
    told = r"Waiting for generation rank 0 in rollout, \d s: it samples .* waits for their rewards"
    assert re.search(told, caplog.text)


def test_a_metric_that_is_none_is_said_once_and_costs_no_reward(tmp_path, caplog):
    steps = run(
        tmp_path / "run",
        *write_reward(tmp_path, 'return {"reward": 1.0, "part": None, "right": True}'),
        "grpo.max_steps=2",
        "grpo.num_prompts_per_step=2",
        small=SMALL_ON_A_FILE,
    )
    for step in (1, 2):
        assert steps[step]["rollout/num_failed"] == 0
        assert steps[step]["rollout/right"] == 1.0
        assert "rollout/part" not in steps[step]
    assert caplog.text.count("metric 'part' is left out") == 1


@pytest.mark.full
def test_a_reward_that_leaks_50_mb_a_row_ends_well_under_a_limit_of_1_gb(tmp_path):
    steps = run(
        tmp_path / "run",
        *write_reward(tmp_path, "KEPT.append(bytearray(50 << 20))\n    return 1.0"),
        "grpo.max_steps=5",
        "grpo.num_prompts_per_step=25",
        "generation.max_new_tokens=4",
        "environment.process_memory_gib=0.93",
        small=SMALL_ON_A_FILE,
    )
    assert sum(steps[step]["rollout/num_failed"] for step in range(1, 6)) == 0
    assert [steps[step]["rollout/reward"] for step in range(1, 6)] == [1.0] * 5
