"""``nemo-like slurm``: a run as a batch job of Slurm.

``render`` prints the batch script of ``python SCRIPT key=value ...``, or for the name of an
algorithm of ``nemo-like NAME key=value ...``, after checking the configuration; ``submit`` hands it
to sbatch. The job has ``cluster.num_nodes`` nodes with ``cluster.gpus_per_node`` GPUs each; all
else that Slurm is asked for is in ``cluster.slurm`` (docs/config.md). With ``--multirun`` each
combination is one task of a job array.

``status``, ``logs`` and ``cancel`` take the id of a job, or of one task of an array (12_3).
"""

import contextlib
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nemo_like.compose import registry
from nemo_like.compose.files import SHIPPED
from nemo_like.compose.load import check_algorithm, compose_raw
from nemo_like.compose.sweep import check_run_dirs, jobs, part_folders
from nemo_like.config.run import RunConfig
from nemo_like.config.slurm_rules import signal_before_s
from nemo_like.errors import UserError
from nemo_like.launch.command import CommandParser, ConfigParser
from nemo_like.launch.slurm_jobs import cancel, print_log, status_lines, submit

_RAY_SCRIPT = next(
    folder / "slurm" / "ray.sbatch"
    for folder in (SHIPPED, SHIPPED.parent)
    if (folder / "slurm").is_dir()
)
_RUN_USAGE = "SCRIPT [key=value ...] [--config-name NAME] [--config-dir DIR] [--multirun]"
_LOGS = Path("slurm-logs")
_JOB_USAGE = "JOB [--log-dir DIR]"
_COMMANDS = ("render", "submit", "status", "logs", "cancel")


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A run as it was typed, or the tasks of a sweep."""

    name: str
    config: RunConfig
    """That of the first task; all have the same ``cluster``."""
    commands: Sequence[Sequence[str]]
    folder: Path
    """Where the commands run: the folder in which they were typed."""

    @property
    def is_array(self) -> bool:
        return len(self.commands) > 1

    @property
    def logs(self) -> Path:
        return self.folder / _LOGS


def run(arguments: Sequence[str]) -> None:
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        sys.stdout.write(
            f"usage: nemo-like slurm render|submit {_RUN_USAGE}\n"
            f"       nemo-like slurm status|logs|cancel {_JOB_USAGE}\n\n{__doc__}"
        )
    elif name not in _COMMANDS:
        raise UserError(
            f"'{name}' is not a command of nemo-like slurm; use {', '.join(_COMMANDS)}."
        )
    elif name == "render":
        sys.stdout.write(render_script(_batch_job(name, rest), _RAY_SCRIPT))
    elif name == "submit":
        _submit(_batch_job(name, rest))
    else:
        _about_job(name, rest)


def _submit(job: BatchJob) -> None:
    script = render_script(job, _RAY_SCRIPT)
    try:
        job.logs.mkdir(parents=True, exist_ok=True)  # Slurm does not: the job would just fail
    except OSError as error:
        raise UserError(f"{job.logs} cannot be written: {error}.") from error
    number = submit(script)
    with contextlib.suppress(OSError):  # It is for people to read; Slurm has its own.
        (job.logs / f"{number}.sbatch").write_text(script, encoding="utf-8")
    one = f"{number}_0" if job.is_array else number
    sys.stdout.write(
        f"job     {number}{f' ({len(job.commands)} tasks)' if job.is_array else ''}\n"
        f"log     {job.logs / one}.out\n"
        f"next    nemo-like slurm status {number}\n"
        f"        nemo-like slurm logs {one} -f\n"
        f"        nemo-like slurm cancel {number}\n"
    )


def _about_job(command: str, arguments: Sequence[str]) -> None:
    parser = CommandParser(f"slurm {command}", f"nemo-like slurm {command} {_JOB_USAGE}", __doc__)
    parser.add_argument("job", help="id of a job, or of a task of an array: 12_3")
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=_LOGS,
        help="slurm-logs of a job that Slurm has forgotten",
    )
    if command == "logs":
        parser.add_argument("--follow", "-f", action="store_true", help="go on until the job ends")
    options = parser.parse_args(arguments)
    if command == "logs":
        print_log(options.job, options.log_dir, follow=options.follow)
        return
    lines = (status_lines if command == "status" else cancel)(options.job, options.log_dir)
    sys.stdout.write("\n".join([*lines, ""]))


def _batch_job(command: str, arguments: Sequence[str]) -> BatchJob:
    """What is typed, with its configuration composed and checked as the run will do it."""
    parser = ConfigParser(f"slurm {command}", f"nemo-like slurm {command} {_RUN_USAGE}", __doc__)
    parser.add_argument("--multirun", "-m", action="store_true", help="one task a combination")
    options = parser.parse_intermixed_args(arguments)
    script, *options.words = options.words or [""]
    is_command = script in registry.names()
    if not is_command and not (script.endswith(".py") and Path(script).is_file()):
        raise UserError(
            f"SCRIPT={script!r} is no Python file; use nemo-like slurm {command} {_RUN_USAGE}, "
            "for example with grpo, or with a script of yours."
        )
    own = Path(script).stem.removeprefix("run_")
    named = options.config_name
    options.config_name = named or own
    folder, name, overrides, extra_dir = parser.source(options)
    typed = jobs(folder, name, overrides, extra_dir) if options.multirun else [overrides]
    composed = [compose_raw(folder, name, job, extra_dir) for job in typed]
    typed = part_folders(composed, typed, None)
    configs = []
    for one in composed:
        configs.append(one.load())
        _check_run_dir(one.raw, configs)
    check_run_dirs(configs)
    if own in registry.names():  # Scripts of the user's own may run any.
        ours = f"nemo-like {own}" if is_command else script
        check_algorithm(ours, type(configs[0]), registry.find(own).config)
    head = ["nemo-like" if is_command else "python", script]
    if named:
        head.append(f"--config-name={named}")
    # Hydra looks for relative ones beside the script; here they are where they are typed.
    if options.config_path:
        head.append(f"--config-path={folder.resolve()}")
    if extra_dir:
        head.append(f"--config-dir={extra_dir.resolve()}")
    commands = [[*head, *job] for job in typed]
    return BatchJob(name=own, config=configs[0], commands=commands, folder=Path.cwd())


def _check_run_dir(raw: DictConfig, configs: Sequence[RunConfig]) -> None:
    """Tasks have the same machines, and a job that is queued again must find its folder."""
    config = configs[-1]
    written = OmegaConf.to_container(raw.run, resolve=False)
    assert isinstance(written, dict)
    if config.cluster.slurm.requeue and "${now" in str(written["dir"]):
        raise UserError(
            f"run.dir={written['dir']} is another folder each time, and cluster.slurm.requeue=true "
            "continues in the same; give one without the time."
        )
    if config.cluster != configs[0].cluster:
        raise UserError(
            "--multirun cannot change cluster.*: the tasks of a job array have the same machines; "
            "submit one job each."
        )


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
    if "%" in str(job.logs) or "\\" in str(job.logs):  # it replaces %x, and gives up at \
        raise UserError(f"Slurm cannot write to {job.logs}; submit from a path without % and \\.")
    yield f"--output={_word(str(job.logs))}/{'%A_%a' if job.is_array else '%j'}.out"
    if job.is_array:
        yield f"--array=0-{len(job.commands) - 1}"
    # Said even where it is the default: what an outer job has set does not count then.
    yield f"--nodes={cluster.num_nodes}"
    yield "--ntasks-per-node=1"
    bundles = cluster.gpus_per_node or cluster.cpu_workers_per_node
    yield f"--cpus-per-task={math.ceil(bundles * cluster.cpus_per_worker)}"
    if cluster.gpus_per_node:
        yield f"--gpus-per-node={cluster.gpus_per_node}"
    if slurm.time is not None:
        yield f"--time={_word(slurm.time)}"
    if slurm.requeue:
        yield "--requeue"
        yield f"--signal=B:USR1@{signal_before_s(job.config.run.stop_grace_s)}"
        yield "--open-mode=append"
    else:
        # Many clusters queue a job again when a node fails; this run would not continue.
        yield "--no-requeue"
    yield from slurm.extra


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
    image = slurm.container or ""
    yield "CONTAINER", shlex.quote(image)
    runtime = "apptainer" if image.endswith(".sif") else "pyxis"
    yield "CONTAINER_RUNTIME", runtime if image else "''"
    yield "MOUNTS", shlex.quote(",".join(slurm.mounts))
    yield "LOG_DIR", f'{shlex.quote(str(job.logs))}/"{number}"'
    yield "GPUS_PER_NODE", str(cluster.gpus_per_node)
    yield "CPUS_PER_NODE", "''"  # those that Slurm gave
    yield "MPS", "1" if cluster.mps else "''"
    yield "START_TIMEOUT_S", str(math.ceil(cluster.start_timeout_s))
    yield "REQUEUE", "1" if slurm.requeue else "''"
    # What is left of it is for Ray to end, and for Slurm, which may give the signal late.
    yield "STOP_TIMEOUT_S", str(signal_before_s(job.config.run.stop_grace_s) // 2)
