"""Rows of tables: CSV, Parquet, and data sets of the package ``datasets``.

A table has one type for each column, so that a row gets entries that it never had. They are taken
out again, and the same rows come out as from JSON.
"""

import csv
import io
import logging
import math
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from nemo_like.config.sources import DataSet
from nemo_like.data.json_rows import opened
from nemo_like.errors import UserError

_NO_NETWORK = re.compile("LocalEntryNotFound|ConnectionError|OfflineMode|Max retries|resolve host")

Located = tuple[str, dict[str, Any]]


def read_csv(path: Path, key: str) -> Iterator[Located]:
    """Rows of a file with a header; every cell stays the text that it is.

    Raises UserError, with the line, for a row that does not fit the header.
    """
    csv.field_size_limit(sys.maxsize)
    separator = "\t" if path.name.removesuffix(".gz").endswith(".tsv") else ","
    with opened(path, key) as file:
        text = io.TextIOWrapper(cast(Any, file), "utf-8-sig", newline="")
        lines = csv.reader(text, delimiter=separator, strict=True)
        try:
            header = next(lines, [])
            if len(set(header)) < len(header):
                raise UserError(f"{key}={path}: the header names a column twice; rename one.")
            for row in lines:
                if len(row) not in (0, len(header)):
                    raise UserError(
                        f"{key}={path}, line {lines.line_num}: {len(row)} cells, and the header "
                        f"has {len(header)}; put cells with a separator in quotes."
                    )
                if row:
                    yield f"line {lines.line_num}", dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise UserError(f"{key}={path}, line {lines.line_num}: {error}.") from error
        except UnicodeDecodeError as error:
            line = _line_not_in_utf8(path, key)
            raise UserError(f"{key}={path}, line {line} is not UTF-8: {error}.") from error


def _line_not_in_utf8(path: Path, key: str) -> int:
    """The first; text is decoded in parts of many lines."""
    with opened(path, key) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0


def read_parquet(path: Path, key: str) -> Iterator[Located]:
    """Rows of a Parquet file; raises UserError."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            rows = (row for part in file.iter_batches(1024) for row in part.to_pylist())
            yield from _plain_rows(rows, f"{key}={path}")
    except (ArrowException, OSError) as error:
        raise UserError(f"{key}={path} cannot be read as Parquet: {_first_line(error)}") from error


def read_data_set(found: DataSet, key: str, source: str) -> Iterator[Located]:
    """Rows of a folder of ``save_to_disk``, or of the hub or its cache; raises UserError."""
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each of its retries
    try:
        if found.on_disk:
            rows = datasets.load_from_disk(found.name)
        else:
            name, _, config = found.name.partition(":")
            rows = datasets.load_dataset(name, config or None, split=found.split)
    except Exception as error:  # of network, cache, data set or its configuration
        raise UserError(f"{key}={source}: {_why_not(error, found)}.") from error
    yield from _plain_rows(rows, f"{key}={source}")


def _why_not(error: Exception, found: DataSet) -> str:
    """The package names a folder here first, also where a network is what is missing."""
    if found.on_disk or not _NO_NETWORK.search(f"{type(error).__name__} {error}"):
        return _first_line(error)
    name = found.name.partition(":")[0]
    return (
        "no network reaches the hub, and the data set is not in the cache of this machine; run `hf "
        f"download {name} --repo-type dataset --local-dir FOLDER` where there is a network, copy "
        "the folder here, and give its files"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _plain_rows(rows: Iterable[Any], where: str) -> Iterator[Located]:
    for number, row in enumerate(rows, start=1):
        try:
            record = {name: _plain(value) for name, value in row.items()}
        except TypeError as error:
            raise UserError(f"{where}, row {number}: {error}; take that column out.") from error
        yield f"row {number}", record


def _plain(value: Any) -> Any:
    """What JSON would have had: no nulls in objects (which other rows have), no dates, no NaN.

    >>> _plain({"type": "object", "x": None, "y": [{"z": None}]})
    {'type': 'object', 'y': [{}]}
    """
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        if value and all(isinstance(one, tuple) and len(one) == 2 for one in value):
            return {str(name): _plain(one) for name, one in value}  # a column of maps
        return [_plain(one) for one in value]
    if isinstance(value, datetime):
        is_day = value.time() == time() and value.tzinfo is None
        return str(value.date() if is_day else value)  # a day that was read as a time
    if isinstance(value, date | time | Decimal):
        return str(value)
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"a value is {type(value).__name__}, which JSON cannot hold")
