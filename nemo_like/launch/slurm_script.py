"""The text of a batch script, from a configuration; nothing is run or looked at here.

It has what the configuration says of the job. How Ray starts in it is in ``slurm/ray.sbatch``,
which is told by environment variables.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_like.config.run import RunConfig
from nemo_like.config.slurm import cpus_per_node
from nemo_like.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A run as it was typed, or the tasks of a sweep."""

    name: str
    config: RunConfig
    """That of the first task; all have the same ``cluster``."""
    commands: Sequence[Sequence[str]]
    """Words of each task's command line."""
    folder: Path
    """Where the commands run: the folder in which they were typed."""

    @property
    def is_array(self) -> bool:
        """Whether there are several tasks."""
        return len(self.commands) > 1

    @property
    def logs(self) -> Path:
        """``cluster.slurm.log_dir``, whole."""
        return self.folder / Path(self.config.cluster.slurm.log_dir).expanduser()


def render_script(job: BatchJob, ray_script: Path) -> str:
    """The batch script; raises UserError for paths that Slurm cannot write to."""
    header = [f"#SBATCH {option}" for option in _options(job)]
    exports = [f"export NEMO_LIKE_{name}={value}" for name, value in _variables(job)]
    last = shlex.join(["exec", "bash", str(ray_script)])
    return "\n".join(["#!/bin/bash", *header, "", *_command(job.commands), *exports, last, ""])


def _options(job: BatchJob) -> Iterator[str]:
    cluster, slurm = job.config.cluster, job.config.cluster.slurm
    yield f"--job-name={_word(job.name)}"
    yield f"--chdir={_word(str(job.folder))}"
    yield f"--output={_word(_pattern(job.logs))}/{'%A_%a' if job.is_array else '%j'}.out"
    if job.is_array:
        yield f"--array=0-{len(job.commands) - 1}"
    # Said even where it is the default: what an outer job has set does not count then.
    yield f"--nodes={cluster.num_nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={slurm.cpus_per_node or cpus_per_node(job.config)}"
    if cluster.gpus_per_node:
        yield f"--gpus-per-node={cluster.gpus_per_node}"
    for option in ("time", "partition", "account"):
        value = getattr(slurm, option)
        if value is not None:
            yield f"--{option}={_word(value)}"
    if slurm.requeue:
        yield "--requeue"
        yield f"--signal=B:USR1@{slurm.signal_before_s}"
        yield "--open-mode=append"
    else:
        # Many clusters queue a job again when a node fails; this run would not continue.
        yield "--no-requeue"
    yield from slurm.extra


def _pattern(logs: Path) -> str:
    """The folder of outputs, in which Slurm replaces ``%x`` and gives up at a backslash."""
    if "%" in str(logs) or "\\" in str(logs):
        raise UserError(
            f"cluster.slurm.log_dir: Slurm cannot write to {logs}; use a path without % and \\."
        )
    return str(logs)


def _word(text: str) -> str:
    """One word of a ``#SBATCH`` line, where a backslash quotes inside quotes too.

    >>> print(_word("gpu"), _word('my "runs" #1'))
    gpu "my \\"runs\\" #1"
    """
    if not text.isprintable():
        raise UserError(f"{text!r} cannot stand in a batch script; use a name of printable text.")
    if shlex.quote(text) == text:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _command(commands: Sequence[Sequence[str]]) -> Iterator[str]:
    """Words quoted once, so that people can read and change them; bash quotes them again."""
    if len(commands) == 1:
        yield f"command=({shlex.join(commands[0])})"
    else:
        yield 'case "$SLURM_ARRAY_TASK_ID" in'
        for task, command in enumerate(commands):
            yield f"{task}) command=({shlex.join(command)}) ;;"
        yield "esac"
    yield "printf -v NEMO_LIKE_COMMAND '%q ' \"${command[@]}\""
    yield "export NEMO_LIKE_COMMAND"


def _variables(job: BatchJob) -> Iterator[tuple[str, str]]:
    """What ``ray.sbatch`` is told; empty ones too, so that the user's shell adds none."""
    cluster, slurm = job.config.cluster, job.config.cluster.slurm
    number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.is_array else "$SLURM_JOB_ID"
    yield "SETUP", shlex.quote(slurm.setup or "")
    yield "CONTAINER", shlex.quote(slurm.container or "")
    yield "CONTAINER_RUNTIME", str(slurm.container_runtime) if slurm.container else "''"
    yield "MOUNTS", shlex.quote(",".join(slurm.mounts))
    yield "LOG_DIR", f'{shlex.quote(str(job.logs))}/"{number}"'
    yield "GPUS_PER_NODE", str(cluster.gpus_per_node)
    yield "CPUS_PER_NODE", "''"  # those that Slurm gave
    yield "START_TIMEOUT_S", str(math.ceil(cluster.start_timeout_s))
    yield "REQUEUE", "1" if slurm.requeue else "''"
    # What is left of it is for Ray to end, and for Slurm, which may give the signal late.
    yield "STOP_TIMEOUT_S", str(slurm.signal_before_s // 2)
