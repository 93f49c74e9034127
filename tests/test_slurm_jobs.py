"""``nemo-like slurm`` and Slurm's own daemons: what happens to jobs, in the words of both."""

import threading
from pathlib import Path

import pytest
import yaml

from nemo_like.cli import main
from nemo_like.errors import RunError
from nemo_like.launch import slurm_jobs
from tests.slurm_cluster import SlurmCluster, missing_programs, needs, wait_until

SCRIPT = str(Path(__file__).parent.parent / "examples" / "run_grpo.py")
# A line of set-up that prints and writes what a run does, and stays, without its start-up.
RUN = """
mkdir -p runs/mine
echo '{"step": 3, "rollout/reward": 0.5, "train/loss": 0.25}' > runs/mine/metrics.jsonl
printf '{"step": 4, "ro' >> runs/mine/metrics.jsonl
echo "12:00:00 Run folder $PWD/runs/mine"
exec sleep 600
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    needs(*missing_programs())
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), tmp_path_factory.mktemp("work"))
    yield cluster
    cluster.close()


@pytest.fixture
def slurm(cluster, monkeypatch, capsys):
    """``nemo-like slurm WORDS`` -> exit code, output, errors."""
    monkeypatch.chdir(cluster.cwd)
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])

    def typed(*words):
        code = 0
        try:
            main(["slurm", *words])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return typed


def submitted(slurm, *words):
    """The id of the new job."""
    code, out, err = slurm("submit", *words)
    assert code == 0, err
    assert out.startswith("job ")
    return out.split()[1]


def test_a_sweep_that_waits_is_shown_and_cancelled(slurm, cluster):
    number = submitted(slurm, SCRIPT, "-m", "run.seed=0,1", "cluster.slurm.extra=['--hold']")
    assert "array=0-1" in (cluster.cwd / "slurm-logs" / f"{number}.sbatch").read_text()
    _, out, _ = slurm("status", number)
    assert out == f"job     {number}_0-1 PENDING (JobHeldUser)\n"
    code, _, err = slurm("logs", number, "-f")
    assert (code, f"{number} is a job array; give one of its tasks" in err) == (2, True)
    code, _, err = slurm("logs", f"{number}_1")
    assert (code, "PENDING (JobHeldUser) has no log yet; use -f to wait." in err) == (1, True)
    code, out, _ = slurm("cancel", f"{number}_1")
    assert (code, f"{number}_1 CANCELLED" in out) == (0, True)
    code, out, _ = slurm("cancel", number)
    assert (code, f"{number}_0 CANCELLED" in out) == (0, True)
    code, _, err = slurm("cancel", number)
    assert (code, "has ended already" in err) == (2, True)


def test_a_job_that_cannot_start_says_why(slurm, cluster):
    number = submitted(slurm, SCRIPT, "cluster.slurm.setup='echo no environment here; exit 7'")
    code, out, err = slurm("logs", number, "-f")
    assert code == 0
    assert "no environment here" in out
    assert f"Job {number} FAILED" in err
    _, out, _ = slurm("status", number)
    assert f"job     {number} FAILED (NonZeroExitCode, exit code " in out
    assert f"\nlog     {cluster.cwd}/slurm-logs/{number}.out\nray     " in out


def test_a_job_of_salloc_has_no_log(monkeypatch, tmp_path):
    line = "JobId=7 JobName=interactive JobState=RUNNING Reason=None NodeList=a RunTime=00:01:00 "
    line += "TimeLimit=01:00:00 ExitCode=0:0 Command=(null) WorkDir=/home/me"
    monkeypatch.setattr(slurm_jobs, "_ask", lambda *_, **__: f"{line}\n")
    told = [*slurm_jobs.status_lines("7", tmp_path)]
    assert told == ["job     7 RUNNING on a after 00:01:00 of 01:00:00"]
    with pytest.raises(RunError, match=r"job 7 RUNNING on a after \S+ of \S+ has no log\.$"):
        slurm_jobs.print_log("7", tmp_path, follow=True)


def test_slurms_own_words_are_handed_on(slurm):
    code, _, err = slurm("submit", SCRIPT, "cluster.slurm.extra=['--partition=nope']")
    assert (code, err.count("\n")) == (1, 1)
    assert "Error: sbatch failed with code 1: invalid partition specified: nope" in err
    code, _, err = slurm("status", "4000")
    assert (code, err.count("\n")) == (2, 1)
    assert "Slurm knows no job 4000, and there is no " in err


def test_a_job_that_slurm_has_forgotten_is_known_by_its_log(slurm, cluster):
    (cluster.cwd / "old").mkdir()
    (cluster.cwd / "old" / "4000.out").write_text("nemo-like: the command ended\n")
    code, out, _ = slurm("status", "4000", "--log-dir=old")
    assert code == 0
    assert out.startswith("job     4000 forgotten by Slurm\nlog ")
    assert "ray     the command ended\n" in out
    code, out, _ = slurm("logs", "4000", "--log-dir=old", "-f")
    assert (code, out) == (0, "nemo-like: the command ended\n")


def test_a_running_job_is_followed_until_it_is_cancelled(slurm, cluster, monkeypatch):
    (cluster.cwd / "mine.yaml").write_text(
        yaml.safe_dump({"defaults": ["grpo", "_self_"], "cluster": {"slurm": {"setup": RUN}}})
    )
    mine = ["--config-name=mine", "--config-dir=."]
    monkeypatch.setenv("SBATCH_TIMELIMIT", "7")  # sbatch prefers it to what a script says
    words = ("cluster.num_nodes=2", "cluster.gpus_per_node=2", "cluster.slurm.time='90'")
    number = submitted(slurm, SCRIPT, *mine, *words)
    log = cluster.cwd / "slurm-logs" / f"{number}.out"
    wait_until(lambda: log.exists() and "Run folder" in log.read_text(), 60, log.read_text)
    _, out, _ = slurm("status", number)
    assert f"job     {number} RUNNING on gpu[01-02] after " in out
    assert " of 01:30:00\n" in out
    assert f"run     {cluster.cwd}/runs/mine\nstep    3, reward 0.500, loss +0.2500\n" in out
    cancel = threading.Timer(1.0, cluster.ask, ("scancel", number))
    cancel.start()
    code, out, err = slurm("logs", number, "-f")
    cancel.join()
    assert (code, out) == (0, log.read_text())
    assert f"Job {number} CANCELLED" in err
