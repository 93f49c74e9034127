"""``slurm/ray.sbatch``, run by real Slurm daemons."""

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from nemo_like.cli import main
from nemo_like.config.run import CheckpointConfig
from nemo_like.run.checkpoint import Checkpoints
from tests.slurm_cluster import NODES, Job, SlurmCluster, missing_programs, needs, wait_until
from tests.small_runs import ROOT, SMALL, records

SCRIPT = ROOT / "slurm" / "ray.sbatch"
SETUP = (
    f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH "
    f"PYTHONPATH={shlex.quote(str(ROOT))} OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1"
)
MANY_STEPS = "100000"
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--mem-per-cpu=500")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    needs(*missing_programs())
    folder = tmp_path_factory.mktemp("jobs") / """it's "x" y"""
    folder.mkdir()
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), folder)
    yield cluster
    cluster.close()


def processes(job: Job) -> list[psutil.Process]:
    """What runs in a job's steps."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        ours = environment.get("SLURM_CONF") == job.cluster.environment["SLURM_CONF"]
        if ours and environment.get("SLURM_JOB_ID") == job.id:
            found.append(process)
    return found


def raylets(job: Job) -> list[psutil.Process]:
    found = []
    for process in processes(job):
        with suppress(psutil.NoSuchProcess):  # It has ended meanwhile.
            if process.name() == "raylet":
                found.append(process)
    return found


def lines_of(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


def assert_nothing_is_left(job: Job, folder: str = "slurm-{}") -> None:
    wait_until(lambda: not processes(job), 60, lambda: f"{processes(job)} of {job.id} to end")
    assert not list(Path("/tmp").glob(f"nl-{job.id}-*"))
    logs = job.cluster.cwd / folder.format(job.id)
    assert not (logs / "ray-token").exists()
    for node in NODES:
        assert (logs / f"ray-0-{node}" / "raylet.out").stat().st_size > 0
        assert (logs / f"ray-0-{node}.log").stat().st_size > 0


@pytest.fixture
def submitted(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], Job]:
    """``nemo-like slurm submit``: a small run on two nodes, with its folder.

    It has as many steps as its first slice can make; then, queued again, two more than it made.
    """
    monkeypatch.chdir(slurm.cwd)
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])

    def submit(run: Path) -> Job:
        run.mkdir()
        (run / "metrics.jsonl").touch()
        steps = f"$((SLURM_RESTART_COUNT ? $(wc -l <{run}/metrics.jsonl) + 1 : {MANY_STEPS}))"
        batch = {
            "time": "30",
            "requeue": True,
            "setup": f"{SETUP} STEPS={steps}",
        }
        sections = {
            "defaults": ["grpo", "_self_"],
            "grpo": {"max_steps": "${oc.decode:${oc.env:STEPS}}"},
            # A node for the policy and one for generation.
            "cluster": {
                "num_nodes": 2,
                "num_generation_workers": 1,
                "cpus_per_worker": 2,
                "slurm": batch,
            },
            "checkpoint": {"every_steps": 1000, "export": False},
            "run": {"dir": str(run), "resume": True},
        }
        Path("two.yaml").write_text(yaml.safe_dump(sections))
        monkeypatch.setenv("STEPS", MANY_STEPS)
        mine = ("--config-name=two", "--config-dir=.", "generation.backend=hf")
        main(["slurm", "submit", str(ROOT / "examples" / "run_grpo.py"), *mine, *SMALL])
        return Job(slurm, capsys.readouterr().out.split()[1], "slurm-logs/{}.out")

    return submit


# First, since Slurm looks at time limits only every 30 s from its start on.
def test_a_submitted_run_on_two_nodes_is_queued_again_before_its_time_limit_and_resumes(
    slurm: SlurmCluster,
    submitted: Callable[[Path], Job],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    run = tmp_path / "run"
    job = submitted(run)
    job.wait_for(f"/{MANY_STEPS}  reward", 240)
    wait_until(lambda: len(lines_of(run)) > 4, 60, job.log)
    slurm.ask("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    wait_until(lambda: job.facts()["Restarts"] == "1", 180, job.log)
    before = records(run)
    time.sleep(2)  # Nodes refuse to start a job within the second in which they ended it.
    slurm.ask("scontrol", "update", f"JobId={job.id}", "TimeLimit=30", "StartTime=now")

    assert job.exit_code(240) == 0, job.log()
    stopped = rf"Stopped on request after step (\d+) of {MANY_STEPS}, which is saved"
    found = re.search(stopped, job.log())
    assert found, job.log()
    last = int(found[1])
    # A validation that was due is made, and its step logged, when the run continues.
    assert max(before) in (last, last - 1)
    assert f"Continuing after step {last}" in job.log()
    after = records(run)
    assert len(lines_of(run)) == len(after)
    assert list(after) == list(range(len(after)))
    assert len(after) > len(before) > 3
    assert {step: after[step] for step in before} == before
    assert (run / "summary.json").exists()
    main(["slurm", "status", job.id])
    told = capsys.readouterr().out
    assert f"job     {job.id} COMPLETED on gpu[01-02] after " in told
    reward = after[max(after)]["rollout/reward"]
    assert f"run     {run}\nstep    {max(after)}, reward {reward:.3f}, " in told
    for execution in "01":
        for node in NODES:
            logs = slurm.cwd / "slurm-logs" / job.id / f"ray-{execution}-{node}"
            assert list(logs.glob("worker-*.out")), f"no worker ran on {node}"


def mps_in(folder: Path) -> str:
    """Bash that finds a stand-in for NVIDIA's command, which notes its words by node."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "nvidia-cuda-mps-control"
    told = f"{folder}/$SLURMD_NODENAME"
    program.write_text(f'#!/bin/sh\necho "${{1:-$(cat)}} $CUDA_MPS_PIPE_DIRECTORY" >>"{told}"\n')
    program.chmod(0o755)
    return f"export PATH={folder}/bin:$PATH"


