"""Checkpoints that are complete or absent.

``<run.dir>/checkpoints/step_<n>`` holds a folder for each model (sharded model, optimizer and
schedule), ``driver.json`` (step, data position, metric) and ``files.json`` (size and checksum of
every file). All is written into ``writing_step_<n>`` and renamed at the end, so the name is a
promise; ``files.json`` tells a file that was damaged later. Checksums are no signature: nothing
that is read can run code (``policy/state/checkpoint_files.py``).
"""

import json
import logging
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from pydantic import ConfigDict, NonNegativeInt, ValidationError
from pydantic.dataclasses import dataclass

from nemo_like.config.run import CheckpointConfig, RunConfig
from nemo_like.doors import refuse_special
from nemo_like.errors import RunError, UserError, WaitTimeoutError, WorkerDiedError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step_(0|[1-9]\d*)")
_LEFTOVER = re.compile(rf"(writing|deleting)_{_NAME.pattern}")
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class DriverState:
    step: NonNegativeInt
    loader: dict[str, Any]
    metric: float | None
    """Value that decides which checkpoint is best, the largest; None if not measured by then."""
    totals: dict[str, float]
    """Of the whole run so far: wall seconds, first and latest validation."""
    weight_versions: dict[str, NonNegativeInt]
    """Optimizer steps that each model has taken."""
    metric_name: str | None = None
    """What ``metric`` is the value of, with a minus where the smallest is best. None: written
    before this was; the run's own."""
    unlogged: dict[str, float] | None = None
    """Numbers of the step, if the run was stopped before the validation that belongs to them."""


class Checkpoints:
    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        self.folder = run_dir / "checkpoints"
        self._config = config

    def steps(self) -> list[int]:
        matches = (_NAME.fullmatch(path.name) for path in self.folder.glob("step_*"))
        return sorted(int(match[1]) for match in matches if match)

    def save(self, state: DriverState, write_models: Callable[[Path], None]) -> Path:
        """Write a checkpoint and drop those that need not be kept.

        ``write_models`` makes a folder for each model. RunError if the disk refuses: earlier
        checkpoints are untouched then, and this one leaves nothing.
        """
        final = self.folder / f"step_{state.step}"
        aside = self.folder / f"writing_{final.name}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            write_models(aside)
            (aside / "driver.json").write_text(json.dumps(asdict(state), indent=1))
            (aside / "files.json").write_text(json.dumps(_checksums(aside), indent=1))
            for path in (*aside.rglob("*"), aside):
                _sync(path)
            _remove(final)
            aside.rename(final)
            _sync(self.folder)
        except (WaitTimeoutError, WorkerDiedError):
            raise  # no fault of the disk's
        except (OSError, RunError) as error:
            # torch's reason for a full disk is a position in a file.
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(
                f"Checkpoint {final} could not be written ({free / 2**30:.2f} GiB are free there): "
                f"{error}; make room or repair the disk, then continue with run.resume=true."
            ) from error
        self._prune(state.metric_name)
        return final

    def resume(self) -> tuple[Path, DriverState] | None:
        """Remove what an earlier execution left half written or half removed; then ``latest``."""
        for path in sorted(self.folder.glob("*")):
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
                done = "could not be removed" if path.exists() else "was removed"
                logger.warning("%s was not finished when the run ended, and %s.", path, done)
        return self.latest()

    def latest(self) -> tuple[Path, DriverState] | None:
        """The newest checkpoint, as ``open_checkpoint`` reads it; None if there is none."""
        from nemo_like.run.continued import open_checkpoint

        steps = self.steps()
        if not steps:
            records = self.folder.parent / "metrics.jsonl"
            if records.is_file() and records.stat().st_size > 0:
                logger.warning(
                    "%s has no checkpoint yet: the run begins again, and replaces its records.",
                    self.folder.parent,
                )
            return None
        path = self.folder / f"step_{steps[-1]}"
        return path, open_checkpoint(path)

    def _prune(self, metric_name: str | None) -> None:
        """Keep the last and the best ones; without a value of ``metric_name`` one is the worst."""
        steps = self.steps()
        keep = set(steps[-self._config.keep_last :])
        # Of equal ones the latest is best.
        keep.add(max(steps, key=lambda step: (self._metric(step, metric_name), step)))
        for step in set(steps) - keep:
            _remove(self.folder / f"step_{step}")

    def _metric(self, step: int, name: str | None) -> float:
        try:
            state = read_state(self.folder / f"step_{step}")
        except UserError as error:  # one that was damaged since must not end the run
            logger.warning("%s It counts as one without a metric.", error)
            return -math.inf
        metric, same = state.metric, state.metric_name in (None, name)
        return -math.inf if metric is None or math.isnan(metric) or not same else metric


