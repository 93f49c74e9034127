"""When each process was in which phase, as a file of events that Chrome and Perfetto read.

Every process writes ``logs/<name>.trace.jsonl``; ``nemo-like report RUN --trace FILE`` joins them.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)

SUFFIX = ".trace.jsonl"


class PhaseTrace:
    """Appends an event for each phase that ended; phases side by side are on lanes of their own."""

    def __init__(self, log_dir: Path, name: str) -> None:
        """``name`` of the process, as of its log."""
        self._file: TextIO | None = None
        self._lanes = set[int]()
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            self._file = (log_dir / f"{name}{SUFFIX}").open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            logger.warning("Phases of %s are not recorded: %s", name, error)
        self._write(ph="M", name="process_name", args={"name": f"{name} on {os.uname().nodename}"})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block, also if it raises."""
        lane = next(i for i in range(len(self._lanes) + 1) if i not in self._lanes)
        self._lanes.add(lane)
        began, start = time.time(), time.monotonic()
        try:
            yield
        finally:
            self._lanes.discard(lane)
            self.add(name, began, time.monotonic() - start, lane)

    def add(self, name: str, began: float, seconds: float, lane: int = 0) -> None:
        """``began``: by ``time.time``."""
        microseconds = {"ts": round(began * 1e6), "dur": round(seconds * 1e6)}
        self._write(ph="X", name=name, tid=lane, **microseconds)

    def _write(self, **event: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(event) + "\n")
        except OSError as error:  # the run is worth more than its trace
            logger.warning("Phases are no longer recorded: %s", error)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
