"""Tests that a machine cannot run are counted in red at the end, or fail where they must run."""

import os
import subprocess
import sys

import pytest

from tests.small_runs import ROOT

CONFTEST = """
from tests.not_here import say_loudly

def pytest_terminal_summary(terminalreporter):
    say_loudly(terminalreporter)
"""
TESTS = """
import pytest
from tests.not_here import cannot_test

@pytest.fixture(scope="module")
def cluster():
    cannot_test("not installed: it's slurmd", "REQUIRE_IT")

def test_one(cluster): pass
def test_two(cluster): pass
def test_three(): pytest.skip("of no interest")
"""


@pytest.mark.parametrize("required", ["0", "1"])
def test_what_cannot_be_tested_is_said_at_the_end_or_fails(tmp_path, required):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "REQUIRE_IT": required},
        capture_output=True,
        text=True,
        check=False,
    )
    loud = "2 tests skipped: not installed: it's slurmd; with REQUIRE_IT=1 this is a failure"
    assert done.returncode == int(required), done.stdout
    assert (loud in done.stdout) is (required == "0")
    assert "of no interest" not in done.stdout.partition("NOT TESTED ON THIS MACHINE")[2]
    assert ("2 errors" in done.stdout) is (required == "1")
