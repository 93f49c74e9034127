"""How many bytes pass through the driver: the promise that it stays light, as a metric."""

import io
import pickle
from typing import Any

from ray import ObjectRef


class PayloadMeter:
    """Counts the pickled size of what the driver sends to workers and gets back."""

    def __init__(self) -> None:
        self._bytes = 0

    def count(self, *values: Any) -> None:
        """Add the size of ``values``; an object reference counts as its 28-byte id."""
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump(values)
        self._bytes += buffer.tell()

    def pop(self) -> int:
        """Bytes since the last pop."""
        counted, self._bytes = self._bytes, 0
        return counted


class _Pickler(pickle.Pickler):
    """Names references instead of pickling them, which would pin their objects for ever."""

    def persistent_id(self, obj: Any) -> bytes | None:
        return obj.binary() if isinstance(obj, ObjectRef) else None
