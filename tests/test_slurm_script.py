"""Slurm scripts without a Slurm: ports, options of ``srun``, containers, examples, refusals."""

import os
import shlex
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_like.compose.load import compose_config
from tests.slurm_cluster import needs
from tests.small_runs import ROOT

SCRIPT = ROOT / "slurm" / "ray.sbatch"
RAY_WORKER_PORTS = range(10002, 20000)  # those of a Ray with default settings
FIRST_PORT_OF_THE_KERNEL = 32768


@pytest.fixture(scope="module")
def ports() -> dict[tuple[int, int], dict[str, int]]:
    """(job id, node index) -> its fixed ports by option, for 49 jobs of 16 nodes."""
    program = """
        source "$1"
        for ((job = 4990; job < 4990 + 49; job++)); do
            start=$(block_start $job)
            for ((node = 0; node < 16; node++)); do
                echo $job $node
                ray_options $start $node
            done
        done
    """
    command = ["bash", "-c", program, "bash", SCRIPT]
    text = subprocess.check_output(command, text=True, env=os.environ | {"RAY_ADDRESS": "10.1.1.1"})
    found = {}
    for line in text.splitlines():
        if not line.startswith("-"):
            job, node = map(int, line.split())
            options = found[job, node] = {}
        elif "port=" in line:
            name, _, port = line.partition("=")
            options[name] = int(port)
    return found


def test_fixed_ports_are_unique_on_a_host_that_all_nodes_of_48_jobs_share(ports):
    for num_nodes in (1, 2, 16):
        taken = [
            port
            for (job, node), options in ports.items()
            if node < num_nodes and job < 4990 + 48
            for name, port in options.items()
            if "worker-port" not in name
        ]
        assert len(set(taken)) == len(taken) == 48 * (6 * num_nodes + 3)


def test_no_fixed_port_is_one_that_a_worker_of_this_or_another_ray_may_take(ports):
    for options in ports.values():
        # Zero: the kernel chooses.
        assert options.pop("--min-worker-port") == options.pop("--max-worker-port") == 0
        for port in options.values():
            assert port not in RAY_WORKER_PORTS
            assert 1024 < port < FIRST_PORT_OF_THE_KERNEL


def test_a_job_that_comes_after_48_others_has_the_first_ones_ports_again(ports):
    assert ports[4990, 3] == ports[4990 + 48, 3]


STAND_INS = {
    "srun": """
        printf '%s\\0' "$@" >"$RECORD/$$.srun"
        env -0 >"$RECORD/$$.environment"
        case "$*" in
            *--ntasks-per-node=*) "${@: -3}"; "${@: -3}" ;;
            *--job-name=ray*) echo $$ >>"$RECORD/pids"; exec sleep 60 ;;
            *) exit 0 ;;
        esac""",
    "scontrol": """
        case "$*" in
            *hostnames*) echo n1; echo n2 ;;
            *job*) echo "JobId=$SLURM_JOB_ID ${HET:-}" ;;
            *node*) echo "NodeName=n1 NodeAddr=127.0.0.1 " ;;
        esac""",
    "squeue": "echo 1.1 ray",
    "scancel": 'kill $(cat "$RECORD/pids")',
}


@dataclass(frozen=True)
class Call:
    """What ``srun`` was told."""

    words: list[str]
    environment: dict[str, str]


