"""What reward functions write to their socket, see of the environment, leak, and do at once."""

import asyncio
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy
import pytest

from nemo_like.config.environment import EnvironmentConfig
from nemo_like.config.run import ClusterConfig
from nemo_like.errors import UserError
from nemo_like.planning.resources import plan_resources
from nemo_like.rewards import variables
from nemo_like.rewards.frames import (
    FrameError,
    Frames,
    PlainDataError,
    read_result,
    read_rows,
    result_frame,
    rows_frame,
    write_row,
)
from nemo_like.rewards.pool import RewardPool, memory_share
from nemo_like.rewards.protocol import RewardResult, RewardRow
from nemo_like.rewards.start import start_pool
from tests.not_here import MARK
from tests.small_runs import small_config

REWARDS = '''
import asyncio, json, os, pickle, resource, signal, struct, sys, threading, time
import numpy

FD = int(sys.argv[1])
LEAK, FILES = [], []

class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['HOME']}/marker",)

def frame(payload):
    return struct.pack(">I", len(payload)) + payload

def result(**changes):
    said = {"id": "0" * 32, "reward": 99.0, "metrics": {}, "error": None, "answer": None,
            "dropped": {}, "steps": {}, "spent": None} | changes
    return frame(json.dumps(said).encode())

def written(what):
    bomb = pickle.dumps(Bomb())
    return {
        "garbage": b"hello, pool, how are you?",
        "pickle": struct.pack("!i", len(bomb)) + bomb,
        "framed pickle": frame(bomb),
        "forged": result(),
        "forged list": frame(b"[1.0]"),
        "first word": frame(b'{"refused": "no", "is_concurrent": true}'),
        "deep": frame(b"[" * 100_000),
        "long": struct.pack(">I", 2 << 30) + b"x" * 1000,
        "empty": frame(b""),
        "half": struct.pack(">I", 1000) + b'{"id": "',
        "latin": frame(b"\\xff\\xfe"),
    }[what]

def by_completion(prompt, completion, **fields):
    how, _, what = completion.partition(" ")
    if how == "write":
        os.write(FD, written(what))
    if how == "stall":
        os.write(FD, written(what))
        time.sleep(60)
    if how == "later":
        threading.Timer(0.05, os.write, (FD, written(what))).start()
    if how == "close":
        os.close(FD)
    if how == "child":
        if os.fork() == 0:
            try:
                os.write(FD, written(what))
            finally:
                os._exit(0)
        os.wait()
    if how == "steal":
        threading.Thread(target=os.read, args=(FD, 1 << 20), daemon=True).start()
    if how == "environment":
        return {"reward": 1, "answer": json.dumps(dict(os.environ))}
    if how == "need":
        return len(os.environ[what])
    if how == "leak":
        LEAK.append(bytearray(50 << 20))
    if how == "hog":
        return len(bytearray(4 << 30))
    if how == "wrapped":
        try:
            bytearray(4 << 30)
        except MemoryError as error:
            raise RuntimeError("the reward failed") from error
    if how == "open":
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        FILES.append(open("/dev/null"))
    if how == "print":
        print("x" * (20 << 20))
    if how == "loop":
        return asyncio.run(asyncio.sleep(0, 0.5))
    if how == "awaitable":
        return asyncio.sleep(0, 0.75)
    if how == "large":
        return {"reward": 1.0, "answer": "x" * (2 << 20)}
    if how == "surrogate":
        return {"reward": 1.0, "\\ud800": 1.0, "answer": "a\\udfff"}
    if how == "metrics":
        return {"reward": 0.5, "none": None, "nan": float("nan"), "inf": float("inf"),
                "text": "a", "pair": numpy.ones(2), "true": True, "false": numpy.bool_(False),
                "one": numpy.float32(1.5), "answer": what or None}
    if how == "limit":
        return float(resource.getrlimit(resource.RLIMIT_DATA)[0])
    return {"reward": 1.0, "pid": os.getpid()}

class Session:
    """Tied to the loop of its first use, as sessions of HTTP clients are."""
    loop = None
    def check(self):
        self.loop = self.loop or asyncio.get_running_loop()
        return self.loop is asyncio.get_running_loop()

SESSION = Session()
MOST = [0, 0]
THREE, TOGETHER = [], asyncio.Event()

async def judge(prompt, completion, **fields):
    how, _, what = completion.partition(" ")
    MOST[0] += 1
    MOST[1] = max(MOST)
    try:
        if how == "sleep":
            await asyncio.sleep(float(what))
        if how == "block":
            time.sleep(60)
        if how == "die":
            await asyncio.sleep(float(what or 0))
            os._exit(1)
        if how == "together":
            signal.setitimer(signal.ITIMER_REAL, 60)
            THREE.append(what)
            if len(THREE) == 3:
                TOGETHER.set()
            await TOGETHER.wait()
        if how == "stubborn":
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass
        if how == "exit":
            await asyncio.create_task(leave())
        if how == "cancel":
            asyncio.current_task().cancel()
            await asyncio.sleep(1)
        if how == "fork":
            if os.fork() == 0:
                await asyncio.sleep(0.01)
                return -1.0
            await asyncio.sleep(0.1)
        if how == "hog":
            return len(bytearray(4 << 30))
        if how == "write":
            os.write(FD, written(what))
    finally:
        MOST[0] -= 1
    return {"reward": 1.0, "same_loop": SESSION.check(), "pid": os.getpid(), "at_once": MOST[1],
            "alarm": signal.getitimer(signal.ITIMER_REAL)[0]}

async def leave():
    sys.exit("bye")
'''
SOCKET = "wrote something else to its socket"


