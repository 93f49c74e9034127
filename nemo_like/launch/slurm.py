"""``nemo-like slurm``: a run as a batch job of Slurm.

``render`` prints the batch script of ``python SCRIPT key=value ...``, or for the name of an
algorithm of ``nemo-like NAME key=value ...``, after checking the configuration; ``submit`` hands it
to sbatch. The job has ``cluster.num_nodes`` nodes with ``cluster.gpus_per_node`` GPUs each; all
else that Slurm is asked for is in ``cluster.slurm`` (docs/config.md). With ``--multirun`` each
combination is one task of a job array.

``status``, ``logs`` and ``cancel`` take the id of a job, or of one task of an array (12_3).
"""

import contextlib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nemo_like.compose import registry
from nemo_like.compose.files import SHIPPED
from nemo_like.compose.load import check_algorithm, compose_raw
from nemo_like.compose.sweep import check_run_dirs, jobs, part_folders
from nemo_like.config.run import RunConfig
from nemo_like.config.slurm import SlurmConfig
from nemo_like.errors import UserError
from nemo_like.launch.command import CommandParser, ConfigParser
from nemo_like.launch.slurm_jobs import cancel, print_log, status_lines, submit
from nemo_like.launch.slurm_script import BatchJob, render_script

_RAY_SCRIPT = next(
    folder / "slurm" / "ray.sbatch"
    for folder in (SHIPPED, SHIPPED.parent)
    if (folder / "slurm").is_dir()
)
_RUN_USAGE = "SCRIPT [key=value ...] [--config-name NAME] [--config-dir DIR] [--multirun]"
_JOB_USAGE = "JOB [--log-dir DIR]"


def run(arguments: Sequence[str]) -> None:
    """Carry out one of the commands; raises UserError, and RunError with Slurm's own words."""
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        sys.stdout.write(
            f"usage: nemo-like slurm render|submit {_RUN_USAGE}\n"
            f"       nemo-like slurm status|logs|cancel {_JOB_USAGE}\n\n{__doc__}"
        )
    elif name in _COMMANDS:
        _COMMANDS[name](arguments[1:])
    else:
        raise UserError(
            f"'{name}' is not a command of nemo-like slurm; use {', '.join(_COMMANDS)}."
        )


def _render(arguments: Sequence[str]) -> None:
    sys.stdout.write(render_script(_batch_job("render", arguments), _RAY_SCRIPT))


def _submit(arguments: Sequence[str]) -> None:
    job = _batch_job("submit", arguments)
    script = render_script(job, _RAY_SCRIPT)
    try:
        job.logs.mkdir(parents=True, exist_ok=True)  # Slurm does not: the job would just fail
    except OSError as error:
        raise UserError(f"cluster.slurm.log_dir={job.logs} cannot be written: {error}.") from error
    number = submit(script)
    with contextlib.suppress(OSError):  # It is for people to read; Slurm has its own.
        (job.logs / f"{number}.sbatch").write_text(script, encoding="utf-8")
    elsewhere = job.config.cluster.slurm.log_dir != SlurmConfig().log_dir
    where = f" --log-dir={shlex.quote(str(job.logs))}" if elsewhere else ""
    one = f"{number}_0" if job.is_array else number
    sys.stdout.write(
        f"job     {number}{f' ({len(job.commands)} tasks)' if job.is_array else ''}\n"
        f"log     {job.logs / one}.out\n"
        f"next    nemo-like slurm status {number}{where}\n"
        f"        nemo-like slurm logs {one} -f{where}\n"
        f"        nemo-like slurm cancel {number}\n"
    )


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
            "for example with examples/run_grpo.py, or with grpo alone for nemo-like grpo."
        )
    own = Path(script).stem.removeprefix("run_")
    named = options.config_name
    options.config_name = named or own
    folder, name, overrides, extra_dir = parser.source(options)
    typed = jobs(folder, name, overrides, extra_dir, multirun=options.multirun)
    composed = [compose_raw(folder, name, job, extra_dir) for job in typed]
    typed = part_folders(composed, typed, None)
    configs = []
    for one in composed:
        configs.append(one.load())
        _check_run_dir(one.raw, configs)
    check_run_dirs(configs)
    if own in registry.names():  # Scripts of the user's own may run any.
        check_algorithm(script, type(configs[0]), registry.find(own).config)
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


def _job_parser(command: str) -> CommandParser:
    parser = CommandParser(f"slurm {command}", f"nemo-like slurm {command} {_JOB_USAGE}", __doc__)
    parser.add_argument("job", help="id of a job, or of a task of an array: 12_3")
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=Path(SlurmConfig().log_dir),
        help="cluster.slurm.log_dir of a job that Slurm has forgotten",
    )
    return parser


def _status(arguments: Sequence[str]) -> None:
    options = _job_parser("status").parse_args(arguments)
    sys.stdout.write("\n".join([*status_lines(options.job, options.log_dir), ""]))


def _logs(arguments: Sequence[str]) -> None:
    parser = _job_parser("logs")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the job ends")
    options = parser.parse_args(arguments)
    print_log(options.job, options.log_dir, follow=options.follow)


def _cancel(arguments: Sequence[str]) -> None:
    options = _job_parser("cancel").parse_args(arguments)
    sys.stdout.write("\n".join([*cancel(options.job, options.log_dir), ""]))


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "render": _render,
    "submit": _submit,
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
}
