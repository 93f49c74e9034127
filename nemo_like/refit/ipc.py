"""Weights from one process to others of its node, by sharing memory: CUDA IPC, or mapped pages.

The sender fills two buffers in turn. A receiver maps both, reads bucket i from buffer i mod 2 and
says so; only then is that buffer filled again. Nothing but memory handles and bucket numbers goes
through the socket, and neither socket nor memory leaves a file that a killed process could forget.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from nemo_like.errors import RunError
from nemo_like.refit.buckets import NUM_BUFFERS, Bucket, numbered

Tensors = Iterator[tuple[str, Tensor]]

_DEVICE_ARGUMENT = 6
"""Position of the device index in what ``reduce_tensor`` returns for a CUDA tensor."""


@dataclass(frozen=True)
class IpcAddress:
    """Where a sender listens; whoever knows it may connect."""

    socket: str
    key: bytes

    @classmethod
    def new(cls) -> Self:
        """An abstract socket: it has no file, and ends with its process."""
        return cls(f"\0nemo-like-{secrets.token_hex(8)}", secrets.token_bytes(32))


@dataclass(frozen=True)
class IpcLink:
    """One replica's senders: that of tensor-parallel rank i is ``addresses[i]``, on its GPU."""

    addresses: tuple[IpcAddress, ...]

    def receiver(
        self, rank: int, buckets: Sequence[Bucket], device: torch.device, timeout_s: float
    ) -> "IpcReceiver":
        """Connect rank ``rank`` of the replica; returns once its sender has accepted."""
        return IpcReceiver(self.addresses[rank], buckets, device, timeout_s)


@dataclass(frozen=True)
class _Start:
    version: int
    buffers: tuple[Any, ...]
    """For each buffer: how to rebuild its tensor here."""


@dataclass(frozen=True)
class _Failure:
    reason: str


class IpcSender:
    """The side of a policy rank, or of an engine that passes weights on."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        device: torch.device,
        num_receivers: int,
        timeout_s: float,
        address: IpcAddress | None = None,
    ) -> None:
        self.address = address or IpcAddress.new()
        self._listener = Listener(self.address.socket, "AF_UNIX", authkey=self.address.key)
        self._buckets = buckets
        self._device = device
        self._timeout_s = timeout_s
        self._num_receivers = num_receivers
        self._receivers: list[_Peer] = []

    def accept(self) -> None:
        """Wait for all receivers; the caller's deadline ends the wait."""
        while len(self._receivers) < self._num_receivers:
            try:
                connection = self._listener.accept()
            except (EOFError, OSError, AuthenticationError) as error:
                raise RunError(
                    f"An engine did not connect to the sender of its weights: {error!r}"
                ) from error
            self._receivers.append(_Peer(connection, self._timeout_s))
        self._listener.close()

    def send(self, tensors: Tensors, version: int, *, adapters_only: bool = False) -> None:
        """Hand over all ``tensors`` in the order of the buckets.

        Raises RunError if a receiver refuses or is gone; receivers learn of a failure here.
        """
        for _ in self.passed_on(tensors, version, adapters_only=adapters_only):
            pass

    def passed_on(self, tensors: Tensors, version: int, *, adapters_only: bool = False) -> Tensors:
        """``send``, while the caller reads too; a tensor stays until two more buckets are drawn."""
        try:
            yield from self._send(
                tensors, version, numbered(self._buckets, adapters_only=adapters_only)
            )
        except BaseException as error:
            for receiver in self._receivers:
                receiver.send(_Failure(f"{type(error).__name__}: {error}"))
            raise

    def _send(
        self, tensors: Tensors, version: int, buckets: Sequence[tuple[int, Bucket]]
    ) -> Tensors:
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what receivers have let go of since the last refit
        with ExitStack() as stack:
            size = max(bucket.num_bytes for _, bucket in buckets)
            shared = [_Shared(size, self._device) for _ in buckets[:NUM_BUFFERS]]
            for buffer in shared:
                stack.callback(buffer.close)
            self._tell(_Start(version, tuple(buffer.handle for buffer in shared)))
            for i, (number, bucket) in enumerate(buckets):
                if i >= NUM_BUFFERS:
                    self._await_taken(buckets[i - NUM_BUFFERS][0])
                bucket.fill(shared[i % NUM_BUFFERS].tensor, tensors)
                _synchronize(self._device)
                self._tell(number)
                yield from bucket.views(shared[i % NUM_BUFFERS].tensor)
            for number, _ in buckets[-NUM_BUFFERS:]:
                self._await_taken(number)

    def _tell(self, message: Any) -> None:
        for receiver in self._receivers:
            receiver.send(message)

    def _await_taken(self, bucket: int) -> None:
        for receiver in self._receivers:
            receiver.expect(bucket)


