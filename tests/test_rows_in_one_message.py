"""Rows that a single reward process gets in one message: each keeps its order, limit and fate."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from nemo_like.rewards.pool import RewardPool

REWARD = """
import os, sys, time
from pathlib import Path

SCORED = Path(__file__).parent / "scored"

def by_completion(prompt, completion, **fields):
    with SCORED.open("a") as scored:
        scored.write(f"{completion}\\n")
    how, _, what = completion.partition(" ")
    if how == "sleep":
        time.sleep(float(what))
    if how == "die":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "garbage":
        os.write(int(sys.argv[1]), b"hello, pool, how are you?")
        time.sleep(60)
    if how == "exhaust":
        raise MemoryError("no more")
    return {"reward": float(what or 0), "pid": os.getpid()}

def together(prompts, completions, **fields):
    time.sleep(0.3 * len(completions))
    return [float(len(completions))] * len(completions)
"""
BREAKS_ONCE = """
import asyncio, os
from pathlib import Path

BROKEN = Path(__file__).parent / "broken"
if BROKEN.exists():
    BROKEN.unlink()
    raise OSError("the disk is gone")

def reward(prompt, completion, **fields):
    if completion == "die":
        BROKEN.touch()
        os._exit(1)
    return 1.0

def batched(prompts, completions, **fields):
    for completion in completions:
        reward("", completion)
    return [float(len(completions))] * len(completions)

OPEN = []

async def concurrent(prompt, completion, **fields):
    OPEN.append(1)
    reward("", completion)
    await asyncio.sleep(0.05)
    most = len(OPEN)
    OPEN.pop()
    return float(most)

async def waits(prompt, completion, **fields):
    if completion == "exit":
        os._exit(1)
    await asyncio.sleep(float(completion.split()[1]))
    return 1.0