def deep_list(depth):
    made = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "socket_reward.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture(scope="module")
def start(reward_file, home):
    """Starts pools, one of each kind, that see ``home`` as their HOME."""
    pools: dict[str, RewardPool] = {}

    def started(function, **settings):
        key = json.dumps([function, settings])
        if key not in pools:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HOME", str(home))
                pools[key] = RewardPool(f"{reward_file}:{function}", **settings)
        return pools[key]

    yield started
    for pool in pools.values():
        pool.shutdown()


@pytest.fixture
def pool(start):
    return start("by_completion", timeout_s=2.0, memory_limit_bytes=1 << 30)


@pytest.fixture
def judges(start):
    return start("judge", timeout_s=2.0, memory_limit_bytes=1 << 30)


def score(pool, *completions):
    async def all_of_them():
        return await asyncio.gather(*(pool.score("p", c, {}) for c in completions))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("write garbage", f"{SOCKET}: a frame of 1751477356 bytes"),
        ("write pickle", f"{SOCKET}: a frame that is not JSON"),
        ("write framed pickle", f"{SOCKET}: a frame that is not JSON"),
        ("write forged", f"{SOCKET}: a result on a row that it does not hold"),
        ("write forged list", f"{SOCKET}: a frame that is not a result"),
        ("write first word", f"{SOCKET}: a frame that is not a result"),
        ("write deep", f"{SOCKET}: a frame that is not JSON"),
        ("write long", f"{SOCKET}: a frame of {2 << 30} bytes"),
        ("write empty", f"{SOCKET}: a frame that is not JSON"),
        ("write latin", f"{SOCKET}: a frame that is not JSON"),
        ("stall half", "took longer than"),
        ("close", "the reward process "),
        ("large", "returned 2097"),
    ],
)
def test_what_a_reward_writes_to_its_socket_costs_its_row_and_never_runs(
    pool, home, completion, reason
):
    (before, failed), (after,) = score(pool, "good", completion), score(pool, "good")
    assert failed.reward is None
    assert reason in failed.error
    assert (before.reward, after.reward) == (1.0, 1.0)
    assert not (home / "marker").exists()


def test_the_bomb_of_these_tests_would_leave_its_marker(tmp_path):
    bomb = type("Bomb", (), {"__reduce__": lambda _: (os.system, (f"touch {tmp_path}/marker",))})
    globals()["Bomb"] = bomb
    pickle.loads(pickle.dumps(bomb()))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("what", ["garbage", "forged", "half"])
def test_what_arrives_between_two_rows_costs_neither(pool, what):
    (before,) = score(pool, f"later {what}")
    time.sleep(0.2)
    (after,) = score(pool, "good")
    assert (before.reward, after.reward) == (1.0, 1.0)
    assert after.metrics["pid"] != before.metrics["pid"], "a new process"


def test_what_a_reward_forks_has_no_socket(pool):
    before, child, after = score(pool, "good", "child garbage", "good")
    assert child.error is None
    assert before.metrics["pid"] == child.metrics["pid"] == after.metrics["pid"]