class IpcReceiver:
    """One engine rank's side."""

    def __init__(
        self, address: IpcAddress, buckets: Sequence[Bucket], device: torch.device, timeout_s: float
    ) -> None:
        self._peer = _Peer(Client(address.socket, "AF_UNIX", authkey=address.key), timeout_s)
        self._buckets = buckets
        self._device = device

    def tensors(self, version: int, *, adapters_only: bool = False) -> Tensors:
        """Every tensor of one refit by name; each is overwritten once the next bucket is drawn.

        Raises RunError if the sender fails, is gone, or sends another version.
        """
        try:
            start = self._peer.receive()
            assert isinstance(start, _Start), start
            if start.version != version:
                raise RunError(
                    f"Refit {version} was announced, and the sender began refit {start.version}."
                )
            buffers = [rebuild(self._device) for rebuild in start.buffers]
            buckets = numbered(self._buckets, adapters_only=adapters_only)
            for i, (number, bucket) in enumerate(buckets):
                self._peer.expect(number)
                yield from bucket.views(buffers[i % NUM_BUFFERS])
                _synchronize(self._device)
                self._peer.send(number)
        except GeneratorExit:
            self._peer.send(_Failure("it stopped reading; its own log says why."))
            raise
        except BaseException as error:
            self._peer.send(_Failure(f"{type(error).__name__}: {error}"))
            raise


class _Peer:
    """The other end of a socket, with a limit on every wait."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    def send(self, message: Any) -> None:
        with suppress(OSError):  # If the other end is gone, the wait for its answer raises.
            self._connection.send(message)

    def receive(self) -> Any:
        try:
            if not self._connection.poll(self._timeout_s):
                raise RunError(f"The other side of the refit was silent for {self._timeout_s:g} s.")
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RunError("The other side of the refit is gone.") from error
        if isinstance(message, _Failure):
            raise RunError(f"The other side of the refit failed: {message.reason}")
        return message

    def expect(self, bucket: int) -> None:
        message = self.receive()
        assert message == bucket, f"expected bucket {bucket}, got {message!r}"


def _open_cuda(
    rebuild: Callable[..., Tensor], arguments: tuple[Any, ...], device: torch.device
) -> Tensor:
    """A CUDA tensor of another process: the GPU is the same, its index may differ here."""
    own = list(arguments)
    own[_DEVICE_ARGUMENT] = device.index or 0
    return rebuild(*own)


def _open_mapped(path: str, num_bytes: int, device: torch.device) -> Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


class _Shared:
    """A buffer of ours, and what rebuilds it in another process while this object lives."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._descriptor: int | None = None
        self.handle: Callable[[torch.device], Tensor]
        if device.type == "cuda":
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self.handle = partial(_open_cuda, *reduce_tensor(self.tensor))
            return
        # Memory without a name: not limited by the size of /dev/shm, gone with its processes.
        self._descriptor = os.memfd_create("nemo-like-refit")
        os.truncate(self._descriptor, num_bytes)
        self.handle = partial(_open_mapped, f"/proc/{os.getpid()}/fd/{self._descriptor}", num_bytes)
        self.tensor = self.handle(device)

    def close(self) -> None:
        del self.tensor
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
