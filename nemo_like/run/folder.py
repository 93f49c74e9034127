"""A run's folder: made new or continued, with the configuration that it ran with."""

import contextlib
import fcntl
import functools
import grp
import json
import logging
import os
import pwd
import stat
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import yaml

from nemo_like.config.run import RunConfig
from nemo_like.errors import RunError, UserError

logger = logging.getLogger(__name__)

_FIXED = (
    *("policy.model", "policy.optimizer.kind", "policy.lora.rank", "policy.lora.alpha"),
    *("policy.lora.targets", "critic.model"),
)
"""What a checkpoint's tensors are those of."""
_STARTS = "starts.json"
_MOST_EQUAL_STARTS = 2


def save_config(folder: Path, config: RunConfig, *, continued: bool) -> None:
    """Write ``config.yaml``, which has no environment variables; if the run continues, log changes.

    Raises UserError for a change that would make it another run.
    """
    path = folder / "config.yaml"
    now = config.model_dump(mode="json")
    if continued and path.exists():
        before = _read(path)
        if config.section not in before:
            raise UserError(
                f"run.dir={config.run.dir} is the folder of a run of another kind: its config.yaml "
                f"has no section {config.section}; continue it with its own script, or choose "
                "another folder."
            )
        _warn_changes(before, now)
    aside = path.with_name("config.yaml.tmp")
    aside.write_text(yaml.safe_dump(now, sort_keys=False))
    aside.replace(path)  # whole or not at all, should the run be killed here


def make_run_dir(config: RunConfig, name: str) -> Path:
    """``run.dir``, or a new folder under ``runs``; raises UserError if it can't be written."""
    try:
        if config.run.dir is not None:
            path = Path(config.run.dir).expanduser().resolve()
            path.mkdir(parents=True, exist_ok=True)
            return path
        stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        for suffix in ("", *(f"-{i}" for i in range(2, 100))):
            path = Path("runs", stem + suffix).resolve()
            # Jobs of one sweep may share a second, and tasks of a job array a moment.
            with contextlib.suppress(FileExistsError):
                path.mkdir(parents=True)
                return path
    except OSError as error:
        raise UserError(f"run.dir={config.run.dir} cannot be written: {error}") from error
    raise UserError(f"runs/{stem} exists a hundred times; set run.dir.")


def claim(folder: Path) -> TextIO:
    """Lock ``folder`` until the returned file is closed or this process ends.

    Raises UserError if another run is in it. ``run.log`` is what is locked.
    """
    held = (folder / "run.log").open("a")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.close()
        raise UserError(
            f"run.dir={folder} is being written by another run; end that one, wait for it, or "
            "choose another folder."
        ) from error
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s): start no other run in it.", folder, error)
    return held


def note_start(folder: Path, step: int) -> None:
    """Record a resume attempt; refuse the third that made no progress.

    Raises RunError in a job that Slurm requeued, which would repeat forever; elsewhere it warns. A
    newly submitted job starts counting again.
    """
    requeued = (os.environ.get("SLURM_RESTART_COUNT") or "0") != "0"
    counts_on = requeued or "SLURM_JOB_ID" not in os.environ
    path, count = folder / _STARTS, 1
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # none, or a torn one
        before = json.loads(path.read_text())
        count += before["count"] if before["step"] == step and counts_on else 0
    path.write_text(json.dumps({"step": step, "count": count}))
    if count <= _MOST_EQUAL_STARTS:
        return
    told = (
        f"The run in {folder} has been started {count - 1} times after step {step} without saving "
        "a later one; lower checkpoint.every_steps, or give it more time (in a Slurm job by "
        "cluster.slurm.time and, for a last step and its checkpoint, run.stop_grace_s)."
    )
    if requeued:
        raise RunError(f"{told} Submit it again to try once more.")
    logger.warning("%s", told)


def note_end(folder: Path) -> None:
    (folder / _STARTS).unlink(missing_ok=True)


def who_else_writes(path: Path) -> str | None:
    status = path.stat()
    private = _is_private_group(status.st_gid)
    return others_who_write(status.st_mode, status.st_uid, os.geteuid(), private)


def others_who_write(mode: int, owner: int, me: int, private: bool) -> str | None:
    """Who but root can write, by ``stat``'s values; ``private``: its group is this user's alone."""
    if owner not in (me, 0):
        return f"its owner, user {owner}"
    if mode & stat.S_IWOTH:
        return "everyone"
    return "its group" if mode & stat.S_IWGRP and not private else None


def is_private(group: grp.struct_group, user: pwd.struct_passwd) -> bool:
    """Whether ``user`` is the only member of a group.

    Systems with umask 002 give each user a primary group of the same name; who else has a group as
    their primary one cannot be listed everywhere, so the name decides.
    """
    own = group.gr_gid == user.pw_gid and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}


@functools.cache
def _is_private_group(gid: int) -> bool:
    try:
        return is_private(grp.getgrgid(gid), pwd.getpwuid(os.geteuid()))
    except KeyError:  # without a name, as in containers
        return False


def _read(path: Path) -> dict[str, Any]:
    """The configuration of an earlier run; UserError if its file is damaged."""
    found = None
    with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise UserError(
            f"{path} is damaged, and what the run was configured with is not known; restore it, or "
            "remove it to continue with the configuration as it is now."
        )
    return found


def _warn_changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> None:
    """Log changes, refuse those that make it another run, undo those that the checkpoint undoes."""
    for key, value in new.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(old.get(key), dict) and key != "tasks":
            _warn_changes(old[key], value, f"{name}.")
        elif value != old.get(key) and name not in ("run.resume", "run.dir"):
            if name in _FIXED:
                raise UserError(
                    f"{name}={value} is not that of the run to continue, {old.get(key)}; use that "
                    "one, or a new run.dir."
                )
            kept = ""
            if name.startswith("policy.optimizer.") or name == "critic.lr":
                new[key], kept = old.get(key), "; the checkpoint's value is kept"
            logger.warning("%s was %s and is now %s%s", name, old.get(key), value, kept)
