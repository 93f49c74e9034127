"""All trajectories of a run as Parquet files, with one row per training row.

Each worker writes one file per call, or a few a second if calls end faster, and merges small files
from time to time, in a thread. A file is written under another name and then renamed, so a file
under its own name is complete, even after a kill.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nemo_like.errors import RunError

logger = logging.getLogger(__name__)

SCHEMA = pa.schema(
    {
        "step": pa.int32(),
        "phase": pa.string(),
        "group": pa.int64(),
        "index": pa.int32(),
        "row": pa.int32(),  # within the trajectory; the next columns describe the trajectory
        "reward": pa.float64(),  # null if it failed
        "metrics": pa.map_(pa.string(), pa.float64()),
        "error": pa.string(),
        "end": pa.string(),
        "turns": pa.int32(),
        "num_tokens": pa.int32(),  # sampled
        "weight_version": pa.int32(),
        "prompt": pa.string(),  # last message; this and the next two only in the first row
        "text": pa.string(),  # the last completion
        "messages": pa.string(),  # JSON: the prompt's; with several turns, all of them
        "input_ids": pa.list_(pa.int32()),  # this and the next columns describe the row
        "loss_mask": pa.list_(pa.bool_()),
        "generation_logprobs": pa.list_(pa.float32()),
        "weight_versions": pa.list_(pa.int32()),  # -1: not sampled
    }
)
_REPETITIVE = [
    *("step", "phase", "end", "error", "prompt", "messages", "weight_version"),
    *("metrics.key_value.key", "metrics.key_value.value"),
    *("input_ids.list.element", "weight_versions.list.element"),
]
_WRITING: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": _REPETITIVE,  # for other columns it costs time and space
    "use_byte_stream_split": ["generation_logprobs.list.element"],
}
VOCABULARY = "_tokenizer.json"
"""File for turning ids into text; Parquet readers skip names with a leading underscore."""
_NAME = re.compile(r"\d+(-\d+){3}")
"""Step, worker, first and last part; see ``span_of``."""
_BETWEEN_FILES_S = 0.2
"""A file of 8 rows costs as much as one of 256."""
_PARTS_TOGETHER = 32
_BYTES_TOGETHER = 64 << 20
_TOKENS_TOGETHER = 1 << 20
"""Tokens per row group."""


def files_of(folder: Path) -> list[Path]:
    """Files to read, in order, without small files already merged into a larger one."""
    found = sorted(_files_of_workers(folder))
    spans = [span_of(path) for path in found]
    held = {
        (rank, part)
        for rank, first, last in spans
        if first < last
        for part in range(first, last + 1)
    }
    return [
        path
        for path, (rank, first, last) in zip(found, spans, strict=True)
        if first < last or (rank, first) not in held
    ]


def _files_of_workers(folder: Path) -> Iterator[Path]:
    """Leaves out other files in the folder: they are the user's."""
    return (path for path in folder.glob("*.parquet") if _NAME.fullmatch(path.stem))


