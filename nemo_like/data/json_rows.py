"""Rows of files of JSON, plain or gzipped: what is not plain JSON is refused with its line."""

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NoReturn

from nemo_like.errors import UserError

_OTHER_FORMATS = {
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PK\x03\x04": "zip",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "Arrow",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""Names of what a file may be instead, by its first bytes."""
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def read(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row's line (its number in a JSON list), for messages, and its entries.

    Empty lines and a BOM are left out. Raises UserError naming ``key`` and the line of what is not
    a JSON object in UTF-8, and of what Python would read in silence as something else: a name given
    twice (the last would count), NaN, 1e999 (infinity).
    """
    with opened(path, key) as file:
        head = file.read(4096)
        _refuse_other_formats(head, path, key)
        file.seek(0)
        is_list = head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        yield from _listed(file, path, key) if is_list else _lined(file, path, key)


@contextmanager
def opened(path: Path, key: str) -> Iterator[BufferedIOBase]:
    """The content of a file, which may be gzipped."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{key}={path} is a broken gzip file ({error}); write it again.") from error


def _listed(file: BufferedIOBase, path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        records = _parse(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = getattr(error, "msg", str(error).partition(":")[0])
        raise UserError(f"{key}={path}{line}: not a JSON list ({reason}).") from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise UserError(f"{key}={path}, row {number}: a row must be a JSON object.")
        yield f"row {number}", record


def _lined(file: BufferedIOBase, path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        try:
            record = _parse(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{key}={path}, line {number}: not UTF-8 (byte {error.start + 1}); save the file "
                "as UTF-8."
            ) from error
        except RecursionError as error:
            raise UserError(f"{key}={path}, line {number}: nested too deep.") from error
        except ValueError as error:  # JSONDecodeError is one, and so is an integer too long
            reason = getattr(error, "msg", str(error).partition(":")[0])
            raise UserError(
                f"{key}={path}, line {number}: not JSON ({reason}); a row is one JSON "
                "object on one line."
            ) from error
        if not isinstance(record, dict):
            raise UserError(f"{key}={path}, line {number}: a row must be a JSON object.")
        yield f"line {number}", record


def _refuse_other_formats(head: bytes, path: Path, key: str) -> None:
    for first_bytes, name in _OTHER_FORMATS.items():
        if head.startswith(first_bytes):
            raise UserError(
                f"{key}={path} is a file in {name} format, which is not supported; write it as "
                ".jsonl in UTF-8 (plain or gzipped), or as Parquet."
            )


def _lines(file: BufferedIOBase) -> Iterator[bytes]:
    """One at a time: a file may be larger than memory. ``file`` itself splits at \\n alone."""
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    for part in file:
        yield from part.splitlines()


def _parse(text: str) -> Any:
    record = json.loads(
        text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_float
    )
    if _SURROGATE.search(text):
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("half of a surrogate pair, which is no character") from error
    return record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"'{twice}' is given twice")
    return record


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text} is too large")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number; write null")
