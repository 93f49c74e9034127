"""Runs on a clock: what sampling ahead comes to, and what ``nemo-like plan`` makes of it."""

import json
from pathlib import Path

import pytest

from nemo_like.cli import main
from nemo_like.launch.plan_lag import Planner, Times
from nemo_like.launch.simulation import Workload, log_normal, simulate
from nemo_like.observe.trajectory_files import TrajectoryFiles
from nemo_like.planning.resources import plan_run
from nemo_like.run.folder import save_config
from tests.small_runs import small_config
from tests.test_trajectory_files import keep, one, table


def work(**changes):
    """Two groups of one completion of 3 s, one engine with two slots, 1 s of training."""
    same = {"groups": 2, "group_size": 1, "engines": 1, "slots": 2, "train_s": 1.0}
    return Workload(**(same | {"tokens": lambda _: 3.0, "token_s": lambda _: 1.0} | changes))


@pytest.mark.parametrize(
    ("changes", "step_s", "engines_idle", "trainer_idle"),
    [
        ({}, 4.0, 0.25, 0.75),
        ({"slots": 1}, 7.0, 1 / 7, 6 / 7),
        ({"lag": 1}, 3.0, 0.0, 2 / 3),
        ({"lag": 2}, 3.0, 0.0, 2 / 3),
        ({"lag": 1, "engines": 2}, 2.0, 0.25, 0.5),  # 4 s from beginning to training, 2 steps
        ({"lag": 1, "train_s": 9.0}, 9.0, 2 / 3, 0.0),
        ({"lag": 1, "shared": 1.0}, 4.0, 0.25, 0.75),  # the engine stands still for 1 s
        ({"lag": 1, "shared": 0.5}, 3.5, 1 / 7, 5 / 7),
    ],
    ids=str,
)
def test_steps_of_equal_completions_are_those_of_arithmetic(
    changes, step_s, engines_idle, trainer_idle
):
    found = simulate(work(**changes))
    assert found.step_s == pytest.approx(step_s)
    assert found.engines_idle == pytest.approx(engines_idle)
    assert found.trainer_idle == pytest.approx(trainer_idle, abs=1e-9)
    assert found.staleness == changes.get("lag", 0)


def test_a_step_waits_for_its_slowest_completion_unless_it_samples_ahead():
    """Of 64 log-normal completions the slowest takes about 8 medians, their mean 1.4."""
    long_tail = {"groups": 8, "group_size": 8, "engines": 2, "slots": 32, "train_s": 0.3}
    steps = [
        simulate(work(**long_tail, tokens=log_normal(1.0), lag=lag), steps=200).step_s
        for lag in (0, 1, 4)
    ]
    assert steps[0] == pytest.approx(8.0, rel=0.1)
    assert steps[0] > 1.8 * steps[1] > 1.8 * steps[2] > 1.8 * 1.4


def earlier_run(folder: Path, *options: str) -> None:
    """Five steps of 4 completions on 2 workers: 1 s for 10 tokens, then 0.75 s; most have 4."""
    config = small_config(
        folder / "run",
        "cluster.cpu_workers_per_node=2",
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=2",
        *options,
    )
    (folder / "run").mkdir()
    save_config(folder / "run", config, continued=False)
    record = {"time/step_s": 1.75, "time/rollout_s": 1.0, "time/refit_s": 0.25}
    record |= {"rollout/completion_tokens_max": 10.0, "rollout/num_tokens": 22.0}
    lines = [json.dumps({"step": step, **record}) + "\n" for step in range(1, 6)]
    (folder / "run" / "metrics.jsonl").write_text("".join(lines))
    files = TrajectoryFiles(folder / "run" / "trajectories", 0, 1 << 20)
    keep(files, table(1, *(one(index=i, ids=range(10 if i == 0 else 4)) for i in range(4))))


def test_a_plan_from_an_earlier_run_has_its_times_and_says_which_split_is_best(tmp_path, capsys):
    """A step of all workers takes 1.75 s, as the run's, if one of its completions has 10 tokens.

    Of 8 workers 4 sample 16 completions, of 5.5 tokens on average and two at once in each, in 1.1 s
    and more; the other 4 train for 1 s; and a refit, in which all stand still, takes 0.25 s.
    """
    earlier_run(tmp_path)
    main(["plan", "--from", f"{tmp_path}/run"])
    lines = capsys.readouterr().out.split("Simulated   ")[1].splitlines()
    assert lines[0] == (
        f"3 steps and 4 completions of {tmp_path}/run: 6 tokens, at most 10, 0.1 s each, up to "
        "2 at once in an engine"
    )
    rows = [" ".join(line.split()) for line in lines[2:-1]]
    assert rows[5] == "8 all all 0 1.73 s 51 68% 57% 0"
    assert rows[8] == "8 4 4 2 1.42 s 62 22% 12% 2"
    assert rows[-2] == "4096 all all 0 1.75 s 25,746 69% 57% 0"
    assert rows[-1] == "4096 2048 2048 2 1.57 s 28,759 30% 20% 2"
    assert lines[-1] == (
        "best of 8 workers: cluster.num_generation_workers=4 rollout.max_lag=2, 1.22 x the "
        "tokens/s of sharing"
    )


