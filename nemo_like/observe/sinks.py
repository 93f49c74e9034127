"""Where the numbers of a step go: always ``metrics.jsonl``, then TensorBoard and others."""

import json
import logging
import os
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from nemo_like.errors import RunError, UserError

logger = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Takes the numbers of one step at a time, in rising order of steps."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record all numbers of ``step``; there is no second call for the same step."""

    def close(self) -> None:
        """Write out what is left; called once. After a failure ``fail``, if the sink has it."""


@dataclass(frozen=True, kw_only=True)
class Details:
    """Histograms and samples of a step, besides its metrics.

    A sink with ``log_details(step, details)`` gets them before the step's metrics.
    """

    histograms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    """Completions of the validation: ``prompt``, ``completion``, ``reward``."""


class TensorBoardSink:
    """Event files in ``<run_dir>/tensorboard``."""

    def __init__(self, run_dir: Path, config: object, last_step: int | None) -> None:
        """Hides what an earlier process logged after ``last_step``. None: all of it."""
        try:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, seldom missing
        except ImportError as error:
            raise UserError(
                f"logging.sinks=[tensorboard] needs the package tensorboard ({error}); "
                "pip install tensorboard, or set logging.sinks=[]"
            ) from error
        purge_step = 0 if last_step is None else last_step + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add one scalar for each number and flush, to keep the browser current."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_details(self, step: int, details: Details) -> None:
        """Histograms, and samples as verbatim text."""
        import numpy as np

        for name, found in details.histograms.items():
            self._writer.add_histogram(name, np.array(found), step)
        for number, sample in enumerate(details.samples):
            text = f"{sample['prompt']}\n\n{sample['completion']}\n\nreward {sample['reward']}"
            self._writer.add_text(f"sample {number}", textwrap.indent(text, "    "), step)

    def close(self) -> None:
        self._writer.close()


class Sinks:
    """Logs to all sinks, each step exactly once and in rising order.

    One call holds everything that is known of a step. Measurements taken in between (a memory
    monitor, a validation) are merged into the step's metrics, never logged under a counter of their
    own: trackers drop what arrives for a step that is older or already complete.
    """

    def __init__(self, sinks: Sequence[MetricSink], last_step: int | None = None) -> None:
        """``last_step``: the step that a resumed run continues from. None: a new run."""
        self._sinks = tuple(sinks)
        self._last_step = last_step
        self.num_failures: Counter[str] = Counter()
        """Calls that failed, by class name of the sink."""

    def log(self, step: int, values: dict[str, float], details: Details = Details()) -> None:
        """Record a step everywhere; only a sink's RunError (``JsonlFile``) ends the run."""
        assert self._last_step is None or step > self._last_step, (
            f"step {step} comes after step {self._last_step}, which is already logged"
        )
        self._last_step = step
        for sink in self._sinks:
            if details != Details() and (show := getattr(sink, "log_details", None)):
                self._guard(sink, partial(show, step, details))
            self._guard(sink, partial(sink.log, step, values))

    def close(self, *, failed: bool = False) -> None:
        """Close every sink, also if one fails, and say how much was lost.

        ``failed``: whether an error ends the run.
        """
        for sink in self._sinks:
            self._guard(sink, getattr(sink, "fail", sink.close) if failed else sink.close)
        for name, count in self.num_failures.items():
            logger.warning("%s failed %d times; metrics.jsonl is complete", name, count)

    def _guard(self, sink: MetricSink, call: Callable[[], None]) -> None:
        """The boundary at which a full disk or a tracker that is down stops being our problem."""
        name = type(sink).__name__
        try:
            call()
        except RunError:
            raise
        except Exception as error:
            self.num_failures[name] += 1
            if self.num_failures[name] == 1:
                logger.warning("%s failed and may miss steps; the run goes on: %r", name, error)


class JsonlFile:
    """Records with a ``step``, each on disk (in the kernel's hands) when ``append`` returns.

    NaN and infinity are written as Python's ``json`` and pandas read them: ``NaN``, ``Infinity``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append ``{"step": 3, "time": 1764201600.123, "train/loss": ...}``."""
        self.append({"step": step, "time": round(time.time(), 3), **values})

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; raises RunError if the file system refuses it."""
        # A lone surrogate (half of a character cut by a tokenizer) becomes its JSON escape.
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise RunError(
                f"cannot write {self.path}: {error.strerror}; make room or repair the file system, "
                "then continue with run.resume=true"
            ) from error

    def records(self) -> Iterator[dict[str, Any]]:
        """All records of the file; call ``truncate_after`` first, which drops torn lines."""
        with self.path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    def truncate_after(self, step: int) -> None:
        """Drop records of later steps and unreadable lines; a kill in between loses nothing."""
        self._file.close()
        aside = self.path.with_name(self.path.name + ".tmp")
        with aside.open("wb") as kept:
            kept.writelines(self._lines_until(step))
            kept.flush()
            os.fsync(kept.fileno())
        aside.replace(self.path)
        self._file = self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> FileIO:
        # Unbuffered: no record waits in this process for a flush that a kill would prevent.
        return self.path.open("ab", buffering=0)

    def _lines_until(self, step: int) -> Iterator[bytes]:
        num_unreadable = 0
        with self.path.open("rb") as lines:
            for line in lines:
                if (found := _step_of(line)) is None:
                    num_unreadable += 1
                elif found <= step:
                    yield line.rstrip(b"\n") + b"\n"
        if num_unreadable:
            logger.warning("%s: dropped %d torn lines", self.path, num_unreadable)


def _step_of(line: bytes) -> int | None:
    """Step of a record; None if the line is not a record, such as one that a crash cut off."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None
