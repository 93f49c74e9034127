"""A run's folder: made new or continued, with the configuration that it ran with."""

import contextlib
import fcntl
import logging
from datetime import datetime
from pathlib import Path
from typing import TextIO

import yaml

from nemo_like.config.run import RunConfig
from nemo_like.errors import UserError

logger = logging.getLogger(__name__)

STARTS = "starts.json"
"""Attempts to continue after one step; see ``run/continued.py``."""


def save_config(folder: Path, config: RunConfig, *, continued: bool) -> None:
    """Write ``config.yaml``, which has no environment variables; if the run continues, log changes.

    Raises UserError for a change that would make it another run.
    """
    path = folder / "config.yaml"
    now = config.model_dump(mode="json")
    if continued and path.exists():
        from nemo_like.run.continued import read_config, warn_changes

        before = read_config(path)
        if config.section not in before:
            raise UserError(
                f"run.dir={config.run.dir} is the folder of a run of another kind: its config.yaml "
                f"has no section {config.section}; continue it with its own script, or choose "
                "another folder."
            )
        warn_changes(before, now)
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
        where = f"run.dir={config.run.dir}" if config.run.dir else "runs/, as run.dir is not set,"
        raise UserError(f"{where} cannot be written: {error}; choose another folder.") from error
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


def note_end(folder: Path) -> None:
    (folder / STARTS).unlink(missing_ok=True)
