"""What a reward function prints, how often it failed and why, and its first row, which imports."""

import asyncio
import json
import os
import re
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from nemo_like.batch import keys
from nemo_like.cli import main
from nemo_like.config.environment import EnvironmentConfig, RewardPart
from nemo_like.errors import RunError
from nemo_like.rewards.pool import RewardPool
from nemo_like.rewards.start import start_pool
from nemo_like.rollout.failures import FILE, RewardFailures

REWARDS = """
import asyncio, sys, time

print("loaded")
imported = []

def slow_import():
    if not imported:
        imported.append(time.sleep(1.5))

def prints(prompt, completion):
    print("scoring", completion)
    print("to stderr", file=sys.stderr)
    if completion == "hang":
        time.sleep(60)
    return 1.0

def waits(prompt, completion):
    open(completion, "w").close()
    time.sleep(60)

def imports(prompt, completion, **fields):
    slow_import()
    time.sleep(float(completion))
    return 1.0

async def imports_and_waits(prompt, completion, **fields):
    slow_import()
    await asyncio.sleep(float(completion))
    return 1.0

def picky(prompt, completion, answer):
    print("wanted", answer)
    if answer == "no":
        raise ValueError("there is no answer")
    return {"reward": float(completion == answer), "length": len(completion)}
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "debugged.py"
    file.write_text(REWARDS)
    return file


def score(pool, *completions):
    async def all_of_them():
        return await asyncio.gather(*(pool.score("p", c, {}) for c in completions))

    return asyncio.run(all_of_them())


def test_prints_are_in_the_log_before_the_row_ends(reward_file, tmp_path):
    log = tmp_path / "rewards-0.log"
    pool = start_pool(EnvironmentConfig(reward=f"{reward_file}:prints", timeout_s=0.2), log=log)
    (late,) = score(pool, "hang")
    pool.shutdown()
    assert late.reward is None
    assert log.read_text().splitlines()[:3] == ["loaded", "scoring hang", "to stderr"]


@pytest.mark.parametrize("function", ["imports", "imports_and_waits"])
def test_the_first_row_of_a_process_may_import(reward_file, function):
    """1.5 s of imports do not fit 0.5 s, but the six times as long that the first row has."""
    pool = RewardPool(f"{reward_file}:{function}", timeout_s=0.5)
    first = score(pool, "0")
    began = time.monotonic()
    second = score(pool, "30")
    took = time.monotonic() - began
    pool.shutdown()
    assert first[0].reward == 1.0, first[0].error
    assert "took longer than 0.5 s" in second[0].error
    assert took < 2.5


def test_rows_that_all_hang_do_not_all_have_the_time_of_a_first_one(reward_file):
    pool = RewardPool(f"{reward_file}:prints", timeout_s=0.1)
    results = score(pool, *["hang"] * 4)
    pool.shutdown()
    assert [one.error for one in results] == [
        *["took longer than 0.6 s"] * 2,
        *["took longer than 0.1 s"] * 2,
    ]


def failing(count, of, **errors):
    """Results of one replica: the first ``count`` rows failed."""
    rows = {
        keys.SAMPLE_MASK: torch.arange(of) >= count,
        keys.GROUP_IDS: torch.zeros(of, dtype=torch.int64),
        keys.SIBLINGS: torch.arange(of),
    }
    return rows, [SimpleNamespace(errors=errors, dropped_metrics={})]


def test_each_reason_is_counted_at_each_step_and_said_once(tmp_path, caplog):
    failures = RewardFailures(EnvironmentConfig(reward="my.py:f"), tmp_path, -1)
    failures.check(1, "train", *failing(0, 4))
    assert not (tmp_path / FILE).exists()
    failures.check(1, "train", *failing(3, 4, late=2, KeyError=1))
    failures.check(2, "validation", *failing(1, 4, KeyError=1))
    failures.check(3, "train", *failing(2, 4, **{"no verdict\n'hm'": 1, "no verdict\n'so so'": 1}))
    assert "2 x no verdict 'hm'" in caplog.text
    assert caplog.text.count("KeyError") == 1
    assert "on 1 of 4 completions of validation at step 2" in caplog.text
    found = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert found == [
        {"step": 1, "phase": "train", "failed": 3, "of": 4, "reasons": {"late": 2, "KeyError": 1}},
        {"step": 2, "phase": "validation", "failed": 1, "of": 4, "reasons": {"KeyError": 1}},
        {"step": 3, "phase": "train", "failed": 2, "of": 4, "reasons": {"no verdict": 2}},
    ]


def test_a_metric_that_is_left_out_is_named_once(tmp_path, caplog):
    failures = RewardFailures(EnvironmentConfig(reward="my.py:f"), tmp_path, -1)
    rows, (result,) = failing(0, 4)
    result.dropped_metrics = {"nan": "it is nan", "text": "it is a str"}
    for step in range(3):
        failures.check(step, "train", rows, [result, result])
    assert re.findall(r"my\.py:f: metric '(\w+)'", caplog.text) == ["nan", "text"]


def test_what_failed_is_named_where_there_are_several_rewards_or_tasks(tmp_path):
    several = EnvironmentConfig(rewards={"one": RewardPart(function="math")})
    tasks = EnvironmentConfig(tasks={"game": EnvironmentConfig(name="guess")})
    game = EnvironmentConfig(name="guess")
    for environment, named in (
        (several, "environment.rewards"),
        (tasks, "environment.tasks"),
        (game, "environment.name=guess"),
    ):
        with pytest.raises(RunError, match=rf"{named} failed on all 4 completions of step 1"):
            RewardFailures(environment, tmp_path, -1).check(1, "train", *failing(4, 4, x=4))


def test_a_resumed_run_counts_no_step_twice(tmp_path, caplog):
    before = RewardFailures(EnvironmentConfig(reward="my.py:f"), tmp_path, -1)
    for step in (1, 2):
        before.check(step, "train", *failing(1, 4, KeyError=1))
    caplog.clear()
    again = RewardFailures(EnvironmentConfig(reward="my.py:f"), tmp_path, 1)
    with pytest.raises(RunError, match=r"my\.py:f failed on all 4 completions of step 2; first: x"):
        again.check(2, "train", *failing(4, 4, x=4))
    found = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(one["step"], one["failed"]) for one in found] == [(1, 1), (2, 4)]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_a_run_goes_on_after_a_reason_with_any_character(tmp_path, character):
    environment = EnvironmentConfig(reward="my.py:f")
    failures = failing(1, 4, **{f"odd{character}name": 1})
    RewardFailures(environment, tmp_path, -1).check(1, "train", *failures)
    assert RewardFailures(environment, tmp_path, 1)._known == {f"odd{character}name"}


def test_a_reward_is_tried_on_rows_without_a_run(reward_file, tmp_path, capfd):
    rows = tmp_path / "rows.jsonl"
    answers = ["7", "no", *["8"] * 10]
    rows.write_text("".join(f'{{"question": "?", "answer": "{one}"}}\n' for one in answers))
    typed = ["try-reward", f"{reward_file}:picky", str(rows), "data.columns.prompt=question"]
    main(typed)
    out = capfd.readouterr().out
    assert out.count("wanted") == 10
    assert "row 0, '7': 1 length=1 (" in out
    assert "1 of 10 failed: ValueError: there is no answer" in out
    assert "9 scored: mean 1, from 1 to 1." in out
    main([*typed, "--rows=1", "--completion=6"])
    assert "1 scored: mean 0, from 0 to 0." in capfd.readouterr().out


def test_a_trial_takes_files_of_any_name_and_at_least_one_row(reward_file, tmp_path, capfd):
    folder = tmp_path / "a, b=c {1}"
    folder.mkdir()
    rows, file = folder / "rows, 1=2.jsonl", shutil.copy(reward_file, folder / "mine, a=b.py")
    rows.write_text('{"question": "?", "answer": "7"}\n')
    words = ["try-reward", f"{file}:picky", str(rows), "data.columns.prompt=question"]
    main(words)
    assert "1 scored: mean 1, from 1 to 1." in capfd.readouterr().out
    for command in ([*words, "--rows=0"], ["data", "--rows=-1"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        assert "must be a whole number of at least" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["try-reward", "environment.reward=math", str(rows)])
    assert "needs a reward function and a file of rows" in capfd.readouterr().err


def test_an_interrupted_trial_of_a_reward_does_not_speak_of_a_run(reward_file, tmp_path, capfd):
    rows, scoring = tmp_path / "rows.jsonl", tmp_path / "scoring"
    rows.write_text(json.dumps({"prompt": "?", "answer": str(scoring)}) + "\n")

    def interrupt():
        for _ in range(600):
            if scoring.exists():
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.1)

    threading.Thread(target=interrupt).start()
    with pytest.raises(SystemExit) as ended:
        main(["try-reward", f"{reward_file}:waits", str(rows)])
    assert ended.value.code == 130
    assert capfd.readouterr().err == "Interrupted.\n"


def test_a_reward_that_fails_on_every_row_ends_with_an_error(reward_file, tmp_path, capfd):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "?", "answer": "no"}\n')
    with pytest.raises(SystemExit) as ended:
        main(["try-reward", f"{reward_file}:picky", str(rows)])
    assert ended.value.code == 1
    assert "failed on all 1 rows" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["try-reward", f"{reward_file}:picky"])
    assert ended.value.code == 2
