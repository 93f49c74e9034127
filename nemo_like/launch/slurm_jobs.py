"""What Slurm knows of a job, through its own commands, and what the job's log tells."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_like.errors import RunError, UserError, WaitTimeoutError
from nemo_like.observe.console import ROLLOUT_COLUMNS, TRAINING_COLUMNS

_ANSWER_TIMEOUT_S = 60.0
# Slurm kills what is left 30 s after it asked (KillWait); epilogs come on top.
_CANCEL_TIMEOUT_S = 180.0
_POLL_S = 1.0
# A controller serves a whole cluster: ask it seldom.
_ASK_AGAIN_S = 2.0

_FORGOTTEN = "forgotten by Slurm"
_ENDED = {
    *(_FORGOTTEN, "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
_NO_LOG = Path(os.devnull)
_UNKNOWN_JOB = ("Invalid job id", "not found")
_NO_ACCOUNTING = ("accounting storage is disabled",)
_JOB = re.compile(r"\d+(_\d+)?")
_SUBMITTED = re.compile(r"^(\d+)(;.*)?$", re.MULTILINE)
"""The name of the cluster may follow, and a site's greeting come before."""
_RUN_FOLDER = re.compile(r"\d\d:\d\d:\d\d (?:Run folder|Continuing after step \d+ in) (/.+)")
_LAUNCHER = re.compile(r"^nemo-like: (.+)", re.MULTILINE)  # what slurm/ray.sbatch says
_NUM_TOLD = 2


@dataclass(frozen=True, kw_only=True)
class Task:
    number: str
    """As Slurm writes it: ``12``, ``12_3``, or ``12_3-7`` for tasks that wait."""
    state: str
    reason: str = "None"
    nodes: str = ""
    time: str = ""
    limit: str = ""
    exit_code: str = "0:0"
    log: Path

    @property
    def has_ended(self) -> bool:
        """Whether it will not run (again)."""
        return self.state in _ENDED

    @property
    def has_output_to_come(self) -> bool:
        """False for an salloc job, whose output goes to a terminal."""
        return not self.has_ended and self.log != _NO_LOG

    def __str__(self) -> str:
        text = f"{self.number} {self.state}"
        code, _, signal = self.exit_code.partition(":")
        why = [] if self.reason in ("None", "") else [self.reason]
        why += [f"exit code {code}"] if code != "0" else []
        why += [f"signal {signal}"] if signal not in ("", "0") else []
        text += f" ({', '.join(why)})" if why else ""
        text += f" on {self.nodes}" if self.nodes not in ("", "(null)", "None assigned") else ""
        after = f" after {self.time} of {self.limit}"
        return text + (after if self.time and self.state != "PENDING" else "")


def submit(script: str) -> str:
    """The id of the new job; RunError with Slurm's own words if it is refused.

    Options go on the command line too: SBATCH_TIMELIMIT and its like would win over the script.
    """
    header = "\n".join(re.findall(r"^#SBATCH (.*)", script.partition("\n\n")[0], re.MULTILINE))
    options = shlex.split(header, comments=True)
    told = _ask("sbatch", "--parsable", *options, stdin=script)
    found = _SUBMITTED.search(told)
    if found is None:
        raise RunError(
            f"sbatch gave no job id, but {told!r}; see squeue --me before you try again."
        )
    return found[1]


def status_lines(job: str, log_dir: Path) -> Iterator[str]:
    """State, nodes, log, run folder and last step of each task; raises UserError if unknown."""
    for task in _find(job, log_dir):
        yield f"job     {task}"
        if not task.log.is_file():
            continue
        yield f"log     {task.log}"
        told, folder = _told_by(task.log)
        yield from (f"ray     {line}" for line in told)
        if folder is not None:
            yield f"run     {folder}"
            yield f"step    {_last_step(folder / 'metrics.jsonl')}"


def print_log(job: str, log_dir: Path, *, follow: bool) -> None:
    """The job's output so far; with ``follow`` also what comes, until the job has ended."""
    tasks = _find(job, log_dir)
    if "_" not in job and (len(tasks) > 1 or "_" in tasks[0].number):
        names = ", ".join(task.number for task in tasks)
        raise UserError(f"{job} is a job array; give one of its tasks ({names}), such as {job}_0.")
    try:
        _copy(job, log_dir, tasks[0], follow=follow)
    except BrokenPipeError:  # The reader, such as head, has what it wants.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.stderr.write(f"The job goes on; nemo-like slurm cancel {job} ends it.\n")


def cancel(job: str, log_dir: Path) -> Iterator[str]:
    """End the job and wait until it is gone; raises UserError if it is unknown."""
    tasks = _find(job, log_dir)
    if all(task.has_ended for task in tasks):
        raise UserError(f"job {tasks[0]} has ended already.")
    _ask("scancel", job)
    end = time.monotonic() + _CANCEL_TIMEOUT_S
    while left := [task for task in tasks if not task.has_ended]:
        if time.monotonic() > end:
            raise WaitTimeoutError(
                f"Slurm has not ended job {left[0]} within {_CANCEL_TIMEOUT_S:g} s."
            )
        time.sleep(_POLL_S)
        tasks = _tasks(job)
    # Slurm forgets tasks that never ran at once.
    yield from (f"job     {task}" for task in tasks or [f"{job} CANCELLED"])


