"""The reward ``code``: which program is taken, how it is tested, and what hostile ones can do."""

import asyncio
import json
import math
import os
import tempfile
from pathlib import Path

import psutil
import pytest

from nemo_like.config.environment import EnvironmentConfig
from nemo_like.errors import UserError
from nemo_like.rewards.code.cases import Asserted, Printed, Returned, cases_of
from nemo_like.rewards.code.compare import same_output, same_value
from nemo_like.rewards.code.extract import program_of
from nemo_like.rewards.code.reward import CodeReward, reward
from nemo_like.rewards.find import resolve_reward
from nemo_like.rewards.sandbox.limits import Limits
from nemo_like.rewards.sandbox.program import isolation
from nemo_like.rewards.sandbox.walls import has_namespaces
from nemo_like.rewards.start import start_pool
from tests.hostile_programs import AGAIN, HOSTILE
from tests.not_here import MARK
from tests.small_runs import small_config


def fenced(program):
    return f"Here it is.\n```python\n{program}\n```\nIt works."


def scored(program, tests, fn_name=None, *, credit="strict", **limits):
    scorer = CodeReward(credit, Limits(**limits))
    return asyncio.run(scorer("p", fenced(program), tests, fn_name))


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("0.333333", "0.333333333333", True),
        ("1.00", "1", True),
        ("1e-7", "0", True),
        ("0.3333", "0.3334", False),
        ("nan", "1.0", False),
        ("inf", "1e308", False),
        ("1e999", "inf", False),
        ("1 2\n", "1 2", True),
        ("1   2 \r\n\n", "1 2", True),
        ("1\n2", "1 2", False),
        ("1\n\n2", "1\n2", False),
        ("1" + "0" * 5000, "1" + "0" * 5000, True),
        ("1" + "0" * 5000, "1" + "0" * 4999 + "1", False),
        ("12345678901234567890", "12345678901234567891", False),
        ("0101", "101", False),
        ("1000000.4", "1000000", True),
        ("1000002.0", "1000000", False),
        ("\u0661", "1", False),
        ("Yes", "YES", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_by_line_and_word(printed, expected, is_same):
    assert same_output(printed, expected) is is_same


@pytest.mark.parametrize(
    ("returned", "expected", "is_same"),
    [
        ([0.1 + 0.2], [0.3], True),
        ("3", 3, False),
        (3, "3", False),
        ("0.30000001", "0.3", False),
        (10**30 + 1, 10**30, False),
        (1.0, 1, True),
        (10**400, 1.5, False),
        (math.nan, 1.0, False),
        (math.inf, 1e308, False),
        (math.inf, math.inf, True),
        ([1, [2, {"a": 0.5}]], [1, [2, {"a": 0.5 + 1e-9}]], True),
        ([1, 2], [1, 2, 3], False),
        ({"a": 1}, {"a": 1, "b": None}, False),
        (None, None, True),
        (False, None, False),
        ([], None, False),
    ],
)
def test_returned_values_are_compared_by_type_and_value(returned, expected, is_same):
    assert same_value(returned, expected) is is_same


ADDS = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("program", "value", "is_right"),
    [
        ("raise ValueError", "", 0.0),
        ("raise ValueError", None, 0.0),
        ("raise SystemExit(0)", None, 0.0),
        ("import os; os._exit(0)", None, 0.0),
        ("return ''", "", 1.0),
        ("return None", None, 1.0),
        ("return False", False, 1.0),
        ("return 0", 0, 1.0),
        ("return []", [], 1.0),
        ("print('noise'); return (1, 2)", [1, 2], 1.0),
        ("import numpy; return numpy.arange(2) / 2", [0.0, 0.5], 1.0),
        ("return {1, 2}", [1, 2], 0.0),
        ("return 10 ** 5000", 1, 0.0),
        ("return lambda: 1", 1, 0.0),
    ],
)
def test_what_a_function_returns_is_what_counts(program, value, is_right):
    tests = {"inputs": [[]], "outputs": [value]}
    assert scored(f"def f():\n    {program}", tests, "f")["reward"] == is_right


