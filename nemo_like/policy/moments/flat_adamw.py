"""AdamW whose moments lie flat: in host memory, in fewer bits, or both.

Its numbers are torch's bit by bit where moments are float32, and wherever they lie the same for one
format. Checkpoints have each parameter's moments under their usual names.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from nemo_like.config.optimizer import Moments
from nemo_like.errors import RunError
from nemo_like.planning.model_shape import GIB
from nemo_like.planning.parameters import BUCKET_NUMBERS, NUM_SLOTS
from nemo_like.policy.moments.layout import Bucket, MomentLayout, Piece, Stored
from nemo_like.policy.parallel.full_tensors import local_part

_SPREAD, _SEEDS = 0x9E3779B1, 1 << 32
"""Seeds of steps that follow each other are far apart; a CPU's generator takes 32 bits."""


class FlatAdamW(AdamW):
    """See the module. ``moments``: their format; vectors keep float32 with ``int8``."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        moments: Moments,
        on_host: bool,
        bucket_numbers: int = BUCKET_NUMBERS,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self._num_steps = 0
        device = local_part(self.param_groups[0]["params"][0]).device
        self._noise = torch.Generator(device)
        layout = MomentLayout(self.param_groups, moments, bucket_numbers)
        self._memory: HostMemory | None = None
        self._transit: Transit | None = None
        if on_host:
            self._memory = HostMemory(layout.num_bytes, locked=device.type == "cuda")
            self._buckets, own = layout.place(self._memory.bytes)
            self._transit = Transit(self._buckets, device)
        else:
            kept = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
            self._buckets, own = layout.place(kept)
        counted_on = device if options.get("fused") else torch.device("cpu")
        for parameter, its_moments in own.items():
            step = torch.zeros((), dtype=torch.float32, device=counted_on)
            self.state[parameter] = {"step": step} | its_moments

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        self._num_steps += 1
        used = [bucket for bucket in self._buckets if any(map(_has_gradient, bucket.pieces))]
        if self._memory is not None and self._transit is not None:
            self._memory.wait()
            self._transit.run(used, self._step_on)
            return
        for bucket in used:
            self._step_on(bucket, bucket.kept)

    def _step_on(self, bucket: Bucket, moments: Stored) -> None:
        taken: list[tuple[Piece, Stored, Tensor, Tensor]] = []
        for piece, stored in bucket.split(moments):
            if _has_gradient(piece):
                taken.append((piece, stored, *piece.shard.format.unpack(stored)))
        group, pieces = bucket.group, [piece for piece, *_ in taken]
        adamw(
            [piece.of(piece.shard.parameter) for piece in pieces],
            [piece.of(_gradient(piece)) for piece in pieces],
            [first for _, _, first, _ in taken],
            [second for _, _, _, second in taken],
            [],
            [self._count(piece) for piece in pieces],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for piece, stored, first, second in taken:
            # Nothing that differs between ranks that hold copies of a parameter.
            self._noise.manual_seed((self._num_steps * _SPREAD + piece.first) % _SEEDS)
            piece.shard.format.pack(first, second, stored, self._noise)

    def _count(self, piece: Piece) -> Tensor:
        """The parameter's step count, which its last piece raises."""
        count: Tensor = self.state[piece.shard.parameter]["step"]
        return count if piece.is_last else count.clone()

    def settle(self) -> None:
        if self._memory is not None and self._transit is not None:
            self._memory.wait()
            self._transit.settle()

    def state_dict(self) -> dict[str, Any]:
        """As torch's; its tensors are the optimizer's own."""
        self.settle()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In place; torch's would make float32 tensors on the GPU of all moments."""
        self.settle()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    local_part(self.state[parameter][name]).copy_(local_part(value))
            group.update({name: value for name, value in saved.items() if name != "params"})
        self._num_steps = max(int(state["step"]) for state in self.state.values())


def _has_gradient(piece: Piece) -> bool:
    return piece.shard.parameter.grad is not None


def _gradient(piece: Piece) -> Tensor:
    gradient = piece.shard.parameter.grad
    assert gradient is not None
    return gradient


_TOUCHED_AT_ONCE = 64 << 20
_MOST_THREADS = 16

Work = Callable[[Bucket, Stored], None]
"""The update of a bucket, given its moments on the device."""


class HostMemory:
    """Zeroed bytes in one mapping, page-locked for CUDA.

    Pages are made and locked in a thread (17 s for 61 GB on an idle machine) while a model loads;
    ``wait`` before the first use.
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

    On a GPU, copies use two streams, one per direction, and may continue after ``run`` returns.
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
        if self._streams is not None:
            self._run_on_gpu(buckets, work, *self._streams)
            return
        for bucket in buckets:
            here = _within(self._slots[0], bucket.kept)
            _copy(here, bucket.kept)
            work(bucket, here)
            _copy(bucket.kept, here)

    def settle(self) -> None:
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
