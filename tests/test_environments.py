import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from nemo_like.data import reasoning_gym as reasoning_gym_reward
from nemo_like.errors import UserError
from nemo_like.rewards.find import resolve_reward
from nemo_like.rewards.pool import RewardPool

REWARDS = '''
import asyncio, multiprocessing, os, signal, subprocess, sys, threading, time
import sibling
from numpy import complex64

class _Pair:
    def __float__(self):
        raise TypeError("there are two")

def by_completion(prompt, completion, **fields):
    """The completion says how to behave."""
    if completion == "raise":
        raise ValueError("no such luck")
    if completion == "hang":
        time.sleep(60)
    if completion == "exit":
        os._exit(3)
    if completion == "sys.exit":
        sys.exit("bye")
    if completion == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "recurse":
        return by_completion(prompt, completion)
    if completion == "hog":
        return float(len(bytearray(2 << 30)))
    if completion == "die later":
        threading.Timer(0.05, lambda: os._exit(1)).start()
        return 1.0
    if completion == "fork":
        child = os.fork()
        return {"reward": 1.0 if child else -1.0, "child": child}
    if completion == "child":
        subprocess.Popen(["sleep", fields["seconds"]])
        subprocess.Popen(["sleep", fields["seconds"] + "1"], start_new_session=True)
        time.sleep(60)
    if completion == "daemon":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", fields["seconds"]])
            os._exit(0)
        os.wait()
    if completion == "orphan":
        subprocess.run(["sh", "-c", f"sleep {fields['seconds']} &"])
    if completion == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(5)
        return float(threading.current_thread() is threading.main_thread())
    return {
        "none": None, "nan": float("nan"), "inf": float("inf"), "text": "0.5",
        "dict": {"reward": 0.5, "length": 3, "ok": True}, "bad metric": {"reward": 1, "x": "y"},
        "nan metric": {"reward": 1, "x": float("nan")}, "no reward": {"score": 1},
        "skip": {"reward": None, "error": "cannot be scored"}, "lambda": lambda: 1,
        "pair": _Pair(), "huge": 10**400, "int": 2, "bool": True, "pid": os.getpid(),
        "sibling": sibling.VALUE, "float64": 1e200, "complex": complex64(1),
    }.get(completion, 1.0)

def terminates(prompt, completion):
    """Ends children as any code does, after a SIGTERM of its own."""
    os.kill(os.getpid(), signal.SIGTERM)
    command = subprocess.Popen(["sleep", "60"])
    command.terminate()
    forks = multiprocessing.get_context("fork")
    ready = forks.Event()
    fork = forks.Process(target=lambda: (ready.set(), time.sleep(60)))
    fork.start()
    ready.wait(5)
    fork.terminate()
    fork.join(5)
    return {"reward": 1.0, "command": command.wait(5), "fork": fork.exitcode}

async def slow(prompt, completion):
    await asyncio.sleep(0.01)
    return 0.25

def picky(completion, prompt, answer, bonus=0.0):
    return float(completion == answer) + bonus

def only_prompt(prompt):
    return 1.0

not_callable = 3
'''


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "sibling.py").write_text("VALUE = 7.0\n")
    file = folder / "my_reward.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture(scope="module")
def pool(reward_file):
    pool = RewardPool(
        f"{reward_file}:by_completion", timeout_s=0.5, num_processes=2, memory_limit_bytes=1 << 30
    )
    yield pool
    pool.shutdown()