FORMS = {
    "programs": ({"inputs": ["1 2\n", "3 4"], "outputs": ["3", "7\n"]}, None),
    "lines": ([{"input": ["1 2"], "output": ["3"]}], None),
    "text of JSON": ('{"inputs": ["1 2"], "outputs": ["3"]}', None),
    "functions": ({"inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}, "add"),
    "named within": ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, None),
    "lines of JSON": ([{"input": "[1]\n[2, 3]", "output": "[1, 2, 3]"}], "add"),
    "asserts": (["assert add(1, 2) == 3", "x = add('a', 'b')\nassert x == 'ab'"], None),
}
BOTH = f"import sys\n{ADDS}\nfor line in sys.stdin: print(add(*map(int, line.split())))"


@pytest.mark.parametrize("form", FORMS)
def test_tests_may_have_any_of_these_forms(form):
    tests, fn_name = FORMS[form]
    right = scored(BOTH, tests, fn_name)
    wrong = scored(BOTH.replace("a + b", "a"), tests, fn_name)
    assert (right["reward"], right["tests_passed"]) == (1.0, 1.0)
    assert (wrong["reward"], wrong["tests_passed"]) == (0.0, 0.0)


def test_a_method_of_a_solution_class_is_found():
    program = "class Solution:\n    def add(self, a, b): return a + b"
    assert scored(program, {"inputs": [[1, 2]], "outputs": [3]}, "add")["reward"] == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b): return a + b\nif __name__ == '__main__':\n    print(add(int(input()), 1))",
        "def add(a, b): return a + b\nif __name__ == '__main__': import sys; sys.exit(add(1, 2))",
        "class Solution:\n    def add(self, a: int, b: Optional[int]) -> List[int]: return a + b",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\ndef add(a, b): return P(a).x + b",
        "import pickle\nclass P: pass\ndef add(a, b): pickle.dumps(P()); return a + b",
    ],
    ids=["reads", "exits", "typing", "dataclass", "pickle"],
)
def test_a_program_is_imported_for_its_functions(program):
    assert scored(program, {"inputs": [[1, 2]], "outputs": [3]}, "add")["reward"] == 1.0
    assert scored(program, {"inputs": [[1, 2]], "outputs": [4]}, "add")["reward"] == 0.0


def test_numbers_of_many_digits_and_bytes_may_be_printed():
    huge = {"inputs": [""], "outputs": ["1" + "0" * 5000]}
    assert scored("print(10 ** 5000)", huge)["reward"] == 1.0
    four = {"inputs": [""], "outputs": ["4"]}
    assert scored("import sys\nsys.stdout.buffer.write(b'4\\n')", four)["reward"] == 1.0


def test_credit_is_strict_or_the_share_of_tests():
    tests = [f"assert add(1, {i}) == {min(i, 2) + 1}" for i in range(4)]
    assert scored(ADDS, tests)["reward"] == 0.0
    assert scored(ADDS, tests)["tests_passed"] == 0.75
    assert scored(ADDS, tests, credit="partial")["reward"] == 0.75


def test_a_right_output_with_an_error_code_is_wrong():
    assert scored("print(3)\nraise SystemExit(1)", FORMS["lines"][0])["reward"] == 0.0


def test_tests_that_the_rows_time_does_not_reach_fail():
    scorer = CodeReward("partial", Limits(seconds=1.0), row_s=1.5)
    program = "n = input()\nif n != '0':\n    while True: pass\nprint(n)"
    tests = {"inputs": ["0", "1", "2", "0"], "outputs": ["0", "1", "2", "0"]}
    result = asyncio.run(scorer("p", fenced(program), tests))
    assert (result["reward"], result["tests_late"]) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ([], "no tests"),
        ({"inputs": [], "outputs": []}, "no tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": ["1"]}, "without lists of inputs and outputs"),
        (None, "are a NoneType"),
        ("assert f() == 1", "not JSON"),
        (["assert f( == 1"], "not valid Python"),
        (["# nothing"], "test 0 is empty"),
        ([{"input": "1"}], "test 0 has no input and output"),
        ([{"input": 1, "output": 2}], "set fn_name"),
    ],
)
def test_a_row_without_tests_is_never_right(tests, reason):
    with pytest.raises(UserError, match=reason):
        cases_of(tests)


def test_rows_that_lack_tests_are_refused_when_they_are_read():
    assert resolve_reward("code").required_fields == {"tests"}
    assert resolve_reward("code").is_async is False


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nand\n~~~py\nb\n\nc\n~~~", "b\n\nc\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("a = 1", None),
        ("<think>\n```\na\n```\n</think>\nNo.", None),
        ("<think>x</think>\n```\nb\n```", "b\n"),
        ("<think>\n```\na\n```", None),
        ("  ```\n  a\n  ```", "  a\n"),
        ("", None),
    ],
)
def test_the_last_closed_block_outside_of_thinking_is_the_program(completion, program):
    assert program_of(completion) == program


def test_a_completion_without_a_program_is_wrong():
    result = asyncio.run(reward("p", "print(3)", FORMS["lines"][0]))
    assert (result["reward"], result["has_code"]) == (0.0, False)


def test_options_are_refused_where_they_have_no_effect(tmp_path):
    own = ("data.train=x.jsonl", "environment.reward=code")
    with pytest.raises(UserError, match=r"environment\.timeout_s=6 must be at least 2 s more"):
        small_config(tmp_path, *own, "environment.timeout_s=6", small=())
    with pytest.raises(UserError, match=r"code_credit.* environment\.reward is not code"):
        small_config(tmp_path, "environment.code_credit=partial", small=())


ANSWER = {"inputs": ["42"], "outputs": ["42"]}


@pytest.fixture(scope="module")
def pool():
    environment = EnvironmentConfig(
        reward="code", timeout_s=8.0, code_seconds=2.0, num_processes=2, code_credit="partial"
    )
    pool = start_pool(environment)
    yield pool
    pool.shutdown()


def score_all(pool, completions, tests=ANSWER):
    async def all_of_them():
        rows = (pool.score("p", fenced(one), {"tests": tests}) for one in completions)
        return await asyncio.gather(*rows)

    return asyncio.run(all_of_them())