def _copy(job: str, log_dir: Path, task: Task, *, follow: bool) -> None:
    while follow and not task.log.is_file() and task.has_output_to_come:
        time.sleep(_ASK_AGAIN_S)
        task = _find(job, log_dir)[0]
    if not task.log.is_file():
        to_come = " yet; use -f to wait" if task.has_output_to_come else ""
        raise RunError(f"job {task} has no log{to_come}.")
    with task.log.open("rb") as log:
        asked = time.monotonic()
        while True:
            shutil.copyfileobj(log, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            if not follow or task.has_ended:
                break
            time.sleep(_POLL_S)
            if time.monotonic() > asked + _ASK_AGAIN_S:
                task, asked = _find(job, log_dir)[0], time.monotonic()
    if follow:
        sys.stderr.write(f"Job {task}\n")


def _find(job: str, log_dir: Path) -> list[Task]:
    """At least one task: as Slurm knows it, or as its log in ``log_dir`` shows that it was."""
    if not _JOB.fullmatch(job):
        raise UserError(f"{job!r} is no job id; give a number such as 12, or 12_3 in an array.")
    if tasks := _tasks(job) or _accounted(job, log_dir):
        return tasks
    log = (log_dir / f"{job}.out").resolve()
    if not log.is_file():
        raise UserError(f"Slurm knows no job {job}, and there is no {log}; see --log-dir.")
    return [Task(number=job, state=_FORGOTTEN, log=log)]


def _tasks(job: str) -> list[Task]:
    """What the controller knows; nothing some minutes after a job's end (MinJobAge)."""
    told = _ask("scontrol", "--oneliner", "show", "job", job, unless=_UNKNOWN_JOB)
    return [_task(line) for line in told.splitlines() if line]


def _task(line: str) -> Task:
    # Values may have spaces; a name begins after one.
    fields = dict(re.findall(r"([\w:/]+)=(.*?)(?= [\w:/]+=|\s*$)", line))
    number = fields["JobId"]
    if "ArrayJobId" in fields:
        number = f"{fields['ArrayJobId']}_{fields.get('ArrayTaskId', '')}"
    return Task(
        number=number,
        state=fields["JobState"],
        reason=fields["Reason"],
        nodes=fields.get("NodeList", ""),
        time=fields["RunTime"],
        limit=fields["TimeLimit"],
        exit_code=fields["ExitCode"],
        log=Path(fields.get("StdOut", _NO_LOG)),
    )


def _accounted(job: str, log_dir: Path) -> list[Task]:
    """What Slurm's accounting kept, where a cluster has it."""
    names = "JobID,State,ExitCode,NodeList,Elapsed,Timelimit"
    options = ("-X", "--noheader", "--parsable2", f"--format={names}", "-j", job)
    told = _ask("sacct", *options, unless=_NO_ACCOUNTING)
    rows = (line.split("|") for line in told.splitlines())
    return [
        Task(
            number=number,
            state=state.split()[0],  # "CANCELLED by 1000"
            exit_code=exit_code,
            nodes=nodes,
            time=elapsed,
            limit=limit,
            log=(log_dir / f"{number}.out").resolve(),
        )
        for number, state, exit_code, nodes, elapsed, limit in rows
    ]


def _ask(*command: str, stdin: str = "", unless: Sequence[str] = ()) -> str:
    """What a command of Slurm printed; RunError with its own words if it failed.

    Nothing if one of ``unless`` is among these words.
    """
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_ANSWER_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise RunError(
            f"{command[0]} is not on PATH; run this on a login node of a Slurm cluster, or use "
            "nemo-like slurm render."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise WaitTimeoutError(
            f"{command[0]} did not answer within {_ANSWER_TIMEOUT_S:g} s; scontrol ping tells "
            "whether Slurm's controller is up."
        ) from error
    prefix = rf"({command[0]}: )?(error: )?"
    words = [re.sub(prefix, "", line, count=1) for line in done.stderr.splitlines() if line]
    if done.returncode:
        said = "; ".join(words) or done.stdout.strip()
        if any(one in said for one in unless):
            return ""
        raise RunError(f"{command[0]} failed with code {done.returncode}: {said}.")
    if words:  # A site's own remarks on a job that it takes.
        sys.stderr.write("\n".join([*words, ""]))
    return done.stdout


def _told_by(log: Path) -> tuple[list[str], Path | None]:
    """What the launcher said last (which nodes are up, why a job ends), and the run's folder."""
    text = log.read_text(encoding="utf-8", errors="replace")
    folders = _RUN_FOLDER.findall(text)
    return _LAUNCHER.findall(text)[-_NUM_TOLD:], Path(folders[-1].rstrip()) if folders else None


def _last_step(metrics: Path) -> str:
    """Number and metrics, as the console of a run names them, of the last whole record."""
    text = metrics.read_text(encoding="utf-8") if metrics.is_file() else ""
    *whole, _ = text.split("\n")
    if not whole:
        return "none yet"
    record = json.loads(whole[-1])
    columns = ROLLOUT_COLUMNS if "rollout/reward" in record else TRAINING_COLUMNS
    shown = (
        f"{column.label} {column.template.format(record[column.metric])}"
        for column in columns
        if column.metric in record
    )
    return ", ".join([str(record["step"]), *shown])
