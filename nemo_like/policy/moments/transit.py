"""Host memory that a GPU copies at the bus's speed, and the way of moments there and back."""

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from nemo_like.errors import RunError
from nemo_like.planning.model_shape import GIB
from nemo_like.planning.parameters import NUM_SLOTS
from nemo_like.policy.moments.formats import Stored
from nemo_like.policy.moments.layout import Bucket

_TOUCHED_AT_ONCE = 64 << 20
_MOST_THREADS = 16

Work = Callable[[Bucket, Stored], None]
"""What is done with a bucket, given its moments on the device."""


class HostMemory:
    """Zeroed bytes in one mapping, page-locked for CUDA.

    Pages are made and locked in a thread, because that takes long (17 s for 61 GB on an idle
    machine) and a model loads meanwhile; ``wait`` before the first use.
    """

    def __init__(self, num_bytes: int, *, locked: bool) -> None:
        self._map = mmap.mmap(-1, max(num_bytes, 1))
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._error = 0
        self._thread: Thread | None = None
        if locked:
            self._thread = Thread(target=self._lock, daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until copies are fast; RunError if the system does not let us lock so much."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._error:
            raise RunError(
                f"{len(self.bytes) / GIB:.1f} GiB of host memory could not be locked for the GPU "
                f"(CUDA error {self._error}); raise the limit of locked memory (ulimit -l), or set "
                "policy.offload=none."
            )

    def _lock(self) -> None:
        # First all pages, by many threads: locking alone would make them one by one.
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(torch.Tensor.zero_, self.bytes.split(_TOUCHED_AT_ONCE)))
        runtime: Any = torch.cuda.cudart()
        address = self.bytes.data_ptr()
        self._error = int(runtime.cudaHostRegister(address, len(self.bytes), 0))
        if not self._error:
            # The mapping must not go first: its addresses may be given to another.
            weakref.finalize(self.bytes, runtime.cudaHostUnregister, address)


class Transit:
    """Slots on ``device`` that buckets take in turn.

    On a GPU copies run on two streams besides the step's own, one for each direction. The last ones
    may still run when ``run`` returns.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        self._slots = [_slot(buckets, device) for _ in range(min(NUM_SLOTS, len(buckets)))]
        self._streams = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._ready, self._used, self._free = (
                [torch.cuda.Event() for _ in self._slots] for _ in range(3)
            )

    def run(self, buckets: Sequence[Bucket], work: Work) -> None:
        """Fetch each bucket, do ``work``, and send it back."""
        if self._streams is not None:
            self._run_on_gpu(buckets, work, *self._streams)
            return
        for bucket in buckets:
            here = _within(self._slots[0], bucket.kept)
            _copy(here, bucket.kept)
            work(bucket, here)
            _copy(bucket.kept, here)

    def settle(self) -> None:
        """Wait until all is back."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def _run_on_gpu(
        self,
        buckets: Sequence[Bucket],
        work: Work,
        fetching: torch.cuda.Stream,
        returning: torch.cuda.Stream,
    ) -> None:
        computing = torch.cuda.current_stream()
        # Nothing of the step before may be fetched before it was sent back.
        fetching.wait_stream(returning)
        fetching.wait_stream(computing)
        for i, bucket in enumerate(buckets):
            turn = i % len(self._slots)
            here, kept = _within(self._slots[turn], bucket.kept), bucket.kept
            with torch.cuda.stream(fetching):
                if i >= len(self._slots):
                    fetching.wait_event(self._free[turn])
                _copy(here, kept)
                self._ready[turn].record(fetching)
            computing.wait_event(self._ready[turn])
            work(bucket, here)
            self._used[turn].record(computing)
            with torch.cuda.stream(returning):
                returning.wait_event(self._used[turn])
                _copy(kept, here)
                self._free[turn].record(returning)


def _slot(buckets: Sequence[Bucket], device: torch.device) -> dict[torch.dtype, list[Tensor]]:
    """Room for the largest bucket: for each dtype as many arrays as a bucket has sections of it."""
    sizes: dict[torch.dtype, list[int]] = {}
    for bucket in buckets:
        for dtype, lengths in _by_dtype(bucket.kept).items():
            known = sizes.setdefault(dtype, [0] * len(lengths))
            sizes[dtype] = [max(pair) for pair in zip(known, lengths, strict=True)]
    return {
        dtype: [torch.empty(size, dtype=dtype, device=device) for size in each]
        for dtype, each in sizes.items()
    }


def _by_dtype(kept: Stored) -> dict[torch.dtype, list[int]]:
    found: dict[torch.dtype, list[int]] = {}
    for values in kept.values():
        found.setdefault(values.dtype, []).append(len(values))
    return found


def _within(slot: dict[torch.dtype, list[Tensor]], kept: Stored) -> Stored:
    """Places in ``slot`` as large as those of ``kept``."""
    free = {dtype: iter(each) for dtype, each in slot.items()}
    return {name: next(free[values.dtype])[: len(values)] for name, values in kept.items()}


def _copy(to: Stored, source: Stored) -> None:
    for name, values in source.items():
        to[name].copy_(values, non_blocking=True)
