"""Rows of a .jsonl file: what is not plain JSON is refused with its line."""

import codecs
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from nemo_like.errors import UserError

_OTHER_FORMATS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "Arrow",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""Names of what a file may be instead, by its first bytes."""
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def read(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row's line, for messages, and its entries; empty lines and a BOM are left out.

    Raises UserError naming ``key`` and the line of what is not a JSON object in UTF-8, and of what
    Python would read in silence as something else: a name given twice (the last would count), NaN,
    1e999 (infinity).
    """
    _refuse_other_formats(path, key)
    for number, line in enumerate(_lines(path), start=1):
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


def _refuse_other_formats(path: Path, key: str) -> None:
    with path.open("rb") as file:
        head = file.read(4096)
    for first_bytes, name in _OTHER_FORMATS.items():
        if head.startswith(first_bytes):
            raise UserError(
                f"{key}={path} is a file in {name} format, which is not supported; write it as "
                "plain .jsonl in UTF-8."
            )
    if head.lstrip().startswith(b"["):
        raise UserError(
            f"{key}={path} is a JSON list; write each of its objects on a line of its own (.jsonl)."
        )


def _lines(path: Path) -> Iterator[bytes]:
    """One at a time: a file may be larger than memory. ``file`` itself splits at \\n alone."""
    with path.open("rb") as file:
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