def test_a_reward_that_reads_the_pools_words_costs_a_row_at_most(pool):
    rewards = [score(pool, completion)[0].reward for completion in ("steal", *["good"] * 4)]
    assert rewards[0] == 1.0
    assert rewards.count(1.0) >= 4


def test_a_module_that_writes_to_its_socket_is_refused(tmp_path):
    (tmp_path / "noisy.py").write_text("import os, sys\nos.write(int(sys.argv[1]), b'hello' * 9)\n")
    with pytest.raises(UserError, match=f"noisy.py:f: the reward process {SOCKET}"):
        RewardPool(f"{tmp_path}/noisy.py:f")


GOOD = RewardResult(reward=0.5, metrics={"a": 1.0}, answer="x", dropped={"b": "it is a str"})


@pytest.mark.parametrize(
    "changes",
    [
        {"id": 3},
        {"id": None},
        {"reward": "1"},
        {"reward": True},
        {"reward": None},
        {"reward": 1e39},
        {"reward": [1.0]},
        {"error": "both"},
        {"reward": None, "error": 5},
        {"metrics": [["a", 1.0]]},
        {"metrics": {"a": "1"}},
        {"metrics": {"a": None}},
        {"metrics": {"a": True}},
        {"metrics": {"a": {"b": 1.0}}},
        {"answer": ["x"]},
        {"dropped": {"a": 1}},
        {"spent": False},
        {"more": 1},
        {"spent": ...},
    ],
)
def test_a_verdict_of_another_shape_is_refused(changes):
    frame = result_frame("id", GOOD)
    assert read_result(frame[4:]) == ("id", GOOD)
    said = json.loads(frame[4:]) | changes
    said = {key: value for key, value in said.items() if value is not ...}
    with pytest.raises(FrameError):
        read_result(json.dumps(said).encode())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000])
def test_numbers_that_are_not_finite_are_refused(number):
    payload = result_frame("id", GOOD)[4:].replace(b"0.5", number.encode())
    with pytest.raises(FrameError):
        read_result(payload)


