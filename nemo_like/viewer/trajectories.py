"""Search a run's trajectories by columns held in memory; read texts and tokens on demand."""

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nemo_like.observe.trajectory_files import VOCABULARY, files_of

logger = logging.getLogger(__name__)

NUMBERS = ("step", "group", "index", "reward", "num_tokens", "turns", "weight_version")
WORDS = ("phase", "end")
IDENTITY = ("phase", "step", "group", "index")
_TEXTS = ("prompt", "text", "messages", "error")
_REPEATED = ["prompt", "messages", "error"]
_MOST_SEARCH_S = 5.0
_MOST_READS = 3
"""Tries per request, since the run may merge files meanwhile."""

Stamp = tuple[Path, int, int]
"""A file, with values that change when a resumed run cuts it back."""
Index = tuple[dict[str, np.ndarray], np.ndarray, list[bool]]
"""Index of a file: columns and row group of each trajectory, and groups that continue."""


class Trajectories:
    """The files in one run's folder, which may grow; use it from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.columns: dict[str, np.ndarray] = {}
        """Columns with an entry per trajectory; ``place`` says where it is, in rising order."""
        self.words: dict[str, list[str]] = {name: [] for name in WORDS}
        """The texts that codes in these columns stand for."""
        self._places: list[tuple[Stamp, int, bool]] = []
        """File and row group, and whether the last trajectory continues in the next group."""
        self._files: dict[Stamp, Index | None] = {}
        self._open: tuple[Stamp, pq.ParquetFile] | None = None
        self._tokenizer: Any = None

    def refresh(self) -> None:
        """Read the index columns of files that are new."""
        for _ in range(_MOST_READS):
            with contextlib.suppress(FileNotFoundError):  # merged with others meanwhile
                stamps = [_stamp(path) for path in files_of(self.folder)]
                if stamps == [*self._files] and self.columns:
                    return
                self._files = {
                    one: self._files[one] if one in self._files else self._readable(one)
                    for one in stamps
                }
                self._join()
                return

    def _readable(self, stamp: Stamp) -> Index | None:
        """``_index_of``; None for a damaged file, as a power loss or a full disk leaves it."""
        try:
            return self._index_of(stamp)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, KeyError) as error:
            logger.warning("%s cannot be read and is left out: %s", stamp[0], error)
            return None

    def _index_of(self, stamp: Stamp) -> Index:
        with pq.ParquetFile(stamp[0], read_dictionary=WORDS) as file:
            table = file.read([*NUMBERS, *WORDS, "row"])
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        first = table["row"].to_numpy() == 0
        columns = {name: table[name].to_numpy()[first] for name in NUMBERS}
        for name in WORDS:
            codes = table[name].unify_dictionaries().combine_chunks()
            known, values = self.words[name], codes.dictionary.to_pylist()
            known += [one for one in values if one not in known]
            renamed = np.array([known.index(one) for one in values], dtype=np.int16)
            columns[name] = renamed[codes.indices.to_numpy()][first]
        # Rows of one trajectory may continue in the next row group.
        begins = np.cumsum([0, *sizes[:-1]])
        goes_on = [*(~first[begins[1:]]).tolist(), False]
        return columns, np.repeat(np.arange(len(sizes)), sizes)[first], goes_on

    def _join(self) -> None:
        self._places, placed = [], []
        readable = {stamp: index for stamp, index in self._files.items() if index is not None}
        for stamp, (_, groups, goes_on) in readable.items():
            placed.append(groups + len(self._places))
            self._places += [(stamp, i, more) for i, more in enumerate(goes_on)]
        parts = [columns for columns, *_ in readable.values()]
        self.columns = {
            name: np.concatenate([np.empty(0, dtype=np.int32), *(one[name] for one in parts)])
            for name in (*NUMBERS, *WORDS)
        }
        self.columns["place"] = np.concatenate([np.empty(0, dtype=np.int64), *placed])

    def chosen(self, asked: Mapping[str, str]) -> np.ndarray:
        """Positions of trajectories within limits such as ``reward_min=0.5`` or ``end=length``."""
        columns = self.columns
        keep = np.ones(len(columns.get("step", ())), dtype=bool)
        for name, text in asked.items():
            column, _, kind = name.rpartition("_")
            if not text:
                continue
            if name in WORDS:
                known = self.words[name]
                keep &= columns[name] == (known.index(text) if text in known else -1)
            elif name == "failed":
                keep &= np.isnan(columns["reward"])
            elif column in NUMBERS and kind == "min":
                keep &= columns[column] >= float(text)
            elif column in NUMBERS and kind == "max":
                keep &= columns[column] <= float(text)
        return keep.nonzero()[0]

    def search(
        self, found: np.ndarray, most: int, *, text: str = "", prompt: str = "", last: bool = False
    ) -> tuple[np.ndarray, bool]:
        """The first ``most`` of rising positions that contain ``text``, or have a prompt.

        Also whether there are no others: a slow search returns what it has so far. ``last``: the
        last ones.
        """
        hits: list[int] = []
        complete = True
        until = time.monotonic() + _MOST_SEARCH_S
        places = np.unique(self.columns["place"][found]).tolist()
        for number in reversed(places) if last else places:
            if len(hits) > most or time.monotonic() > until:
                complete = False
                break
            table = self._table(number, [*_TEXTS, "row"])
            says = np.ones(len(table), dtype=bool)
            if prompt:
                says &= _each(table["prompt"], prompt, whole=True)
            if text:
                says &= np.logical_or.reduce([_each(table[name], text) for name in _TEXTS])
            says = says[table["row"].to_numpy() == 0]
            begin = int(np.searchsorted(self.columns["place"], number))
            first, end = np.searchsorted(found, [begin, begin + len(says)])
            asked = found[first:end]
            hits += asked[says[asked - begin]].tolist()
        hits.sort()
        within = hits[-most:] if last else hits[:most]
        return np.array(within, dtype=np.int64), complete and len(hits) <= most

    def rows(self, positions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Index columns of some trajectories."""
        for i in positions.tolist():
            row: dict[str, Any] = {name: self.columns[name][i].item() for name in NUMBERS}
            row |= {name: self.words[name][self.columns[name][i]] for name in WORDS}
            yield row | {"reward": finite(row["reward"])}

    def read(self, positions: np.ndarray) -> list[dict[str, Any]]:
        """All stored columns of some trajectories, with the text of each token."""
        found = []
        for number in dict.fromkeys(self.columns["place"][positions].tolist()):
            tables = [self._table(number)]
            while self._places[number + len(tables) - 1][2]:
                tables.append(self._table(number + len(tables)))
            table = pa.concat_tables(tables)
            of_place = positions[self.columns["place"][positions] == number]
            for row in self.rows(of_place):
                same = [table[name].to_numpy() == row[name] for name in IDENTITY]
                found.append(self._whole(table.filter(np.logical_and.reduce(same)).to_pylist()))
        return found

    def _whole(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        first = min(rows, key=lambda one: one["row"])
        tokens = ("input_ids", "loss_mask", "generation_logprobs", "weight_versions")
        rest = {name: value for name, value in first.items() if name not in (*tokens, "row")}
        rest["messages"] = json.loads(first["messages"] or "[]")
        rest["metrics"] = [[name, finite(value)] for name, value in first["metrics"]]
        rest["rows"] = [
            {
                "texts": self._pieces(one["input_ids"]),
                "ids": one["input_ids"],
                "mask": [int(bit) for bit in one["loss_mask"]],
                "logprobs": [finite(value) for value in one["generation_logprobs"]],
                "versions": one["weight_versions"],
            }
            for one in sorted(rows, key=lambda one: one["row"])
        ]
        return rest

    def _pieces(self, ids: list[int]) -> list[str]:
        """The text that each token adds; a split character appears at its last token."""
        if self._tokenizer is None:
            if not (self.folder / VOCABULARY).exists():
                return [f"{one} " for one in ids]
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self.folder / VOCABULARY))
        from tokenizers.decoders import DecodeStream

        stream, pieces = DecodeStream(skip_special_tokens=False), []
        for one in ids:
            try:
                pieces.append(stream.step(self._tokenizer, one) or "")
            except Exception:  # its only one; those before are bytes that make no character
                pieces[-1:] = [each or "\N{REPLACEMENT CHARACTER}" for each in pieces[-1:]]
                pieces.append(self._tokenizer.decode([one], skip_special_tokens=False))
                stream = DecodeStream(skip_special_tokens=False)
        return pieces

    def _table(self, number: int, columns: list[str] | None = None) -> pa.Table:
        stamp, row_group, _ = self._places[number]
        if self._open is None or self._open[0] != stamp:
            self._open = stamp, pq.ParquetFile(stamp[0], read_dictionary=_REPEATED)
        return self._open[1].read_row_group(row_group, columns, use_threads=False)


def _stamp(path: Path) -> Stamp:
    about = path.stat()
    return path, about.st_ino, about.st_mtime_ns


def _each(column: pa.ChunkedArray, text: str, *, whole: bool = False) -> np.ndarray:
    """Which rows contain a text, or equal it; repeated values are checked once."""
    rows = column.combine_chunks()
    coded = isinstance(rows, pa.DictionaryArray)
    texts = rows.dictionary if coded else rows
    if whole:
        hits = pc.call_function("equal", [texts, text])
    else:
        options = pc.MatchSubstringOptions(text, ignore_case=True)
        hits = pc.call_function("match_substring", [texts], options)
    known = hits.fill_null(False).to_numpy(zero_copy_only=False)
    if not coded:
        return known
    return np.append(known, False)[rows.indices.fill_null(len(known)).to_numpy()]


def finite(value: Any) -> Any:
    """None for NaN and infinity, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