def test_a_plan_from_an_earlier_run_names_what_its_times_leave_out(tmp_path, capsys):
    earlier_run(tmp_path)
    folder = f"{tmp_path}/run"
    main(["plan", "--from", folder, "policy.optimizer.lr=1", "generation.max_new_tokens=8"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        f"The times are of {folder}, which ran with other values of generation.max_new_tokens."
    )


@pytest.mark.parametrize(
    ("words", "lags"),
    [
        ([], {"0", "1", "2", "4"}),
        (["loss.importance=none"], {"0"}),
        (["mismatch.action=mask"], {"0"}),
        (["rollout.overlap=true", "loss.importance=none"], {"0"}),
    ],
)
def test_settings_that_a_run_refuses_are_not_recommended(words, lags, tmp_path, capsys):
    earlier_run(tmp_path)
    main(["plan", "--from", f"{tmp_path}/run", *words])
    lines = capsys.readouterr().out.split("Simulated   ")[1].splitlines()
    assert {line.split()[3] for line in lines[2:] if line.split()[0] == "8"} == lags
    (best,) = [line for line in lines if line.startswith("best of 8 workers: ")]
    assert ("rollout.max_lag" in best) == (len(lags) > 1)


def test_no_split_is_recommended_where_weights_would_not_reach_it(tmp_path, capsys):
    earlier_run(tmp_path)
    main(["plan", "--from", f"{tmp_path}/run", "refit.transport=ipc"])
    assert "best of 8 workers: all sample, then all train" in capsys.readouterr().out


def test_a_run_that_slurm_may_requeue_is_planned_by_its_folder(tmp_path, capsys):
    earlier_run(tmp_path, "cluster.slurm.requeue=true", "run.resume=true")
    main(["plan", "--from", f"{tmp_path}/run"])
    assert "best of " in capsys.readouterr().out


def test_the_file_of_a_run_takes_no_preset(tmp_path, capsys):
    earlier_run(tmp_path)
    with pytest.raises(SystemExit):
        main(["plan", f"{tmp_path}/run/config.yaml", "model=smollm2"])
    assert (
        "model=smollm2 chooses a preset, which the file given does not use; leave it out"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["ppo"], "ran grpo, and the plan is for ppo; give a run of the same algorithm"),
        (
            ["cluster.gpus_per_node=1", "cluster.cpu_workers_per_node=1"],
            "ran on CPUs, and the plan is for GPUs; give a run on GPUs",
        ),
    ],
)
def test_times_of_another_algorithm_or_of_cpus_are_refused(words, error, tmp_path, capsys):
    earlier_run(tmp_path)
    with pytest.raises(SystemExit):
        main(["plan", "--from", f"{tmp_path}/run", *words])
    assert error in capsys.readouterr().err


def test_engines_slow_down_with_what_they_sample_and_stand_still_for_prompts_and_refits():
    """By hand: 2 groups of 1 and 2 tokens, of which the engine makes each in 1 s, or two in 3 s."""
    lengths = iter(range(10**6))
    changes = {"tokens": lambda _: 1 + next(lengths) % 2, "token_s": lambda count: 2 * count - 1}
    slow = work(**changes, row_s=0.25, group_s=0.125, refit_s=0.5)
    assert simulate(slow).step_s == 0.25 * 2 + 3 + 1 + 0.125 + 1 + 0.5


def test_where_an_engine_has_slots_for_some_the_others_wait(tmp_path):
    """Of 8 workers one samples 8 x 2 completions of 1 s: in one wave, or two at once."""
    config = small_config(
        tmp_path,
        "cluster.cpu_workers_per_node=8",
        "grpo.num_prompts_per_step=8",
        "grpo.num_generations_per_prompt=2",
    )
    same = {"source": "", "train_s": 0.0, "refit_s": 0.0, "lengths": [1.0]}
    times = [Times(token_s=lambda _: 1.0, slots=slots, **same) for slots in (1024, 2)]
    plan = plan_run(config)
    waves = [Planner(config, one, plan).outcome(8, 1, 0).found.step_s for one in times]
    assert waves == pytest.approx([1.0, 8.0])


def test_mps_lets_a_shared_gpu_sample_and_train_at_the_same_time(tmp_path):
    """Completions of 1 s, and 1 s of training: in turns, or for the most part at once."""
    same = ("cluster.gpus_per_node=1", "generation.sleep=false", "rollout.max_lag=1")
    same = (*same, "grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2")
    times = Times(
        source="", token_s=lambda _: 1.0, slots=4, train_s=0.25, refit_s=0.0, lengths=[1.0]
    )
    seconds = []
    for options in ((), ("cluster.mps=true",)):
        config = small_config(tmp_path, *same, *options)
        outcome = Planner(config, times, plan_run(config)).outcome(1, None, 1)
        seconds.append(outcome.found.step_s)
    assert seconds[0] == pytest.approx(2.0)
    assert 1.0 < seconds[1] < 1.6


