"""A Slurm of its own for tests: munged, a controller and two nodes on this machine, in one folder.

Both nodes have four CPUs and two GPUs on paper. Nothing of an installed Slurm is touched: ports,
sockets, keys and state are this cluster's, and ``environment`` points commands to it.
"""

import getpass
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.not_here import cannot_test

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
PACKAGES = "--no-install-recommends slurm-wlm munge shellcheck"
NODES = ("gpu01", "gpu02")
_SETTINGS = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
OverTimeLimit=5
FirstJobId={first_job_id}
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1
NodeName=gpu[01-02] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=4 \
RealMemory=4000 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """What has to be installed first."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def needs(*programs: str) -> None:
    """Do without the test if there are any; see ``cannot_test``."""
    if programs:
        text = f"not installed: {', '.join(programs)} (Debian: apt-get install {PACKAGES})"
        cannot_test(text, "NEMO_LIKE_REQUIRE_SLURM")


class SlurmCluster:
    """Daemons that run until ``close``; jobs are submitted from ``cwd``."""

    def __init__(self, folder: Path, cwd: Path) -> None:
        self.folder, self.cwd = folder, cwd
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not _leaks(name)},
            "PATH": _path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        controller_port, *node_ports = _free_ports(1 + len(NODES))
        settings = _SETTINGS.format(
            folder=self.folder,
            host=socket.gethostname(),
            user=getpass.getuser(),
            ports=",".join(map(str, node_ports)),
            controller_port=controller_port,
            first_job_id=random.randrange(10**5, 10**6),
        )
        (self.folder / "slurm.conf").write_text(settings)
        for index in range(2):  # A GPU is a file to Slurm; nobody opens it.
            (self.folder / f"gpu{index}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        options = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "seed")]
        munge = self.folder / "munge.socket"
        self._daemon("munged", "--foreground", "--force", f"--socket={munge}", *options)
        wait_until(munge.exists, 60, f"munged in {self.folder}")
        self._daemon("slurmctld", "-D", "-c")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        wait_until(self._idle, 60, lambda: (self.folder / "slurmctld.log").read_text()[-2000:])

    def _daemon(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self._daemons.append(daemon)

    def _idle(self) -> bool:
        done = self._run("sinfo", "--noheader", "--Node", "--format=%T")
        return done.stdout.split() == ["idle"] * len(NODES)

    def close(self) -> None:
        """End all jobs, then the daemons, each by its pid."""
        if self._daemons:
            self._run("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
            self._run("scancel", f"--user={getpass.getuser()}")
            wait_until(lambda: not self.ask("squeue", "--noheader").strip(), 120, "jobs to end")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(60)

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=self.cwd, capture_output=True, text=True, timeout=60
        )

    def ask(self, *command: str) -> str:
        """What a Slurm command prints; it must succeed."""
        done = self._run(*command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, **environment: str) -> "Job":
        """``sbatch`` with these arguments."""
        done = subprocess.run(
            ("sbatch", "--parsable", "--output=%j.log", *arguments),
            env={**self.environment, **environment},
            cwd=self.cwd,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip())


class Job:
    """One submitted job."""

    def __init__(self, cluster: SlurmCluster, job_id: str, log: str = "{}.log") -> None:
        self.cluster, self.id = cluster, job_id
        self.path = cluster.cwd / log.format(job_id)

    def log(self) -> str:
        """What the batch script has printed up to now."""
        return self.path.read_text() if self.path.exists() else ""

    def facts(self) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        text = self.cluster.ask("scontrol", "show", "job", "--oneliner", self.id)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Until the log has this text; a job that ends before it fails the test."""
        wait_until(lambda: text in self.log() or self._ended(), timeout_s, self._report)
        assert text in self.log(), self._report()

    def exit_code(self, timeout_s: float) -> int:
        """Wait for the end."""
        wait_until(self._ended, timeout_s, self._report)
        return int(self.facts()["ExitCode"].partition(":")[0])

    def _ended(self) -> bool:
        return self.facts()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")

    def _report(self) -> str:
        return f"job {self.id} is {self.facts()['JobState']}; its log:\n{self.log()[-3000:]}"


def _leaks(name: str) -> bool:
    """An outer job's or another Ray's settings are not this cluster's."""
    return name.startswith(("SLURM", "SBATCH", "RAY_"))


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    """Ports that nobody had a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]
) -> None:
    """Poll; raises TimeoutError that says what did not come."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            text = what if isinstance(what, str) else what()
            raise TimeoutError(f"not within {timeout_s:g} s: {text}")
        time.sleep(0.5)