def test_two_jobs_on_the_same_hosts_run_side_by_side_and_end_alone(slurm: SlurmCluster):
    two_nodes = (*TWO_NODES, "--gres=gpu:1", str(SCRIPT))
    go = slurm.folder / "go"
    waits = f"until [[ -e {go} ]]; do sleep 0.1; done; exit $SLURM_ARRAY_TASK_ID"
    with_mps = {"NEMO_LIKE_MPS": "1", "NEMO_LIKE_SETUP": f"{SETUP}; {mps_in(slurm.folder)}"}
    command = slurm.submit("--array=7-7", *two_nodes, NEMO_LIKE_COMMAND=waits, **with_mps)
    # One after the other: a node's Ray ends if its own helpers take long to start.
    command.wait_for("2 nodes with 1 GPUs each are up", 120)
    pipes = {
        one["SLURMD_NODENAME"]: one["CUDA_MPS_PIPE_DIRECTORY"]
        for one in (raylet.environ() for raylet in raylets(command))
    }
    assert (slurm.folder / "gpu01").read_text() == f"-d {pipes['gpu01']}\n"
    interactive = slurm.submit(*two_nodes, NEMO_LIKE_SETUP=SETUP)
    interactive.wait_for("2 nodes with 1 GPUs each are up", 120)
    token = slurm.cwd / f"slurm-{interactive.id}" / "ray-token"
    assert token.stat().st_mode & 0o777 == 0o600

    # A command that ends ends its job, with its code; the other job stays.
    go.touch()
    assert command.exit_code(120) == 7
    assert_nothing_is_left(command)
    for node in NODES:
        assert (slurm.folder / node).read_text() == f"-d {pipes[node]}\nquit {pipes[node]}\n"

    attach = ("bash", f"attach-{interactive.id}.sh")
    program = "import ray; ray.init(); print(sorted(node['NodeName'] for node in ray.nodes()))"
    assert slurm.ask(*attach, "python", "-c", program).strip() == "['gpu01', 'gpu02']"
    with pytest.raises(AssertionError, match="exit code 5"):
        slurm.ask(*attach, "bash", "-c", "exit 5")

    # A node whose Ray dies ends its job, in seconds, with its name.
    secret = token.read_text()
    everything = [" ".join(process.cmdline()) for process in processes(interactive)]
    (raylet,) = (one for one in raylets(interactive) if one.environ()["SLURMD_NODENAME"] == "gpu02")
    raylet.kill()
    assert interactive.exit_code(120) == 1, interactive.log()
    assert "is ended: Ray on node gpu02 ended; see" in interactive.log()
    assert_nothing_is_left(interactive)
    assert not (slurm.cwd / attach[1]).exists()
    logs = (slurm.cwd / f"slurm-{interactive.id}").rglob("*.log")
    assert len(secret) == 64
    for text in (interactive.log(), *everything, *(log.read_text() for log in logs)):
        assert secret not in text


@pytest.mark.full
def test_a_run_that_is_cancelled_saves_its_step_and_leaves_nothing(
    submitted: Callable[[Path], Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job = submitted(tmp_path / "run")
    job.wait_for(f"/{MANY_STEPS}  reward", 240)
    assert len(processes(job)) > 10
    main(["slurm", "cancel", job.id])
    assert f"job     {job.id} CANCELLED" in capsys.readouterr().out
    assert_nothing_is_left(job, "slurm-logs/{}")
    main(["slurm", "status", job.id])
    last = max(records(tmp_path / "run"))
    assert f"\nstep    {last}, reward " in capsys.readouterr().out
    assert f"Stopped on request after step {last} of {MANY_STEPS}, which is saved" in job.log()
    assert Checkpoints(tmp_path / "run", CheckpointConfig()).steps() == [last]