def _remove(path: Path) -> None:
    """Rename first: a name ``step_<n>`` is complete even if the removal is cut short."""
    if path.exists():
        doomed = path.with_name(f"deleting_{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def read_state(path: Path) -> DriverState:
    refuse_special(f"Checkpoint {path}", path, depth=1)
    try:
        return DriverState(**json.loads((path / "driver.json").read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:  # TypeError: no object
        raise UserError(
            f"Checkpoint {path} is not one of this version: driver.json: {reason_of(error)}. "
            f"{remedy_for(path)}"
        ) from error


def reason_of(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return ", ".join(
        f"{one['loc'][0] if one['loc'] else 'it'} is "
        f"{'missing' if 'missing' in one['type'] else str(one['input'])[:100]}"
        for one in error.errors()[:3]
    )


def _checksums(folder: Path) -> dict[str, list[int]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): [path.stat().st_size, crc_of(path)] for path in files}


def remedy_for(path: Path) -> str:
    return f"Remove {path} to continue from an earlier checkpoint, or restore the file."


def crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _sync(path: Path) -> None:
    """A rename must not reach the disk before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Loader(Protocol):
    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""


class Model(Protocol):
    """What trains: its state can be saved."""

    weight_version: int

    def save(self, folder: str) -> None:
        """Write all of it into ``folder``."""

    def load(self, folder: str, weight_version: int) -> None:
        """Restore what ``save`` wrote after ``weight_version`` steps."""


def watched_metric(config: RunConfig, name: str | None = None) -> tuple[str, int]:
    """``name`` or the metric of the best checkpoint, and the sign that makes larger better."""
    usual = "validation/reward" if config.samples else "validation/loss"
    name = name or config.checkpoint.metric or usual
    return name, -1 if name.endswith("loss") else 1


class Saves:
    def __init__(self, config: RunConfig, run_dir: Path, began: float) -> None:
        """``began``: start of the first interval, by the monotonic clock."""
        self.checkpoints = Checkpoints(run_dir, config.checkpoint)
        self._config = config.checkpoint
        self._metric, self._sign = watched_metric(config)
        self._saved_at = began

    def is_due(self, step: int) -> bool:
        every_steps, every_s = self._config.every_steps, self._config.every_minutes * 60
        too_long = every_s > 0 and time.monotonic() - self._saved_at >= every_s
        return too_long or (every_steps > 0 and step % every_steps == 0)

    def save(
        self,
        step: int,
        models: Mapping[str, Model],
        loader: Loader,
        numbers: Mapping[str, float],
        totals: dict[str, float],
        unlogged: dict[str, float] | None,
    ) -> None:
        """Write a checkpoint of ``step``, which measured ``numbers``; see ``DriverState``."""
        metric = numbers.get(self._metric)
        if metric is None and unlogged is None and self._config.metric is not None:
            measured = ", ".join(sorted(numbers))
            logger.warning("checkpoint.metric=%s is not measured, only %s.", self._metric, measured)
        if metric is not None:
            metric *= self._sign
        state = DriverState(
            step=step,
            loader=loader.state(),
            metric=metric,
            totals=totals,
            weight_versions={name: model.weight_version for name, model in models.items()},
            metric_name=f"{'-' if self._sign < 0 else ''}{self._metric}",
            unlogged=unlogged,
        )

        def write(folder: Path) -> None:
            for name, model in models.items():
                model.save(str(folder / name))

        path = self.checkpoints.save(state, write)
        self._saved_at = time.monotonic()
        logger.info("Saved %s", path)