def state_of(folder):
    return sorted((p.name, p.lstat().st_mtime_ns) for p in folder.iterdir())


NAMES = [*HOSTILE, *AGAIN.split()]


def test_64_hostile_programs_leave_the_run_untouched(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("API_KEY", "s3cr3t")
    victim, word = tmp_path / "victim", f"73.{os.getpid()}"
    victim.mkdir()
    (victim / "secret").write_text("s3cr3t")
    victim.chmod(0o755)
    programs = [
        HOSTILE[name].replace("VICTIM", str(victim)).replace("WORD", word) for name in NAMES
    ]
    assert len(programs) == 64
    rows = [one for program in programs for one in (program, "print(input())")]
    before = (state_of(Path("/etc")), state_of(victim))
    scratch = set(Path(tempfile.gettempdir()).glob("nemo-like-*"))
    results = score_all(pool, rows)
    assert [r.error for r in results] == [None] * 128
    assert [r.reward for r in results[1::2]] == [1.0] * 64
    assert [r.reward for r in results[0::2]] == [0.0] * 64
    assert (state_of(Path("/etc")), state_of(victim)) == before
    assert (victim / "secret").read_text() == "s3cr3t"
    places = ("/tmp", "/var/tmp", "/dev/shm", "/root", "/", "/usr", "/home")
    assert not [path for place in places for path in Path(place).glob(f"OWNED.{word}")]
    assert set(Path(tempfile.gettempdir()).glob("nemo-like-*")) == scratch
    own = [p for p in psutil.Process().children() if "nemo_like.rewards.code.reward" in p.cmdline()]
    assert len(own) == 2
    left = [child for process in own for child in process.children(recursive=True)]
    assert all("sandbox.nursery" in " ".join(child.cmdline()) for child in left)
    assert not running(word)


def test_rows_without_tests_are_masked_by_the_pool(pool):
    for tests in ([], {"inputs": [], "outputs": []}, None):
        (result,) = score_all(pool, ["print(42)"], tests)
        assert result.reward is None
        assert "tests" in result.error
    (result,) = asyncio.run(gathered(pool.score("p", fenced("print(42)"), {})))
    assert "the row lacks tests" in result.error


async def gathered(*rows):
    return await asyncio.gather(*rows)


def test_rewards_and_metrics_arrive_through_the_pool(pool):
    half = {"inputs": ["42", "43"], "outputs": ["42", "44"]}
    (result,) = score_all(pool, ["print(input())"], half)
    assert result.reward == 0.5
    assert result.metrics["tests_passed"] == 0.5
    assert result.metrics["has_code"] == 1.0
    assert result.metrics["tests_late"] == 0.0


def test_options_reach_the_programs():
    """``environment.code_credit``, ``code_seconds`` and ``code_memory_gib``."""
    tests = {"inputs": ["0", "1", "2"], "outputs": ["0", "1", "2"]}
    program = """
import time
number = int(input())
if number == 1:
    time.sleep(1.5)
if number == 2:
    held = bytearray(600 << 20)
print(number)
"""
    for options, expected, late in (
        ({"code_seconds": 0.7}, 0.0, 1 / 3),
        ({"code_memory_gib": 1.0, "code_credit": "partial"}, 1.0, 0.0),
    ):
        pool = start_pool(EnvironmentConfig(reward="code", **options))
        (result,) = score_all(pool, [program], tests)
        pool.shutdown()
        assert result.reward == pytest.approx(expected)
        assert result.metrics["tests_late"] == pytest.approx(late)


def nurseries():
    found = psutil.Process().children()
    return [one for one in found if "sandbox.nursery" in " ".join(one.cmdline())]


@pytest.mark.skipif(not has_namespaces(isolation().level), reason=MARK + "needs namespaces")
def test_a_sandbox_that_fails_leaves_no_reward_and_no_program():
    word = f"76.{os.getpid()}"
    program = f"import os; os.execvp('sleep', ['sleep', '{word}'])"

    async def killed():
        task = asyncio.create_task(reward("p", fenced(program), FORMS["lines"][0]))
        while not running(word):
            await asyncio.sleep(0.02)
        for nursery in nurseries():
            for supervisor in nursery.children():
                supervisor.kill()
        return await task

    result = asyncio.run(killed())
    assert result["reward"] is None
    assert "the sandbox failed: the supervisor of a program was killed" in result["error"]
    assert not running(word)


def test_a_nursery_that_was_killed_is_replaced():
    assert scored("print(3)", FORMS["lines"][0])["reward"] == 1.0
    for nursery in nurseries():
        nursery.kill()
        nursery.wait()
    assert scored("print(3)", FORMS["lines"][0])["reward"] == 1.0


def running(word):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if word in (p.info["cmdline"] or [])]


def test_cases_are_read_as_they_are_written():
    assert cases_of(json.dumps({"inputs": ["1"], "outputs": ["2"]})) == [Printed("1", "2")]
    assert cases_of([{"input": "1\n[2]", "output": "3"}], "f") == [Returned("f", [1, [2]], 3)]
    assert cases_of(["assert 1"]) == [Asserted("assert 1")]
