"""What a run that continues looks at: its checkpoint, changed keys, earlier attempts."""

import contextlib
import functools
import grp
import json
import logging
import os
import pwd
import stat
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from nemo_like.doors import refuse_special
from nemo_like.errors import RunError, UserError
from nemo_like.run.checkpoint import DriverState, crc_of, read_state, reason_of, remedy_for
from nemo_like.run.folder import STARTS

logger = logging.getLogger(__name__)

_FIXED = (
    *("policy.model", "policy.optimizer.kind", "policy.optimizer.moments"),
    *("policy.lora.rank", "policy.lora.alpha", "policy.lora.targets", "critic.model"),
)
"""What a checkpoint's tensors are those of."""
_MOST_EQUAL_STARTS = 2
_LISTED = TypeAdapter(dict[str, tuple[int, int]])


def open_checkpoint(path: Path) -> DriverState:
    """The state of a checkpoint that is checked byte for byte; UserError names the damage."""
    refuse_special(f"Checkpoint {path}", path, depth=2)
    _verify(path)
    for one in (path, *sorted(file for file in path.rglob("*") if file.exists())):
        if who := who_else_writes(one):
            logger.warning(
                "%s can be written by %s, who could have changed the checkpoint and its checksums; "
                "see that you trust them, or chown and chmod go-w it.",
                one,
                who,
            )
            break
    return read_state(path)


def _verify(path: Path) -> None:
    try:
        files = _LISTED.validate_python(json.loads((path / "files.json").read_text()))
        if "driver.json" not in files:
            raise ValueError("driver.json is not in it")
    except (OSError, ValueError, RecursionError) as error:
        damaged = f"files.json: {reason_of(error)}"
        raise UserError(f"Checkpoint {path} is damaged: {damaged}. {remedy_for(path)}") from error
    for name, (size, crc) in files.items():
        file, damaged = path / name, None
        try:
            if file.stat().st_size != size or crc_of(file) != crc:
                damaged = "has changed"
        except (OSError, ValueError):  # also of a name that no file can have
            damaged = "is missing or cannot be read"
        if damaged:
            what = f"{name[:200]} {damaged}"
            raise UserError(f"Checkpoint {path} is damaged: {what}. {remedy_for(path)}")


def read_config(path: Path) -> dict[str, Any]:
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


def warn_changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> None:
    """Log changes, refuse those that make it another run, undo those that the checkpoint undoes."""
    for key in {**old, **new}:
        name, value = f"{prefix}{key}", new.get(key)
        if isinstance(value, dict) and isinstance(old.get(key), dict) and key != "tasks":
            warn_changes(old[key], value, f"{name}.")
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


def note_start(folder: Path, step: int) -> None:
    """Record a resume attempt; refuse the third that made no progress.

    Raises RunError in a job that Slurm requeued, which would repeat forever; elsewhere it warns. A
    newly submitted job starts counting again.
    """
    requeued = (os.environ.get("SLURM_RESTART_COUNT") or "0") != "0"
    counts_on = requeued or "SLURM_JOB_ID" not in os.environ
    path, count = folder / STARTS, 1
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
