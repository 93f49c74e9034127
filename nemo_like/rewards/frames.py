"""What a pool and its reward processes write to each other: plain data, checked before it is used.

A frame is four bytes of length and that many bytes of JSON. Reward functions run in the process at
one end, so whatever arrives at the other may be theirs: it is parsed as JSON, compared with a fixed
schema, and never run.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from nemo_like.rewards.protocol import MOST, RewardResult, RewardRow, failed

MOST_BYTES = (1 << 32) - 1
"""Of any frame, by its length."""
MOST_ROW_BYTES = 1 << 28
MOST_RESULT_BYTES = 1 << 20

_LENGTH = struct.Struct(">I")
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_Number = Annotated[float, Field(ge=-MOST, le=MOST)]
# As text that can be written to any file: JSON may hold halves of surrogate pairs.
_Text = Annotated[
    str,
    BeforeValidator(
        lambda it: it.encode("utf-8", "backslashreplace").decode() if isinstance(it, str) else it
    ),
]
T = TypeVar("T")


@dataclass(config=_STRICT, kw_only=True)
class _Result:
    id: _Text
    reward: _Number | None
    metrics: dict[_Text, _Number]
    error: _Text | None
    answer: _Text | None
    dropped: dict[_Text, _Text]
    steps: dict[_Text, _Number]
    spent: _Text | None


@dataclass(config=_STRICT, kw_only=True)
class _FirstWord:
    refused: _Text | None
    is_concurrent: bool
    is_batched: bool


class FrameError(Exception):
    """Bytes that are not a frame of this protocol; the message says what is wrong with them."""


class PlainDataError(Exception):
    """A row that JSON cannot carry as it is."""


class Frames:
    """Cuts a stream of bytes into the payloads of its frames."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()

    @property
    def has_part(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Payloads that ``data`` completes; FrameError for a frame larger than frames may be."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._most_bytes:
                raise FrameError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield payload


def frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def write_row(row: RewardRow) -> bytes:
    """One row as JSON; PlainDataError if JSON would not give it back as it is."""
    try:
        for name, value in row.fields.items():
            _require_plain(value, f"field {name!r}")
        payload = json.dumps(row._asdict()).encode()
    except (ValueError, RecursionError) as error:  # an integer too long, or nesting too deep
        raise PlainDataError(f"the row cannot be sent as JSON: {error}") from error
    if len(payload) > MOST_ROW_BYTES:
        raise PlainDataError(f"the row has {len(payload)} bytes, and {MOST_ROW_BYTES} is the most")
    return payload


def rows_frame(rows: Sequence[bytes]) -> bytes:
    """A frame of rows that ``write_row`` made."""
    return frame(b"[" + b",".join(rows) + b"]")


def read_rows(payload: bytes) -> list[RewardRow]:
    return [RewardRow(**row) for row in json.loads(payload)]


def result_frame(row_id: str, result: RewardResult) -> bytes:
    """One row's result; a result too large for a frame becomes a failed one."""
    payload = json.dumps({"id": row_id, **vars(result)}, allow_nan=False).encode()
    if len(payload) > MOST_RESULT_BYTES:
        why = f"returned {len(payload)} bytes, and {MOST_RESULT_BYTES} is the most"
        return result_frame(row_id, failed(why, spent=result.spent))
    return frame(payload)


def read_result(payload: bytes) -> tuple[str, RewardResult]:
    """The row's id and its result; FrameError for everything else."""
    said = _parse(payload, _Result, "a result")
    if (said.reward is None) == (said.error is None):
        raise FrameError("a result with both reward and error, or with neither")
    plain = dict(vars(said))
    return plain.pop("id"), RewardResult(**plain)


def first_word_frame(
    refused: str | None, *, is_concurrent: bool = False, is_batched: bool = False
) -> bytes:
    """Before any result: why the reward cannot be used, if so, and how it takes rows."""
    said = {"refused": refused, "is_concurrent": is_concurrent, "is_batched": is_batched}
    return frame(json.dumps(said).encode())


def read_first_word(payload: bytes) -> tuple[str | None, bool, bool]:
    """Inverse of ``first_word_frame``; FrameError for everything else."""
    said = _parse(payload, _FirstWord, "a first word")
    return said.refused, said.is_concurrent, said.is_batched


def _parse(payload: bytes, schema: type[T], what: str) -> T:
    try:
        said = json.loads(payload.decode())
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame that is not JSON") from error
    try:
        return schema(**said)
    except (ValueError, TypeError) as error:  # TypeError: it is no object
        raise FrameError(f"a frame that is not {what}") from error


def _require_plain(value: Any, where: str) -> None:
    """Refuse what JSON changes silently: tuples become lists, and keys become text."""
    kind = type(value)
    if kind is list:
        for item in value:
            _require_plain(item, where)
    elif kind is dict:
        for key, item in value.items():
            _require_plain(item, where)
            if type(key) is not str:
                raise PlainDataError(f"the row's {where} has a key that is not text: {key!r}")
    elif value is not None and kind not in (str, int, float, bool):
        raise PlainDataError(f"the row's {where} holds a {kind.__name__}, which is not plain data")