def test_sigterm_costs_no_row_and_ends_what_a_function_ends_by_it(reward_file):
    """Workers block it, which their children inherit."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        pool = RewardPool(f"{reward_file}:terminates", timeout_s=20.0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    (one,) = score(pool, "")
    pool.shutdown()
    assert one.reward == 1.0, one.error
    assert one.metrics == {"command": -signal.SIGTERM, "fork": -signal.SIGTERM}


def score(pool: RewardPool, *completions: str, **fields):
    async def all_of_them():
        return await asyncio.gather(*(pool.score("p", c, fields) for c in completions))

    return asyncio.run(all_of_them())


def test_numbers_and_dicts_become_rewards_and_metrics(pool):
    results = score(pool, "int", "bool", "dict", "anything", "sibling")
    assert [g.reward for g in results] == [2.0, 1.0, 0.5, 1.0, 7.0]
    assert results[2].metrics == {"length": 3.0, "ok": 1.0}
    assert all(g.error is None for g in results)


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("none", "returned None"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("text", "str"),
        ("pair", "the reward is a _Pair, not one number: there are two."),
        ("huge", "the reward is a int, not one number: int too large"),
        ("float64", "the reward is 1e+200, not a finite number of at most 3e+38"),
        ("complex", "the reward is a complex64, not a number"),
        ("no reward", "without 'reward'"),
        ("skip", "cannot be scored"),
        ("lambda", "function"),
        ("raise", "ValueError: no such luck"),
        ("recurse", "RecursionError"),
        ("sys.exit", "SystemExit: bye"),
        ("exit", "exit code 3"),
        ("crash", "SIGSEGV"),
        ("hang", "took longer than"),
        ("hog", "MemoryError"),
    ],
)
def test_a_row_that_fails_has_no_reward_and_says_why(pool, completion, reason):
    failed, good = score(pool, completion, "good")
    assert failed.reward is None
    assert reason in failed.error
    assert good.reward == 1.0


def test_the_error_names_the_line_of_the_users_code(pool):
    (failed,) = score(pool, "raise")
    line = REWARDS.splitlines().index('        raise ValueError("no such luck")') + 1
    assert f"my_reward.py:{line}" in failed.error


def test_a_process_that_the_function_forked_ends_with_its_row(pool):
    forked, after = score(pool, "fork")[0], score(pool, "int")[0]
    assert (forked.reward, after.reward) == (1.0, 2.0)
    state = Path(f"/proc/{forked.metrics['child']:.0f}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(") ")[2][0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"{state} is still there")


def test_three_hanging_rows_do_not_keep_a_pool_of_two_from_the_fourth(pool):
    results = score(pool, "hang", "hang", "hang", "good")
    assert [g.reward for g in results] == [None, None, None, 1.0]


def test_a_process_that_dies_between_rows_costs_no_row(pool):
    assert [g.reward for g in score(pool, "die later", "die later")] == [1.0, 1.0]
    time.sleep(0.3)
    assert [g.reward for g in score(pool, "good", "good")] == [1.0, 1.0]


def test_results_come_in_the_order_of_the_calls(pool):
    results = score(pool, *["int", "raise", "dict", "none"] * 5)
    assert [g.reward for g in results] == [2.0, None, 0.5, None] * 5


def test_functions_run_in_the_main_thread_and_leave_no_alarm(pool):
    assert [g.reward for g in score(pool, "alarm")] == [1.0]


def test_fields_that_cannot_be_sent_cost_their_row_only(pool):
    (failed,) = score(pool, "good", field=lambda: 1)
    assert failed.reward is None
    assert "field 'field' holds a function, which is not plain data" in failed.error


def test_only_accepted_fields_are_passed_and_missing_ones_are_named(reward_file):
    pool = RewardPool(f"{reward_file}:picky")
    try:
        (right,) = score(pool, "4", answer="4", unknown=1)
        (lacking,) = score(pool, "4", unknown=1)
    finally:
        pool.shutdown()
    assert right.reward == 1.0
    assert lacking.reward is None
    assert "lacks answer" in lacking.error


def test_async_functions_are_awaited(reward_file):
    pool = RewardPool(f"{reward_file}:slow")
    try:
        assert score(pool, "x")[0].reward == 0.25
    finally:
        pool.shutdown()


def test_shutdown_ends_the_processes_and_what_they_started(reward_file):
    pool = RewardPool(f"{reward_file}:by_completion", timeout_s=30)
    seconds = f"61.{os.getpid()}"

    async def shut_down_while_busy():
        await pool.score("p", "daemon", {"seconds": f"{seconds}2"})
        waiting = [asyncio.create_task(pool.score("p", "child", {"seconds": seconds}))] * 2
        while not all(running(f"sleep {seconds}{kind}") for kind in (1, 2)):
            await asyncio.sleep(0.02)
        pool.shutdown()
        return await asyncio.gather(*waiting)

    results = asyncio.run(shut_down_while_busy())
    assert all(g.reward is None and "shut down" in g.error for g in results)
    ends = time.monotonic() + 5  # a killed process is gone a moment later
    while any(running(f"sleep {seconds}{kind}") for kind in ("", 1, 2)) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not running(f"sleep {seconds}")
    assert not running(f"sleep {seconds}1"), "in a session of its own"
    assert not running(f"sleep {seconds}2"), "in a session of its own, whose leader had ended"


def test_what_a_function_leaves_behind_and_ended_is_no_zombie(pool):
    """A process table that fills up over a run's rows would end it."""
    pids = {int(g.reward) for g in score(pool, *["pid"] * 8)}
    score(pool, *["daemon", "orphan"] * 4, seconds="0.01")
    time.sleep(0.1)
    for _ in range(2):
        score(pool, *["int"] * 8)
    assert not [
        one for pid in pids for one in psutil.Process(pid).children() if one.name() == "sleep"
    ]


