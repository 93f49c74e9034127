"""Files of one JSON object a line that survive a kill and can be cut back for a resume."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from nemo_like.errors import RunError

logger = logging.getLogger(__name__)


class JsonlFile:
    """Records with a ``step``, each on disk (in the kernel's hands) when ``append`` returns.

    NaN and infinity are written as Python's ``json`` and pandas read them: ``NaN``, ``Infinity``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

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

    def truncate_after(self, step: int) -> None:
        """Drop records of later steps, which the resumed run writes again, and unreadable lines.

        The kept lines are written aside and renamed over the file, so a kill loses nothing.
        """
        self._file.close()
        aside = self.path.with_name(self.path.name + ".tmp")
        with aside.open("wb") as kept:
            kept.writelines(self._lines_until(step))
            kept.flush()
            os.fsync(kept.fileno())
        aside.replace(self.path)
        self._file = self._open()

    def close(self) -> None:
        """Release the file; nothing is left to flush."""
        self._file.close()

    def _open(self) -> FileIO:
        # Unbuffered: no record waits in this process for a flush that a kill would prevent.
        return self.path.open("ab", buffering=0)

    def _lines_until(self, step: int) -> Iterator[bytes]:
        num_unreadable = 0
        with self.path.open("rb") as lines:
            for line in lines:
                step_of_line = _step_of(line)
                if step_of_line is None:
                    num_unreadable += 1
                elif step_of_line <= step:
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