"""
LONG = "x" * 20_000
"""Makes 150 rows more than a message, and more than a socket holds."""


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "logged.py"
    file.write_text(REWARD)
    return file


@pytest.fixture(scope="module")
def shared(reward):
    pool = RewardPool(f"{reward}:by_completion", timeout_s=1.0)
    yield pool
    pool.shutdown()


@pytest.fixture
def pool(shared, reward):
    """After its first row, which may take longer; nothing is noted yet."""
    score(shared, "row 0")
    (reward.parent / "scored").unlink()
    return shared


def score(pool, *completions, prompt=""):
    async def all_of_them():
        rows = (pool.score(prompt, one, {}) for one in completions)
        return await asyncio.wait_for(asyncio.gather(*rows), 30)

    return asyncio.run(all_of_them())


def scored(reward):
    return (reward.parent / "scored").read_text().splitlines()


def test_rows_are_scored_once_in_the_order_of_the_calls(pool, reward):
    rows = [f"row {i}" for i in range(300)]
    results = score(pool, *rows, prompt=LONG)
    assert [one.reward for one in results] == [float(i) for i in range(300)]
    assert scored(reward) == rows
    assert len({one.metrics["pid"] for one in results}) == 1


def test_the_time_of_a_row_begins_when_the_row_before_is_scored(pool):
    start = time.monotonic()
    *slow, late, after = score(pool, *["sleep 0.6"] * 3, "sleep 60", "row 5")
    seconds = time.monotonic() - start
    assert [one.error for one in slow] == [None] * 3, "together they take longer than the limit"
    assert late.error == "took longer than 1 s"
    assert after.reward == 5.0
    assert 3 * 0.6 + 1.0 <= seconds < 3 * 0.6 + 1.0 + 2.5


def test_only_the_first_row_of_a_process_has_extra_time(reward):
    pool = RewardPool(f"{reward}:by_completion", timeout_s=0.5)
    _, first, late = score(pool, "die", "sleep 1.2", "sleep 60")
    pool.shutdown()
    assert first.reward == 1.2
    assert late.error == "took longer than 0.5 s"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("die", "ended with exit code 3"),
        ("kill", "ended by SIGKILL"),
        ("garbage", "wrote something else to its socket"),
        ("sleep 60", "took longer than 1 s"),
        ("exhaust", "MemoryError: no more"),
    ],
)
def test_what_ends_a_process_amid_its_rows_costs_one_and_repeats_none(pool, reward, how, reason):
    rows = [f"row {i}" for i in range(150)]
    rows[40] = how
    results = score(pool, *rows, prompt=LONG)
    failed = results.pop(40)
    assert failed.reward is None
    assert reason in failed.error
    assert [one.error for one in results] == [None] * 149
    assert scored(reward) == rows
    pids = [one.metrics["pid"] for one in results]
    assert len(set(pids[:40])) == len(set(pids[40:])) == 1
    assert pids[0] != pids[-1]
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(pids[0])) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not psutil.pid_exists(int(pids[0]))


def test_two_rows_that_end_their_process_do_not_stop_the_others(pool, reward):
    rows = ["row 1", "die", "die", "row 2", "die"]
    assert [one.reward for one in score(pool, *rows)] == [1.0, None, None, 2.0, None]
    assert scored(reward) == rows


def test_a_process_that_cannot_start_costs_one_row(tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS_ONCE)
    pool = RewardPool(f"{tmp_path}/breaks.py:reward")
    _, lost, *others = score(pool, "die", *["good"] * 20)
    pool.shutdown()
    assert "the disk is gone" in lost.error
    assert [one.reward for one in others] == [1.0] * 19


@pytest.mark.parametrize("kind", ["reward", "batched", "concurrent"])
def test_after_one_that_cannot_start_no_more_rows_are_scored_at_once_than_allowed(tmp_path, kind):
    (tmp_path / "breaks.py").write_text(BREAKS_ONCE)
    pool = RewardPool(f"{tmp_path}/breaks.py:{kind}", concurrency=4)
    results = score(pool, "die", *["good"] * 60)
    assert any("the disk is gone" in (one.error or "") for one in results)
    most = max(one.reward for one in results if not one.error)
    pool.shutdown()
    assert most == {"reward": 1.0, "batched": 4.0, "concurrent": 4.0}[kind]


def test_short_rows_are_scored_beside_a_long_one_by_a_process_that_has_just_started(tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS_ONCE)
    pool = RewardPool(f"{tmp_path}/breaks.py:waits")

    async def seconds_of_short():
        assert (await pool.score("", "exit", {})).error
        long = asyncio.create_task(pool.score("", "sleep 4", {}))
        await asyncio.sleep(0.05)  # It is given to the next process, which still starts.
        start = time.monotonic()
        for _ in range(10):
            short = asyncio.create_task(pool.score("", "sleep 0", {}))
            await asyncio.sleep(0.02)
        await short
        seconds = time.monotonic() - start
        long.cancel()
        return seconds

    assert asyncio.run(seconds_of_short()) < 3.5
    pool.shutdown()


def test_results_that_came_while_the_pool_stood_still_are_in_time(shared):
    async def stall():
        rows = [asyncio.create_task(shared.score("", f"row {i}", {})) for i in range(60)]
        while not rows[0].done():
            await asyncio.sleep(0)
        shared._loop.call_soon_threadsafe(time.sleep, 1.3)  # the limit is 1 s
        return await asyncio.gather(*rows)

    for _ in range(3):
        assert [one.error for one in asyncio.run(stall())] == [None] * 60


def test_rows_of_one_call_share_their_time_limits(reward):
    pool = RewardPool(f"{reward}:together", timeout_s=0.5)
    score(pool, "warm up")
    results = score(pool, *["x"] * 5)
    pool.shutdown()
    assert [one.error for one in results] == [None] * 5
    assert max(one.reward for one in results) >= 2.0, "a call that took longer than 0.5 s"


def test_a_row_whose_caller_gave_up_is_not_scored(pool, reward):
    async def give_up():
        slow = asyncio.create_task(pool.score("", "sleep 0.3", {}))
        await asyncio.sleep(0.1)
        late, other = (asyncio.create_task(pool.score("", f"row {i}", {})) for i in (1, 2))
        await asyncio.sleep(0)
        late.cancel()
        return await asyncio.gather(slow, other)

    assert [one.reward for one in asyncio.run(give_up())] == [0.3, 2.0]
    assert scored(reward) == ["sleep 0.3", "row 2"]


def test_callers_on_several_event_loops_get_their_own_results(pool):
    def of_thread(thread):
        return [one.reward for one in score(pool, *(f"row {100 * thread + i}" for i in range(50)))]

    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(of_thread, range(4))]
    assert found == [[100.0 * thread + i for i in range(50)] for thread in range(4)]


def test_no_row_waits_behind_a_slow_one_while_a_process_is_idle(reward):
    pool = RewardPool(f"{reward}:by_completion", num_processes=2)

    async def quick_ones_first():
        rows = ["sleep 0.2", "sleep 0.2", "sleep 1", *(f"row {i}" for i in range(20))]
        tasks = [asyncio.create_task(pool.score("", row, {})) for row in rows]
        await asyncio.gather(*tasks[:2], *tasks[3:])
        return tasks[2].done(), await tasks[2]

    was_done, slow = asyncio.run(quick_ones_first())
    pool.shutdown()
    assert slow.reward == 1.0
    assert not was_done


def test_a_pool_that_is_shut_down_amid_its_rows_answers_all(reward):
    pool = RewardPool(f"{reward}:by_completion")

    async def shut_down():
        quick = [asyncio.create_task(pool.score("", f"row {i}", {})) for i in range(5)]
        rows = ["sleep 60"] + [f"row {i}" for i in range(99)]
        others = [asyncio.create_task(pool.score(LONG, row, {})) for row in rows]
        before = await asyncio.gather(*quick)
        await asyncio.to_thread(pool.shutdown)
        return before, await asyncio.wait_for(asyncio.gather(*others), 10)

    before, others = asyncio.run(shut_down())
    assert [one.reward for one in before] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert {one.error for one in others} == {"the reward process was shut down"}


INTERRUPTED = """
import asyncio, sys
from nemo_like.rewards.pool import RewardPool

async def rows():
    pid = (await pool.score("", "row 0", {})).metrics["pid"]
    print(int(pid), flush=True)
    await asyncio.gather(*(pool.score("", "sleep 0.2", {}) for _ in range(100)))

pool = RewardPool(sys.argv[1])
try:
    asyncio.run(rows())
finally:
    pool.shutdown()
"""


def test_a_run_that_is_interrupted_amid_its_rows_leaves_no_process(reward):
    command = [sys.executable, "-c", INTERRUPTED, f"{reward}:by_completion"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = int(run.stdout.readline())
    time.sleep(0.5)
    os.kill(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=15)
    assert "KeyboardInterrupt" in said
    assert not psutil.pid_exists(pid)