def run_with_stand_ins(
    folder: Path, *arguments: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a job of two nodes where ``srun`` and its like only write down their words.

    The folder of the script's repository is the current one; logs go below ``folder``.
    """
    for name, text in STAND_INS.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    (folder / "record").mkdir()
    job = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "RECORD": str(folder / "record"),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "NEMO_LIKE_LOG_DIR": str(folder / "logs"),
    }
    command = ["bash", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=job | environment, capture_output=True, text=True, timeout=60
    )


def calls_of_srun(folder: Path, *arguments: str | Path, **environment: str) -> list[Call]:
    """The probe, two nodes, and the command."""
    done = run_with_stand_ins(folder, *arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [
        Call(
            path.read_text().split("\0")[:-1],
            dict(
                line.partition("=")[::2]
                for line in path.with_suffix(".environment").read_text().split("\0")
            ),
        )
        for path in (folder / "record").glob("*.srun")
    ]
    assert len(calls) == 4
    return calls


def test_every_srun_states_nodes_tasks_and_gpus_whatever_the_job_had_in_stand_ins(tmp_path):
    leaks = {
        "SLURM_GPUS_PER_NODE": "1",
        "SLURM_NTASKS": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_MEM_PER_CPU": "100",
        "SLURM_TRES_PER_TASK": "gpu:1",
        "SLURM_STDOUTMODE": "none",
        "SLURM_WORKING_DIR": "/nowhere",
        "SLURM_MPI_TYPE": "pmix",
        "SLURM_HET_SIZE": "2",
    }
    kept = {"SLURM_RESTART_COUNT": "1", "SLURM_ARRAY_TASK_ID": "3"}
    for call in calls_of_srun(tmp_path, SCRIPT, "true", SLURM_GPUS_ON_NODE="8", **leaks, **kept):
        for option in ("--nodes=", "--ntasks=", "--gres=gpu:8", "--export=ALL", "--mem=0"):
            assert any(word.startswith(option) for word in call.words), (option, call.words)
        assert not call.environment.keys() & {*leaks, "SLURM_GPUS_ON_NODE"}
        assert call.environment.items() >= kept.items()


def test_a_percent_sign_in_the_log_folder_is_no_pattern_of_srun_in_stand_ins(tmp_path):
    calls = calls_of_srun(tmp_path, SCRIPT, "true", NEMO_LIKE_LOG_DIR=str(tmp_path / "50%j x"))
    assert any(f"--output={tmp_path}/50%%j x/ray-0-n2.log" in call.words for call in calls)
    assert (tmp_path / "50%j x").is_dir()


def test_ports_in_use_move_a_job_to_another_block_in_stand_ins(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 20480 + 77 % 48 * 256 + 100))
        other.listen()
        calls = calls_of_srun(tmp_path, SCRIPT, "true")
    assert any(f"--port={20480 + (77 + 17) % 48 * 256}" in call.words for call in calls)


def test_pyxis_gets_the_image_mounts_and_folder_in_stand_ins(tmp_path):
    calls = calls_of_srun(
        tmp_path,
        SCRIPT,
        "true",
        NEMO_LIKE_CONTAINER="registry#image:1",
        NEMO_LIKE_CONTAINER_RUNTIME="pyxis",
        NEMO_LIKE_MOUNTS="/data:/data",
    )
    inside = [call.words for call in calls if "--container-image=registry#image:1" in call.words]
    assert len(inside) == 3  # all but the probe, which asks the host
    logs = tmp_path / "logs"
    for words in inside:
        assert f"--container-mounts={ROOT}:{ROOT},{logs}:{logs},/data:/data" in words
        assert f"--container-workdir={ROOT}" in words


def test_apptainer_runs_each_step_in_the_image_in_stand_ins(tmp_path):
    calls = calls_of_srun(
        tmp_path,
        SCRIPT,
        "true",
        NEMO_LIKE_CONTAINER="my image.sif",
        NEMO_LIKE_CONTAINER_RUNTIME="apptainer",
    )
    mounts = f"{ROOT}:{ROOT},{tmp_path}/logs:{tmp_path}/logs"
    start = ["apptainer", "exec", "--nv", "--bind", mounts, "--pwd", str(ROOT), "my image.sif"]
    inside = [call.words for call in calls if "apptainer" in call.words]
    assert len(inside) == 3
    for words in inside:
        first = words.index("apptainer")
        assert words[first : first + len(start) + 2] == [*start, "bash", "-c"]


def test_the_example_resumes_and_fits_what_slurm_gave_in_stand_ins(tmp_path):
    calls = calls_of_srun(
        tmp_path,
        ROOT / "slurm" / "grpo.sbatch",
        "policy.optimizer.lr=1e-6",
        "checkpoint.every_steps=3",
        SLURM_GPUS_ON_NODE="8",
    )
    (command,) = (call.environment["NEMO_LIKE_COMMAND"] for call in calls if "driver" in call.words)
    program, script, *overrides = shlex.split(command)
    assert (program, script) == ("python", "examples/run_grpo.py")
    assert len({one.partition("=")[0] for one in overrides}) == len(overrides)
    config = compose_config(ROOT / "configs", "grpo", overrides)
    assert config.checkpoint.every_steps == 3
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node) == (2, 8)
    assert (config.run.dir, config.run.resume) == ("runs/grpo-77", True)
    assert config.policy.optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"SLURM_JOB_ID": ""}, "there is no Slurm job here; start one with: sbatch"),
        ({"NEMO_LIKE_LOG_DIR": "/dev/null/x"}, "NEMO_LIKE_LOG_DIR=/dev/null/x cannot be written"),
        ({"NEMO_LIKE_START_TIMEOUT_S": "10m"}, "limits in seconds are whole numbers"),
        ({"NEMO_LIKE_GPUS_PER_NODE": "many"}, "GPUs (many) and"),
        ({"SLURM_HET_SIZE": "2", "HET": "HetJobId=77"}, "a heterogeneous job has several sets"),
        (
            {"NEMO_LIKE_CONTAINER": "image"},
            "NEMO_LIKE_CONTAINER needs NEMO_LIKE_CONTAINER_RUNTIME=pyxis or apptainer",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(tmp_path, environment, sentence):
    done = run_with_stand_ins(tmp_path, SCRIPT, "true", **environment)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert not list(tmp_path.rglob("ray-token"))


def test_shellcheck_has_nothing_to_say_about_slurm_scripts():
    if shutil.which("shellcheck") is None:
        needs("shellcheck")
    done = subprocess.run(
        ["shellcheck", *sorted((ROOT / "slurm").glob("*.sbatch"))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
