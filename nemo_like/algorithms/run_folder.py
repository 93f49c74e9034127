"""A run's folder: made new or continued, with the configuration that it ran with."""

import contextlib
import logging
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from nemo_like.config.run_schema import TrainingRunConfig
from nemo_like.errors import UserError

logger = logging.getLogger(__name__)


def save_config(folder: Path, config: TrainingRunConfig, *, continued: bool) -> None:
    """Write ``config.yaml``; where a run is continued, say what differs from before.

    Environment variables never enter it, so no secret does. Raises UserError for a change that
    would make it another run.
    """
    path = folder / "config.yaml"
    text = yaml.safe_dump(_plain(asdict(config)), sort_keys=False)
    if continued and path.exists():
        _warn_changes(yaml.safe_load(path.read_text()), yaml.safe_load(text))
    path.write_text(text)


def make_run_dir(config: TrainingRunConfig, name: str) -> Path:
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


def _plain(value: Any) -> Any:
    """Enums as their text, in nested dicts and lists, so that YAML stays readable."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, str) else value


def _warn_changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> None:
    """Say what differs from the run that is continued; refuse what would make it another run."""
    for key, value in new.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(old.get(key), dict) and key != "tasks":
            _warn_changes(old[key], value, f"{name}.")
        elif value != old.get(key) and name not in ("run.resume", "run.dir"):
            if name in ("policy.model", "critic.model"):
                raise UserError(
                    f"{name}={value} is not the model of the run to continue, "
                    f"{old.get(key)}; use that one, or a new run.dir."
                )
            kept = name.startswith(("policy.optimizer.", "critic.optimizer."))
            logger.warning(
                "%s was %s and is now %s%s",
                name,
                old.get(key),
                value,
                "; the checkpoint's value is kept" if kept else "",
            )