def test_bytes_changed_at_random_are_refused_or_a_result():
    draw, kinds = random.Random(0), Counter()
    for _ in range(2000):
        stream = bytearray(result_frame("id", GOOD) * 2)
        for _ in range(draw.randint(1, 3)):
            stream[draw.randrange(len(stream))] = draw.randrange(256)
        frames = Frames(1 << 20)
        try:
            for cut in range(0, len(stream), 7):  # as a socket may deliver them
                for payload in frames.feed(bytes(stream[cut : cut + 7])):
                    assert isinstance(read_result(payload)[1], RewardResult)
                    kinds["read"] += 1
        except FrameError:
            kinds["refused"] += 1
    assert min(kinds.values()) > 500


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({1: 2}, "has a key that is not text: 1"),
        ([{"a": (1, 2)}], "holds a tuple"),
        ({"a": b"x"}, "holds a bytes"),
        ([numpy.float64(1)], "holds a float64"),
        (10**5000, "cannot be sent as JSON"),
        (deep_list(100_000), "cannot be sent as JSON"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_fields_that_json_would_change_are_refused(value, reason):
    with pytest.raises(PlainDataError, match=reason):
        write_row(RewardRow("id", "p", "c", {"field": value}))


def test_fields_of_plain_data_arrive_as_they_are():
    fields = {"a": [1, 2.5, 1e-300, True, None, {"b": "\ud800 é"}], "n": 2**70, "": []}
    rows = [RewardRow(str(i), "p\0", "c\udfff", fields) for i in range(3)]
    (payload,) = Frames(1 << 20).feed(rows_frame([write_row(row) for row in rows]))
    assert read_rows(payload) == rows


def test_text_that_no_file_could_hold_is_escaped(pool):
    (odd,) = score(pool, "surrogate")
    assert odd.answer == "a\\udfff"
    assert odd.metrics == {"\\ud800": 1.0}


def test_a_reward_sees_listed_variables_only(start, monkeypatch):
    secrets = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SESSION_TOKEN", "DATABASE_URL", "MY_COMPANY_PASS")
    for name in (*secrets, "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "secret")
    for name in ("LC_ALL", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TMPDIR", "https_proxy"):
        monkeypatch.setenv(name, "/tmp")
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@proxy:3128")
    pool = start("by_completion", pass_variables=["OPENAI_API_KEY"])
    seen = json.loads(score(pool, "environment")[0].answer)
    assert seen.pop("OPENAI_API_KEY") == "secret"
    assert "secret" not in json.dumps(seen)
    for name in ("PATH", "HOME", "LC_ALL", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TMPDIR"):
        assert seen[name]
    assert seen["https_proxy"] == "/tmp"
    known = variables.PASSED | {"PYTHONPATH", "LC_ALL", "LC_CTYPE", "https_proxy", "no_proxy"}
    unknown = {name for name in seen if not name.startswith(variables.PASSED_PREFIXES)} - known
    assert not {name for name in unknown if name.lower() not in variables.PROXIES}


def test_a_variable_that_is_missed_is_named_with_its_key(start, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    pool = start("by_completion", timeout_s=2.0)
    (failed,) = score(pool, "need JUDGE_API_KEY")
    hint = "do not get JUDGE_API_KEY (set environment.pass_variables=[JUDGE_API_KEY])"
    assert hint in failed.error
    assert "KeyError: 'JUDGE_API_KEY'" in failed.error
    (failed,) = score(pool, "need NOT_SET_AT_ALL")
    assert "pass_variables" not in failed.error
    (tmp_path / "needs.py").write_text("import os\nKEY = os.environ['JUDGE_API_KEY']\n")
    with pytest.raises(UserError, match=re.escape(hint)):
        RewardPool(f"{tmp_path}/needs.py:f")
    with pytest.raises(UserError, match="NOT_SET_AT_ALL is not set where the engines run"):
        start("by_completion", pass_variables=["NOT_SET_AT_ALL"])


def test_a_value_among_the_names_is_refused_and_not_shown(tmp_path):
    own = ("data.train=x.jsonl", "environment.reward=json.dumps")
    for entry in ("OPENAI_API_KEY=sk-123", "sk-123"):
        with pytest.raises(
            UserError, match=r"pass_variables: an entry of .* is not the name"
        ) as caught:
            small_config(tmp_path, *own, f"environment.pass_variables=['{entry}']", small=())
        assert "sk-123" not in str(caught.value)


def test_a_leak_costs_no_row(start):
    pool = start("by_completion", timeout_s=20.0, memory_limit_bytes=1 << 30)
    results = score(pool, *["leak"] * 45)
    assert [g.error for g in results] == [None] * 45
    assert 3 <= len({g.metrics["pid"] for g in results}) <= 8


@pytest.mark.parametrize(
    ("completion", "reason"), [("hog", "Memory"), ("wrapped", "reward failed")]
)
def test_a_process_that_ran_out_of_memory_is_replaced(pool, completion, reason):
    before, failed, after = score(pool, "good", completion, "good")
    assert reason in failed.error
    assert after.metrics["pid"] != before.metrics["pid"]


def test_a_function_that_leaks_files_loses_one_row_a_process(start):
    pool = start("by_completion", timeout_s=20.0)
    results = score(pool, *["open"] * 160)
    failed = [g.error for g in results if g.reward is None]
    assert all("Too many open files" in error for error in failed)
    assert len(failed) <= 3


def test_a_process_is_replaced_after_a_number_of_rows(start):
    pool = start("by_completion", most_rows=4)
    pids = [g.metrics["pid"] for g in score(pool, *["good"] * 10)]
    assert list(Counter(pids).values()) == [4, 4, 2]


BREAKS = """
import os
from pathlib import Path

HERE = Path(__file__).parent
with (HERE / "loads").open("a") as loads:
    loads.write("x")
if (HERE / "broken").exists():
    raise OSError("the disk is gone")

def reward(prompt, completion, **_):
    if completion == "die":
        (HERE / "broken").touch()
        os._exit(1)
    return 1.0
"""


def test_rows_that_wait_do_not_start_one_process_each_when_none_can_load(tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS)
    pool = RewardPool(f"{tmp_path}/breaks.py:reward", num_processes=2)
    try:
        assert (tmp_path / "loads").read_text() == "xx"
        results = score(pool, *["die"] * 2, *["good"] * 30)
        assert [g.reward for g in results] == [None] * 32
        assert "the disk is gone" in results[-1].error
        assert (tmp_path / "loads").read_text() == "xxxxxx"  # each of the two tried it twice
        (tmp_path / "broken").unlink()
        assert [g.reward for g in score(pool, *["good"] * 4)] == [1.0] * 4
    finally:
        pool.shutdown()


# A leader of another user's that started a process of root's, as sudo would.
TREE = """
import os, subprocess, time
sleep = subprocess.Popen(["sleep", "600"])
os.setuid(65534)
print(sleep.pid, flush=True)
time.sleep(600)
"""
KILL = """
import os, sys
from nemo_like.rewards.process_tree import kill_tree
os.setuid(65534)
kill_tree(int(sys.argv[1]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason=MARK + "needs processes of two users")
def test_a_process_of_another_user_does_not_stop_the_end_of_the_others():
    tree = subprocess.Popen(
        [sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    of_root = int(tree.stdout.readline())
    command = [sys.executable, "-c", KILL, str(tree.pid)]
    done = subprocess.run(command, capture_output=True, text=True)
    os.kill(of_root, signal.SIGKILL)
    assert (done.returncode, done.stderr) == (0, "")
    assert tree.wait(10) == -signal.SIGKILL


def test_the_engines_of_a_node_share_its_memory(reward_file):
    plan = plan_resources(ClusterConfig(gpus_per_node=2, num_nodes=2), 1, num_engines_per_bundle=3)
    assert plan.engines_per_node == 6
    environment = EnvironmentConfig(reward=f"{reward_file}:by_completion", num_processes=2)
    for engines, gib, limit in ((6, None, memory_share(12)), (6, 0.75, 3 << 28)):
        pool = start_pool(environment.replace(process_memory_gib=gib), engines)
        assert score(pool, "limit")[0].reward == limit
        pool.shutdown()
    assert memory_share(12) == pytest.approx(memory_share(1) / 12, abs=1)


def test_async_rewards_run_at_once_on_one_loop(judges):
    score(judges, "warm up")
    seconds = []
    for _ in range(3):  # the machine may be busy
        start = time.monotonic()
        results = score(judges, *["sleep 0.25"] * 32)
        seconds.append(time.monotonic() - start)
        assert [g.reward for g in results] == [1.0] * 32
    assert min(seconds) <= 2.0  # one after the other, eight
    results += score(judges, "later", "still later")
    assert all(g.metrics["same_loop"] for g in results)
    assert len({g.metrics["pid"] for g in results}) == 1


def test_no_more_rows_run_at_once_than_the_limit(start):
    pool = start("judge", concurrency=3, num_processes=2)
    results = score(pool, *["sleep 0.02"] * 24)
    assert {g.metrics["at_once"] for g in results[-4:]} == {3.0}
    share = Counter(g.metrics["pid"] for g in results)
    assert sorted(share.values())[0] >= 3, share
    assert len(share) == 2


def test_async_rows_that_end_at_the_same_time_leave_nothing_to_later_ones(judges):
    score(judges, *["together"] * 3)
    assert score(judges, "x")[0].metrics["alarm"] == 0


def test_a_process_that_starts_again_holds_up_no_other(start):
    pool = start("judge", num_processes=2, timeout_s=5.0)

    async def while_one_starts():
        await pool.score("p", "die", {})
        first = asyncio.create_task(pool.score("p", "x", {}))
        await asyncio.sleep(0.1)
        rows = [pool.score("p", "sleep 0.02", {}) for _ in range(8)]
        return await asyncio.gather(first, *rows)

    results = asyncio.run(while_one_starts())
    assert [g.reward for g in results] == [1.0] * 9
    assert max(g.metrics["at_once"] for g in results) >= 4


def test_a_process_that_cannot_start_again_leaves_no_row_waiting(reward_file, monkeypatch):
    pool = RewardPool(f"{reward_file}:judge", concurrency=1)
    monkeypatch.setattr(sys, "executable", "/missing/python")

    async def all_of_them():
        rows = (pool.score("p", completion, {}) for completion in ("die 0.3", "x", "x", "x"))
        return await asyncio.wait_for(asyncio.gather(*rows, return_exceptions=True), 60)

    died, *others = asyncio.run(all_of_them())
    pool.shutdown()
    assert "ended with exit code 1" in died.error
    assert [type(one) for one in others] == [FileNotFoundError] * 3


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("sleep 30", "took longer than 2 s"),
        ("exit", "SystemExit: bye"),
        ("cancel", "CancelledError"),
        ("hog", "MemoryError"),
    ],
)
def test_an_async_row_that_fails_costs_itself_only(judges, completion, reason):
    results = score(judges, "sleep 0.3", completion, "sleep 0.5")
    assert reason in results[1].error
    assert [g.reward for g in results] == [1.0, None, 1.0]
    assert [g.reward for g in score(judges, "sleep 0.01", "x")] == [1.0, 1.0]


def test_an_async_row_that_ignores_its_cancellation_costs_itself_and_then_its_process(
    start,
):
    pool = start("judge", timeout_s=0.5)
    (before,) = score(pool, "x")
    begin = time.monotonic()
    stubborn, other = score(pool, "stubborn", "sleep 0.2")
    assert time.monotonic() - begin < 3, "before the hard limit"
    assert "took longer than 0.5 s" in stubborn.error
    (after,) = score(pool, "x")
    assert before.metrics["pid"] == other.metrics["pid"] != after.metrics["pid"]


def test_an_async_row_that_began_before_the_first_was_scored_has_no_extra_time(start):
    pool = start("judge", timeout_s=1.0)
    late, other = score(pool, "sleep 30", "sleep 0.2")
    assert late.error == "took longer than 1 s"
    assert score(pool, "x")[0].metrics["pid"] == other.metrics["pid"], "it cancelled the row itself"


def test_async_rows_that_wait_for_an_import_have_its_time_when_the_first_is_done(start):
    pool = start("judge", timeout_s=2.0)
    results = score(pool, "sleep 2.5", "sleep 6", "sleep 6")
    assert [one.reward for one in results] == [1.0] * 3


def test_an_async_row_that_blocks_the_loop_meets_the_hard_limit(judges):
    score(judges, "x")
    start = time.monotonic()
    blocked, other = score(judges, "block", "sleep 0.1")
    assert time.monotonic() - start < 12
    assert "took longer than 2 s" in blocked.error
    assert other.reward is None
    assert "took longer than 2 s" in other.error
    assert score(judges, "x")[0].reward == 1.0


def test_a_fork_of_an_async_row_answers_nothing(judges):
    results = score(judges, *["fork"] * 3, "sleep 0.2")
    assert [g.reward for g in results] == [1.0] * 4
    assert len({g.metrics["pid"] for g in results}) == 1


def test_a_broken_frame_costs_the_rows_that_the_process_holds(judges):
    held, forger = score(judges, "sleep 0.3", "write forged")
    assert held.reward is None
    assert forger.reward is None
    assert SOCKET in held.error
    assert score(judges, "x")[0].reward == 1.0


def test_a_pool_works_where_another_loop_is_the_default(reward_file):
    """Ray makes uvloop's the default in its workers."""
    uvloop = pytest.importorskip("uvloop")
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        pool = RewardPool(f"{reward_file}:by_completion")
        assert score(pool, "good")[0].reward == 1.0
        pool.shutdown()
    finally:
        asyncio.set_event_loop_policy(before)


def test_plain_functions_may_run_a_loop_or_return_an_awaitable(pool):
    assert [g.reward for g in score(pool, "loop", "awaitable", "loop")] == [0.5, 0.75, 0.5]


def test_rows_at_once_of_a_plain_function_is_refused(reward_file):
    environment = EnvironmentConfig(reward=f"{reward_file}:by_completion", rows_at_once=4)
    with pytest.raises(UserError, match=r"environment\.rows_at_once=4 would have no effect"):
        start_pool(environment)


def test_a_metric_that_is_not_a_number_costs_itself_only(pool):
    (mixed, other) = score(pool, "metrics", "metrics 137")
    assert (mixed.reward, mixed.error) == (0.5, None)
    assert mixed.metrics == {"true": 1.0, "false": 0.0, "one": 1.5}
    assert mixed.dropped == {
        "none": "it is a NoneType, not a number.",
        "nan": "it is nan, not a finite number of at most 3e+38.",
        "inf": "it is inf, not a finite number of at most 3e+38.",
        "text": "it is a str, not a number.",
        "pair": mixed.dropped["pair"],
    }
    assert (mixed.answer, other.answer) == ("", "137")


def test_a_reward_that_prints_a_lot_is_scored(pool):
    assert [g.reward for g in score(pool, "print", "good")] == [1.0, 1.0]