def test_what_is_simulated_of_many_engines_has_as_many_groups_for_each_as_all_have(tmp_path):
    """512 groups of 16 on 4 to 7 of 8 workers; a fifth engine is no slower for the others."""
    sizes = ("grpo.num_prompts_per_step=512", "grpo.num_generations_per_prompt=16")
    config = small_config(tmp_path, "cluster.cpu_workers_per_node=8", *sizes)
    times = Times(
        source="", token_s=lambda _: 1.0, slots=1024, train_s=0.0, refit_s=0.0, lengths=[1.0],
        row_s=0.001,
    )  # fmt: skip
    planner = Planner(config, times, plan_run(config))
    seconds = [planner.outcome(8, engines, 0).found.step_s for engines in (4, 5, 6, 7)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[1] < 0.9 * seconds[0]


def test_the_same_split_of_more_workers_leaves_whole_models_to_both_sides(tmp_path):
    sizes = ("cluster.cpu_workers_per_node=12", "grpo.num_prompts_per_step=12")
    config = small_config(tmp_path, *sizes, "policy.parallel.tensor_parallel_size=2")
    times = Times(
        source="", token_s=lambda _: 1.0, slots=8, train_s=1.0, refit_s=0.0, lengths=[1.0]
    )
    planner = Planner(config, times, plan_run(config))
    best = planner.outcome(12, 4, 1)
    for workers in (32, 64, 4096):
        (choice,) = planner.scaled(best, workers)
        assert 0 < choice.sampling <= workers / 3
        assert (workers - choice.sampling) % 2 == 0


def test_a_large_step_of_one_engine_is_simulated_whole(tmp_path):
    """4,096 completions of a second, 1,024 at once, take four seconds."""
    config = small_config(tmp_path, "grpo.num_prompts_per_step=1024")
    times = Times(
        source="", token_s=lambda _: 1.0, slots=1024, train_s=0.0, refit_s=0.0, lengths=[1.0]
    )
    planner = Planner(config, times, plan_run(config))
    assert planner.outcome(1, None, 0).found.step_s == pytest.approx(4.0)


def test_groups_larger_than_what_is_simulated_stay_whole_where_engines_outnumber_them(tmp_path):
    """Of 8 engines 2 work: each on 4,096 completions of a second, 1,024 at once."""
    sizes = ("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=4096")
    workers = ("cluster.cpu_workers_per_node=8", "cluster.num_generation_workers=1")
    config = small_config(tmp_path, *sizes, *workers)
    times = Times(
        source="", token_s=lambda _: 1.0, slots=1024, train_s=0.0, refit_s=0.0, lengths=[1.0]
    )
    planner = Planner(config, times, plan_run(config))
    assert planner.outcome(8, None, 0).found.step_s == pytest.approx(4.0)


def test_an_earlier_run_that_was_continued_is_read_unless_it_sampled_ahead_for_a_while(
    tmp_path, capsys
):
    earlier_run(tmp_path, "run.resume=true")
    main(["plan", "--from", f"{tmp_path}/run"])
    assert "3 steps and 4 completions of " in capsys.readouterr().out
    metrics = tmp_path / "run" / "metrics.jsonl"
    first, *others = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first.replace("{", '{"staleness/max": 1.0, ', 1) + "".join(others))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--from", f"{tmp_path}/run"])
    assert ended.value.code == 2
    assert "is a run whose phases overlap" in capsys.readouterr().err


def test_an_earlier_run_with_a_time_that_is_none_is_refused(tmp_path, capsys):
    earlier_run(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    for wrong in ('"1.75"', "NaN"):
        metrics.write_text(metrics.read_text().replace("1.75", wrong))
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--from", f"{tmp_path}/run"])
        assert ended.value.code == 2
        assert "time/step_s in its metrics.jsonl is not a number" in capsys.readouterr().err
        metrics.write_text(metrics.read_text().replace(wrong, "1.75"))


@pytest.mark.parametrize(
    "words", [[], ["run.dir=x"], ["lr=1e-4,seed=0/config.yaml", "run.dir=x"]], ids=str
)
def test_a_part_of_a_sweep_is_planned_by_its_folder_or_file(tmp_path, monkeypatch, capsys, words):
    part = tmp_path / "lr=1e-4,seed=0"
    earlier_run(tmp_path)
    (tmp_path / "run").rename(part)
    monkeypatch.chdir(tmp_path)
    main(["plan", "--from", str(part), *words])
    assert "Simulated   3 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--simulate"], "add --from with the folder of a run on these CPUs"),
        (
            ["--simulate", "cluster.gpus_per_node=8", "grpo.num_prompts_per_step=1000000000"],
            "1,000,000,000 completions a step, and at most 20,000 are simulated; lower one",
        ),
        (["sft", "--simulate"], "for runs that sample what they train on"),
        (["--from", "FOLDER"], "has no config.yaml; give the folder of a run"),
        (["--from", "FOLDER/run"], "whose phases overlap; give one with rollout.max_lag=0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path, arguments, error, capsys):
    earlier_run(tmp_path, "rollout.max_lag=1")
    with pytest.raises(SystemExit) as ended:
        main(["plan", *(one.replace("FOLDER", str(tmp_path)) for one in arguments)])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err
