"""Jobs submitted to a Ray cluster of two nodes: the same as from a shell, failed, or stopped."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from nemo_like.config.run import CheckpointConfig
from nemo_like.run.checkpoint import Checkpoints
from tests.small_runs import ROOT, SMALL, records

BIN = Path(sys.executable).parent
RUN = ("python", "examples/run_grpo.py", *SMALL, "generation.backend=hf")
REWARD = "environment.reward=reward.py:short"
"""Of the folder that is submitted."""
STARTED_S = 180
HEALTH_CHECK = re.compile(r"HEALTHCHECK[^[]*?CMD (\[.*\])\n")
OF_THE_JOB = {"PYTHONPATH", "PWD", "OLDPWD", "_", "RAY_JOB_ID", "RAY_worker_niceness"}


@dataclass(frozen=True)
class Jobs:
    """A cluster with a job server, and the folder that is submitted to it."""

    project: Path
    address: str
    job_server: str
    agent_port: int
    """Of the second node's agent."""
    environment: dict[str, str]

    def ray_job(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``ray job ...`` as a client runs it, in the project's folder."""
        verb, *rest = arguments
        command = [BIN / "ray", "job", verb, "--address", self.job_server, *rest]
        secret = {"SECRET_OF_THE_CLIENT": "hush"}
        return subprocess.run(
            command, cwd=self.project, env=self.environment | secret, timeout=400, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def submit(self, *entrypoint: str, options: tuple[str, ...] = ()):
        return self.ray_job("submit", *options, "--working-dir", ".", "--", *entrypoint)

    def ask(self, path: str):
        """The job server's answer to GET."""
        token = Path(self.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{self.job_server}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def states(self, kind: str) -> list[dict[str, object]]:
        return self.ask(f"/api/v0/{kind}")["data"]["result"]["result"]


def wait_for(what: str, condition, timeout_s: float = STARTED_S):
    """The first true value of ``condition``; servers that do not answer yet count as false."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        time.sleep(0.5)
    pytest.fail(f"{what}: not within {timeout_s} s")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_node(stack: ExitStack, environment: dict[str, str], folder: Path, *options: str) -> int:
    """Start a Ray node and wait for its agent, which starts jobs; returns the agent's port."""
    folder.mkdir()
    port = free_port()
    command = [BIN / "ray", "start", "--block", "--disable-usage-stats", f"--temp-dir={folder}"]
    command.append(f"--dashboard-agent-listen-port={port}")
    with (folder / "started.log").open("wb") as log:
        node = subprocess.Popen(
            [*command, *options], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    stack.callback(end, node)
    health = f"http://127.0.0.1:{port}/api/local_raylet_healthz"
    wait_for("agent of the node", lambda: urllib.request.urlopen(health, timeout=5).read())
    return port


def end(node: subprocess.Popen[bytes]) -> None:
    """SIGTERM lets ``ray start --block`` end what it started."""
    started = psutil.Process(node.pid).children(recursive=True)
    node.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        node.wait(120)
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    node.kill()
    node.wait()


def project_copy(folder: Path) -> Path:
    """What a user has in a clone, and two files of jobs."""
    for name in ("nemo_like", "configs", "examples", ".gitignore"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    bytecode = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests" / "ray_job", folder, dirs_exist_ok=True, ignore=bytecode)
    (folder / "runs").mkdir()
    (folder / "runs" / "large").write_text("an earlier run")
    return folder


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """One cluster for all tests: its own token, ports and folders (short, for socket names)."""
    stale = tmp_path_factory.mktemp("stale") / "nemo_like"
    stale.mkdir()
    (stale / "__init__.py").write_text("raise ImportError('what the node had installed')")
    temporary = Path(tempfile.mkdtemp(prefix="rj"))
    (temporary / "token").write_text(os.urandom(32).hex())
    environment = os.environ | {
        "PYTHONPATH": str(stale.parent),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(temporary / "token"),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nodes that end wait half a minute
    }
    environment.pop("RAY_ADDRESS", None)
    gcs, http = free_port(), free_port()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        head = ("--head", f"--port={gcs}", f"--dashboard-port={http}", "--num-cpus=0")
        client = f"--ray-client-server-port={free_port()}"
        start_node(stack, environment, temporary / "head", *head, client)
        node = (f"--address=127.0.0.1:{gcs}", "--num-cpus=4", "--num-gpus=2")
        jobs = Jobs(
            project=project_copy(tmp_path_factory.mktemp("project")),
            address=f"127.0.0.1:{gcs}",
            job_server=f"http://127.0.0.1:{http}",
            agent_port=start_node(stack, environment, temporary / "node", *node),
            environment=environment,
        )
        wait_for("job server", lambda: len(jobs.states("nodes")) == 2)
        yield jobs


def test_workers_see_the_same_through_a_job_and_from_a_shell(jobs, tmp_path):
    named = json.dumps({"env_vars": {"NAMED": "passed on"}})
    on_a_node = ("--entrypoint-num-cpus", "1", "--submission-id", "placed")  # the head has no CPUs
    options = ("--runtime-env-json", named, *on_a_node)
    result = jobs.submit("python", "place.py", str(tmp_path / "job.json"), options=options)
    assert result.returncode == 0, result.stdout
    shell = {"RAY_ADDRESS": jobs.address, "PYTHONPATH": str(jobs.project)}
    subprocess.run(
        [sys.executable, "place.py", str(tmp_path / "shell.json")],
        cwd=jobs.project, env=jobs.environment | shell, timeout=STARTED_S, check=True,
    )  # fmt: skip
    job, shell = (json.loads((tmp_path / f"{way}.json").read_text()) for way in ("job", "shell"))
    assert [one["environment"]["CUDA_VISIBLE_DEVICES"] for one in job] == ["0", "1"]
    assert [one["node"] for one in job] == [one["node"] for one in shell]
    assert jobs.ask("/api/jobs/placed")["driver_node_id"] == job[0]["node"]
    for ours, theirs in zip(job, shell, strict=True):
        assert ours["environment"].pop("NAMED") == "passed on"
        assert "SECRET_OF_THE_CLIENT" not in ours["environment"]
        assert differing(ours["environment"], theirs["environment"]) <= OF_THE_JOB
        assert "working_dir_files" in ours["package"]
        assert ours["files"] == sorted({one.name for one in jobs.project.iterdir()} - {"runs"})


def test_the_health_check_of_images_tells_nodes_from_others(jobs):
    command = json.loads(HEALTH_CHECK.search((ROOT / "docker" / "Dockerfile").read_text())[1])

    def code(port):
        ours = [word.replace("52365", str(port)) for word in command]
        return subprocess.run(ours, capture_output=True, timeout=60, check=False).returncode

    assert code(jobs.agent_port) == 0
    assert code(free_port()) != 0


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.mark.full  # one trains below, and succeeds above
def test_a_submitted_run_trains_and_its_client_sees_the_steps(jobs, tmp_path):
    result = jobs.submit(*RUN, REWARD, "grpo.max_steps=2", f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stdout
    assert "step 2/2  reward" in result.stdout
    assert list(records(tmp_path)) == [0, 1, 2]
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_a_run_folder_that_would_vanish_is_refused(jobs):
    result = jobs.submit(*RUN)
    assert result.returncode == 1
    assert "run.dir=null is inside the copy of the working dir" in result.stdout
    assert "failed with exit code 2" in result.stdout
    assert "Traceback" not in result.stdout


@pytest.mark.full  # a client sees what a driver says, and test_command_line.py what that is
def test_what_fails_in_a_worker_reaches_the_client(jobs, tmp_path):
    broken = ("environment.reward=reward.py:broken", "validation.every_steps=0")
    result = jobs.submit(*RUN, *broken, f"run.dir={tmp_path}")
    assert result.returncode == 1
    assert "Error: environment.reward=" in result.stdout
    assert "LookupError: no answer column" in result.stdout
    assert "failed with exit code 1" in result.stdout


def test_a_stopped_job_leaves_its_checkpoints_and_nothing_else(jobs, tmp_path):
    folder = tmp_path / "run"
    steps = (REWARD, "grpo.max_steps=500", "checkpoint.every_steps=1", f"run.dir={folder}")
    options = ("--submission-id", "stopped", "--no-wait")
    result = jobs.submit(*RUN, *steps, options=options)
    assert result.returncode == 0, result.stdout
    log = "/api/jobs/stopped/logs"
    wait_for("second step in the log", lambda: "step   2/500" in jobs.ask(log)["logs"])
    started = processes_of(folder)
    assert len(started) >= 4, "a shell, the driver, the worker of each role, and reward processes"
    result = jobs.ray_job("stop", "stopped")
    assert result.returncode == 0, result.stdout
    assert not psutil.wait_procs(started, timeout=60)[1]
    assert "Stopped on request after step " in jobs.ask(log)["logs"]
    for kind in ("actors", "placement_groups"):
        states = wait_for(kind, lambda kind=kind: jobs.states(kind))
        assert {one["state"] for one in states} <= {"DEAD", "REMOVED"}
    latest = Checkpoints(folder, CheckpointConfig()).latest()
    assert latest is not None
    assert latest[1].step >= 2


def processes_of(folder: Path) -> list[psutil.Process]:
    """Driver, workers and reward processes of a run; what they start logs in ``folder`` too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            log = Path(f"/proc/{process.pid}/fd/2").readlink()
            if log.is_relative_to(folder) or f"run.dir={folder}" in " ".join(process.cmdline()):
                found.append(process)
    return found