def span_of(path: Path) -> tuple[int, int, int]:
    """Rank of the worker, and first and last part in the file."""
    _, rank, first, last = map(int, path.stem.split("-"))
    return rank, first, last


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run continues, and so which trajectories are not sampled again."""

    step: int
    """Last step; -1: a new run."""
    validated: int
    """Last step whose validation is finished."""
    first_open: int
    """Groups before this one have all been used, whichever step they were planned for."""
    used: tuple[int, ...] = ()
    """Later ones that have been used, too."""

    def kept(self) -> pc.Expression:
        """Rows to keep."""
        group, train = pc.field("group"), pc.field("phase") == "train"
        used = (group < self.first_open) | group.isin(pa.array(self.used, pa.int64()))
        return (train & used) | (~train & (pc.field("step") <= self.validated))


class TrajectoryFiles:
    """Writes the files of one worker."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        limit_bytes: float,
        as_table: Callable[[Sequence[Any]], pa.Table] = pa.concat_tables,
    ) -> None:
        """``limit_bytes``: size of this worker's files beyond which the oldest are dropped.

        ``as_table`` makes one table of what several calls of ``append`` got.
        """
        self._folder = folder
        self._rank = rank
        self._limit = limit_bytes
        self._as_table = as_table
        self._together = min(_BYTES_TOGETHER, limit_bytes / 8)
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = ThreadPoolExecutor(1)
        self._waiting: SimpleQueue[Any] = SimpleQueue()
        self._writes: deque[Future[None]] = deque()
        self._at_once = threading.Event()
        self._next_file = 0.0
        self._sizes: dict[Path, int] = {}
        """Sizes of this worker's files, oldest first."""
        self._next_part = 0

    def append(self, rows: Any) -> None:
        """Start writing the rows of one call, a part for ``as_table``.

        Raises RunError if an earlier write failed.
        """
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()
        self._waiting.put(rows)
        self._writes.append(self._thread.submit(self._append))

    def wait(self) -> None:
        """Wait until everything is written; raises as ``append``."""
        self._at_once.set()
        while self._writes:
            self._writes.popleft().result()
        self._at_once.clear()

    def _append(self) -> None:
        """Write what waits, unless an earlier call has."""
        if self._waiting.empty():
            return
        self._at_once.wait(max(0.0, self._next_file - time.monotonic()))
        self._next_file = time.monotonic() + _BETWEEN_FILES_S
        parts = [self._waiting.get() for _ in range(self._waiting.qsize())]
        try:
            if not self._sizes:
                self._take_stock()
            self._write(self._next_part, self._next_part, self._as_table(parts))
            self._next_part += 1
            self._put_together()
            self._drop_oldest()
        except OSError as error:
            raise RunError(
                f"cannot write {self._folder}: {error}; free space or set "
                "logging.trajectories_gib=0, then continue with run.resume=true"
            ) from error

    def _take_stock(self) -> None:
        """Find the files that an earlier process of the run left."""
        # By parts: with lag, groups of a later step may be done before those of an earlier one.
        for path in sorted(files_of(self._folder), key=span_of):
            rank, _, last = span_of(path)
            if rank == self._rank:
                self._sizes[path] = path.stat().st_size
                self._next_part = last + 1

    def truncate_after(self, at: "Resumed") -> None:
        """Drop rows that the resumed run writes again, of all workers."""
        for path in self._folder.glob("*.tmp"):
            path.unlink()
        kept = files_of(self._folder)
        for path in {*_files_of_workers(self._folder)} - {*kept}:
            path.unlink()
        for path in kept:
            try:
                rows = pq.ParquetFile(path).read(["step", "phase", "group"])
            except pa.ArrowInvalid as error:  # after a power loss
                logger.warning("%s cannot be read and is dropped: %s", path, error)
                path.unlink()
                continue
            count = len(rows.filter(at.kept()))
            if count == 0:
                path.unlink()
            elif count < len(rows):
                _replace(path, pq.ParquetFile(path).read().filter(at.kept()))

    def _write(self, first: int, last: int, table: pa.Table) -> None:
        step = table["step"][0].as_py()
        path = self._folder / f"{step:08d}-{self._rank:04d}-{first:07d}-{last:07d}.parquet"
        _replace(path, table)
        self._sizes[path] = path.stat().st_size

    def _put_together(self) -> None:
        small = [path for path in self._sizes if len({*span_of(path)[1:]}) == 1]
        size = sum(self._sizes[path] for path in small)
        if len(small) < 2 or (len(small) < _PARTS_TOGETHER and size < self._together):
            return
        tables = [pq.ParquetFile(path).read() for path in small]
        self._write(span_of(small[0])[1], span_of(small[-1])[2], pa.concat_tables(tables))
        for path in small:
            path.unlink()
            del self._sizes[path]

    def _drop_oldest(self) -> None:
        for path in [*self._sizes][:-1]:
            if sum(self._sizes.values()) <= self._limit:
                return
            path.unlink()
            del self._sizes[path]


def _replace(path: Path, table: pa.Table) -> None:
    """Write ``path`` in row groups large enough to be few, small enough to read at once."""
    aside = path.with_name(f"_{path.stem}.tmp")  # readers of the folder skip it
    tokens = sum(len(chunk.flatten()) for chunk in table["input_ids"].chunks) or 1
    with pq.ParquetWriter(aside, SCHEMA, **_WRITING) as writer:
        writer.write_table(table, row_group_size=max(1, len(table) * _TOKENS_TOGETHER // tokens))
    aside.replace(path)