def test_reward_processes_do_not_outlive_a_killed_parent(reward_file):
    seconds = f"62.{os.getpid()}"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                import asyncio
                from nemo_like.rewards.pool import RewardPool
                pool = RewardPool("{reward_file}:by_completion", timeout_s=50)
                print(int(asyncio.run(pool.score("p", "pid", {{}})).reward), flush=True)
                asyncio.run(pool.score("p", "child", {{"seconds": "{seconds}"}}))
            """),
        ],
        stdout=subprocess.PIPE,
    )
    pid = int(parent.stdout.readline())
    deadline = time.monotonic() + 30
    while not running(f"sleep {seconds}1") and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert not running(f"sleep {seconds}1"), "what the reward function had started"


def running(command: str) -> bool:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if entry.read_bytes().replace(b"\0", b" ").strip() == command.encode():
                return True
        except OSError:
            continue
    return False


def test_a_reward_that_cannot_be_used_is_refused_in_one_sentence(reward_file, tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n    pass\n")
    (tmp_path / "needs.py").write_text("\nimport not_there_at_all\n")
    for spec, reason in {
        f"{tmp_path}/absent.py:f": "no Python file",
        f"{reward_file}:by_completio": "did you mean by_completion?",
        f"{reward_file}:not_callable": "is a int, not a function",
        f"{reward_file}:only_prompt": "def reward(prompt, completion, **fields)",
        f"{tmp_path}/broken.py:f": "broken.py:2",
        f"{tmp_path}/needs.py:f": "needs.py:2",
        "not_there_at_all.rewards.f": "no module not_there_at_all",
        "maths": "did you mean math?",
        "reward.py": "file.py:function",
    }.items():
        with pytest.raises(UserError) as caught:
            resolve_reward(spec)
        assert reason in str(caught.value), spec
        assert "\n" not in str(caught.value)


def test_the_pool_refuses_what_cannot_be_used(reward_file, tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(9)\n")
    with pytest.raises(UserError, match="not_callable is a int"):
        RewardPool(f"{reward_file}:not_callable", num_processes=2)
    with pytest.raises(UserError, match="exit code 9"):
        RewardPool(f"{tmp_path}/dies.py:f")


def test_rewards_are_found_by_relative_path_and_by_module(reward_file, monkeypatch):
    monkeypatch.chdir(reward_file.parent)
    assert resolve_reward("my_reward.py:by_completion")("p", "int", {}) == 2
    by_name = resolve_reward("nemo_like.rewards.math.reward.reward")
    assert by_name("p", r"\boxed{4}", {"answer": "4"})["reward"] == 1.0
    assert resolve_reward("math").required_fields == {"answer"}


def gold_rows(tasks: dict, num_rows: int = 12) -> list[dict]:
    rows = reasoning_gym_reward.rows(tasks, num_rows, seed=3)
    return [json.loads(json.dumps(row)) for row in rows]


def task_score(row: dict, completion: str) -> float:
    fields = {key: value for key, value in row.items() if key != "prompt"}
    return reasoning_gym_reward.reward(row["prompt"], completion, **fields)["reward"]


TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "basic_arithmetic": {},
    "countdown": None,
    "knights_knaves": {},
    "spell_backward": {},
    "rearc": {},
}


def test_gold_answers_formatted_as_asked_earn_everything():
    rows = gold_rows(TASKS)
    assert [row["task"] for row in rows] == list(TASKS) * 2
    for row in rows:
        assert task_score(row, f"Well. <answer> {row['answer']} </answer>") == 1.0, row["task"]


def test_a_verifier_sees_metadata_as_its_task_made_it():
    value = {"board": ((1, 2), [3, {"x": (4,)}]), "edges": {0: 1, 2: (3,)}, "name": None}
    packed = json.loads(json.dumps(reasoning_gym_reward.pack(value)))
    assert reasoning_gym_reward.unpack(packed) == value


def test_only_the_last_closed_answer_of_the_completion_counts():
    row = gold_rows({"chain_sum": {}}, 1)[0]
    gold = f"<answer>{row['answer']}</answer>"
    assert task_score(row, "<answer>x</answer>" + gold) == 1.0
    assert task_score(row, f"<think>hm <answer>x</answer></think>{gold}") == 1.0
    for completion in (
        row["answer"],
        gold + "<answer>x</answer>",
        gold + " or <answer>",
        f"<answer>{row['answer']}",
        "<think>" + gold,
        f"<think>{gold}</think>",
        "",
    ):
        assert task_score(row, completion) == 0.0, completion
    row["prompt"] = gold
    assert task_score(row, "see above") == 0.0


def test_rows_are_cheap_reproducible_and_differ_between_seeds():
    start = time.thread_time()
    rows = list(reasoning_gym_reward.rows({"chain_sum": {}}, 20_000, seed=0))
    assert time.thread_time() - start < 5
    assert rows[:50] == list(reasoning_gym_reward.rows({"chain_sum": {}}, 50, seed=0))
    other = {row["prompt"] for row in reasoning_gym_reward.rows({"chain_sum": {}}, 500, seed=1)}
    assert len(other & {row["prompt"] for row in rows[:500]}) < 50


@pytest.mark.parametrize(
    ("tasks", "reason"),
    [
        ({"chain_summ": {}}, "did you mean chain_sum?"),
        ({"chain_sum": {"min_term": 2}}, "did you mean min_terms?"),
        ({"chain_sum": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"chain_sum": {"seed": 1}}, "run.seed"),
        ({}, "data.tasks is empty"),
    ],
)
def test_unknown_tasks_and_parameters_are_refused_before_the_first_row(tasks, reason):
    with pytest.raises(UserError) as caught:
        reasoning_gym_reward.rows(tasks, 3, seed=0)
    assert reason in str(caught.value)
