"""Metrics of the driver's load: bytes that pass through it, and time spent waiting."""

import io
import pickle
from typing import Any

from ray import ObjectRef

from nemo_like.observe.metrics import Metric, Metrics, Reduce


class DriverMeter:
    """Counts pickled bytes to workers and back, and the seconds spent waiting for them."""

    def __init__(self) -> None:
        self._bytes = 0
        self._waited_s = 0.0

    def count(self, *values: Any) -> None:
        """Add the size of ``values``; an object reference counts as its 28-byte id."""
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump(values)
        self._bytes += buffer.tell()

    def waited(self, seconds: float) -> None:
        """Add time in which the driver had nothing to do."""
        self._waited_s += seconds

    def pop(self) -> Metrics:
        """``driver/bytes`` and ``time/waiting_s`` since the last pop."""
        num_bytes, waited_s = self._bytes, self._waited_s
        self._bytes, self._waited_s = 0, 0.0
        return {
            "driver/bytes": Metric(num_bytes, reduce=Reduce.sum),
            "time/waiting_s": Metric(waited_s, reduce=Reduce.sum),
        }


class _Pickler(pickle.Pickler):
    """Names references instead of pickling them, which would pin their objects for ever."""

    def persistent_id(self, obj: Any) -> bytes | None:
        return obj.binary() if isinstance(obj, ObjectRef) else None
