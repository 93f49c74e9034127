"""What a pool and its reward processes write to each other: plain data, checked before it is used.

A frame is four bytes of length and that many bytes of JSON. Reward functions run in the process at
one end, so whatever arrives at the other may be theirs: it is parsed as JSON, compared with a fixed
schema, and never run.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NoReturn

from nemo_like.rewards.protocol import MOST, RewardResult, RewardRow, failed

MOST_BYTES = (1 << 32) - 1
"""Of any frame, by its length."""
MOST_ROW_BYTES = 1 << 28
MOST_RESULT_BYTES = 1 << 20

_LENGTH = struct.Struct(">I")
_RESULT_KEYS = {"id", *(one.name for one in fields(RewardResult))}


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
    """``payload`` behind its length."""
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
    """Inverse of ``rows_frame``, in the reward process."""
    return [RewardRow(**row) for row in json.loads(payload)]


def result_frame(row_id: str, result: RewardResult) -> bytes:
    """One row's result; a result too large for a frame becomes a failed one."""
    payload = json.dumps({"id": row_id, **asdict(result)}, allow_nan=False).encode()
    if len(payload) > MOST_RESULT_BYTES:
        why = f"returned {len(payload)} bytes, and {MOST_RESULT_BYTES} is the most"
        return result_frame(row_id, failed(why, spent=result.spent))
    return frame(payload)


def read_result(payload: bytes) -> tuple[str, RewardResult]:
    """The row's id and its result; FrameError for everything else."""
    said = _parse(payload)
    if said.keys() != _RESULT_KEYS:
        raise FrameError("a frame that is not a result")
    reward, error = _optional_number(said["reward"]), _optional_text(said["error"])
    if (reward is None) == (error is None):
        raise FrameError("a result with both reward and error, or with neither")
    result = RewardResult(
        reward=reward,
        metrics={_text(name): _number(value) for name, value in _dict(said["metrics"]).items()},
        error=error,
        answer=_optional_text(said["answer"]),
        dropped={_text(name): _text(why) for name, why in _dict(said["dropped"]).items()},
        spent=_optional_text(said["spent"]),
    )
    return _text(said["id"]), result


def first_word_frame(refused: str | None, *, is_concurrent: bool = False) -> bytes:
    """Goes out before any result: why a process cannot use its reward, if it can't.

    ``is_concurrent``: rows are scored while others still are, by an ``async def``.
    """
    return frame(json.dumps({"refused": refused, "is_concurrent": is_concurrent}).encode())


def read_first_word(payload: bytes) -> tuple[str | None, bool]:
    """Inverse of ``first_word_frame``; FrameError for everything else."""
    said = _parse(payload)
    if said.keys() != {"refused", "is_concurrent"}:
        raise FrameError("a frame that is not a first word")
    if not isinstance(said["is_concurrent"], bool):
        raise FrameError("a first word of another type")
    return _optional_text(said["refused"]), said["is_concurrent"]


def _parse(payload: bytes) -> Mapping[str, Any]:
    try:
        return _dict(json.loads(payload.decode(), parse_constant=_refuse_constant))
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame that is not JSON") from error


def _refuse_constant(name: str) -> NoReturn:
    raise FrameError(f"a number that is {name}")


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FrameError("a value that is not an object")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= MOST:
        raise FrameError("a value that is not a finite number")
    return float(value)


def _optional_number(value: Any) -> float | None:
    return None if value is None else _number(value)


def _text(value: Any) -> str:
    """As text that can be written to any file: JSON may hold halves of surrogate pairs."""
    if not isinstance(value, str):
        raise FrameError("a value that is not text")
    return value.encode("utf-8", "backslashreplace").decode()


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


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
