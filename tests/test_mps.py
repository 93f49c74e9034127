"""Starting NVIDIA's MPS, by a stand-in for its command: there is none without a GPU."""

import logging
import os
import subprocess
import sys

import pytest

from nemo_like.distributed.mps import recommend_mps
from tests.small_runs import small_config

DAEMON = """#!/bin/sh
test "$1" = -d || exit 3
env -0 > "{folder}/seen"
echo starting
sleep 300 &
echo $! > "{folder}/pid"
"""
CONNECTS = """
import os, pathlib, psutil, ray
from nemo_like.distributed.connection import connect

folder = pathlib.Path("FOLDER")
leave = connect(folder / "logs")
seen = dict(one.split("=", 1) for one in (folder / "seen").read_text().split("\\0") if one)
process = psutil.Process(int((folder / "pid").read_text()))
pipes = pathlib.Path(seen["CUDA_MPS_PIPE_DIRECTORY"])
assert pipes.is_dir() and process.is_running()
assert seen["CUDA_MPS_LOG_DIRECTORY"] == str(folder / "logs")
assert "CUDA_VISIBLE_DEVICES" not in seen
names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES")
of_worker = ray.get(ray.remote(lambda: [os.environ.get(name) for name in names]).remote())
assert of_worker[:2] == [seen[name] for name in names[:2]], of_worker
assert [os.environ.get(name) for name in names] == [None, None, "1"]
leave()
assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
assert not pipes.exists()
print("as it was")
"""
GPU = "cluster.gpus_per_node=1"
AHEAD = (GPU, "rollout.max_lag=1", "generation.sleep=false")
RUNS = """
import sys
from nemo_like.errors import RunError, UserError
from tests.small_runs import run

try:
    run("FOLDER/run", *sys.argv[1:])
except (RunError, UserError) as error:
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
        return result.stdout

    return execute


def test_workers_have_a_daemon_that_ends_with_them(execute):
    assert "as it was" in execute(CONNECTS, CUDA_VISIBLE_DEVICES="1")


def test_a_daemon_that_does_not_start_says_why(execute):
    broken = "#!/bin/sh\necho no\necho GPU here >&2\nexit 1\n"
    said = execute(RUNS, *AHEAD, "cluster.mps=true", daemon=broken)
    assert "nvidia-cuda-mps-control -d did not start (no GPU here); see " in said


def test_a_start_that_fails_leaves_nothing_that_runs(execute):
    fails = """
import pathlib, psutil
from nemo_like.distributed import connection

def fail(*args, **options):
    raise OSError("no Ray today")

connection.init_in_thread = fail
for _ in range(2):
    try:
        connection.connect(pathlib.Path("FOLDER/logs"))
    except connection.RunError as error:
        print(error)
left = [one.cmdline() for one in psutil.Process().children(recursive=True)]
assert not left, left
process = pathlib.Path("FOLDER/pid").read_text().strip()
assert not psutil.pid_exists(int(process)) or psutil.Process(int(process)).status() == "zombie"
"""
    assert execute(fails).count("no Ray today") == 2


def test_a_run_asks_for_it_where_it_can_have_it(execute, tmp_path):
    (tmp_path / "empty").mkdir()
    said = execute(RUNS, *AHEAD, "cluster.mps=true", PATH=str(tmp_path / "empty"))
    assert (
        "cluster.mps=true needs nvidia-cuda-mps-control, which comes with NVIDIA's driver" in said
    )
    said = execute(RUNS, *AHEAD, "cluster.mps=true", RAY_ADDRESS="127.0.0.1:1")
    assert "start MPS on each node before Ray, and set CUDA_MPS_PIPE_DIRECTORY here too" in said
    theirs = {"RAY_ADDRESS": "127.0.0.1:1", "CUDA_MPS_PIPE_DIRECTORY": "/of/the/user"}
    assert "no Ray answers there" in execute(RUNS, *AHEAD, "cluster.mps=true", **theirs)
    assert not (tmp_path / "seen").exists()


def test_it_is_refused_and_not_recommended_where_it_would_do_nothing(tmp_path, monkeypatch, caplog):
    for options, takes_turns in (
        (AHEAD, True),
        ((GPU, "rollout.overlap=true", "generation.sleep=false"), True),
        ((GPU,), False),
        (("rollout.max_lag=1",), False),
        ((*AHEAD, "cluster.gpus_per_node=2", "cluster.num_generation_workers=1"), False),
        (
            (
                *AHEAD,
                "generation.backend=replay",
                f"generation.engine_kwargs={{folder: {tmp_path}}}",
            ),
            False,
        ),
    ):
        config = small_config(tmp_path, *options)
        assert config.cluster.takes_turns(config) == takes_turns, options
        if takes_turns:
            small_config(tmp_path, *options, "cluster.mps=true")
        else:
            with pytest.raises(ValueError, match=r"no processes of this run compute on one GPU"):
                small_config(tmp_path, *options, "cluster.mps=true")
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/of/the/user")
    recommend_mps()
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    monkeypatch.setenv("NEMO_LIKE_MPS", "1")
    recommend_mps()
    assert not caplog.text
    monkeypatch.delenv("NEMO_LIKE_MPS")
    recommend_mps()
    assert "cluster.mps=true" in caplog.text
