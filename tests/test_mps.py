"""Starting NVIDIA's MPS, by a stand-in for its command: there is none without a GPU."""

import os
import subprocess
import sys

import pytest

DAEMON = """#!/bin/sh
test "$1" = -d || exit 3
env > "{folder}/seen"
echo starting
sleep 300 &
echo $! > "{folder}/pid"
"""
WITHIN = """
import os, pathlib, psutil
from nemo_like.distributed.mps import mps

folder = pathlib.Path("FOLDER")
with mps():
    pipes = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    assert pipes.is_dir()
    seen = dict(line.split("=", 1) for line in (folder / "seen").read_text().splitlines())
    assert seen["CUDA_MPS_PIPE_DIRECTORY"] == seen["CUDA_MPS_LOG_DIRECTORY"] == str(pipes)
    assert "CUDA_VISIBLE_DEVICES" not in seen, "its numbers would be those of the daemon"
    process = psutil.Process(int((folder / "pid").read_text()))
    assert process.is_running()
assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
assert not pipes.exists()
assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
assert os.environ["CUDA_MPS_LOG_DIRECTORY"] == "/of/the/user"
assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
print("as it was")
"""
ASKED = """
import logging, sys
from nemo_like.errors import RunError, UserError, WaitTimeoutError
from tests.small_runs import run

logging.basicConfig(level=logging.INFO)
try:
    run("FOLDER/run", "cluster.gpus_per_node=1", *sys.argv[1:])
except (RunError, UserError, WaitTimeoutError) as error:
    print(error)
"""


@pytest.fixture
def execute(tmp_path):
    """Run a program in a process without Ray, whose PATH has the stand-in; its output."""

    def execute(program, *arguments, daemon=DAEMON, **environment):
        command = tmp_path / "bin" / "nvidia-cuda-mps-control"
        command.parent.mkdir(exist_ok=True)
        command.write_text(daemon.format(folder=tmp_path))
        command.chmod(0o755)
        path = f"{command.parent}:{os.environ['PATH']}"
        result = subprocess.run(
            [sys.executable, "-c", program.replace("FOLDER", str(tmp_path)), *arguments],
            env=os.environ | {"RAY_ADDRESS": "", "PATH": path} | environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout + result.stderr

    return execute


def test_a_daemon_serves_what_is_started_within_and_ends_with_it(execute):
    said = execute(WITHIN, CUDA_VISIBLE_DEVICES="1", CUDA_MPS_LOG_DIRECTORY="/of/the/user")
    assert "as it was" in said


def test_a_daemon_that_does_not_start_says_why(execute):
    said = execute(
        ASKED, "cluster.mps=true", daemon="#!/bin/sh\necho no\necho GPU here >&2\nexit 1\n"
    )
    assert "nvidia-cuda-mps-control -d did not start (no GPU here); mend that" in said


def test_a_run_asks_for_it_before_it_starts_ray(execute, tmp_path):
    said = execute(ASKED, "cluster.mps=true", PATH="/usr/bin:/bin")
    assert (
        "cluster.mps=true needs nvidia-cuda-mps-control, which comes with NVIDIA's driver" in said
    )
    said = execute(ASKED, "cluster.mps=true", RAY_ADDRESS="auto")
    assert "start MPS on each node before Ray (docs/training.md), and leave cluster.mps out" in said
    assert not (tmp_path / "seen").exists()
    said = execute(ASKED, "cluster.mps=true", "cluster.gpus_per_node=0")
    assert "cluster.mps=true would have no effect: the run has no GPUs" in said


def test_a_run_that_would_gain_is_told(execute):
    advice = "with cluster.mps=true they compute at the same time"
    ahead = ("rollout.max_lag=1", "generation.sleep=false", "cluster.start_timeout_s=1")
    assert advice in execute(ASKED, *ahead)
    assert advice not in execute(ASKED, *ahead, CUDA_MPS_PIPE_DIRECTORY="/of/the/user")
    assert advice not in execute(ASKED, *ahead[1:])
