"""The process of one rank: what every Ray actor of a worker group is and knows.

Actors are hosts, which are up at once: neither they nor who starts them import a worker's class.
"""

import contextlib
import faulthandler
import inspect
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

import psutil

from nemo_like.imports import without_collector
from nemo_like.observe.metrics import Metric, Metrics, Reduce
from nemo_like.observe.phase_trace import PhaseTrace

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_MARK = "tokens_apart"
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """A worker's place. Its size does not depend on the size of the group."""

    role: str
    rank: int
    world_size: int
    address: str
    """Of its node, as ``node_id``."""
    node_id: str
    gpu_ids: tuple[str, ...]
    """GPUs that it may use; empty in a CPU run."""
    environment: Mapping[str, str]
    """Variables that its process gets; see ``virtual_cluster.worker_environment``."""
    listens_on: str
    """Address that its rendezvous listens on; empty: all of the node's."""
    host: str = ""
    """Name of its node."""
    log_dir: str
    """Folder of ``<role>-<rank>.log``, which receives everything the process writes to stderr."""

    @property
    def name(self) -> str:
        return f"{self.role} rank {self.rank}"

    @property
    def meeting_address(self) -> str:
        """Where other ranks find its rendezvous."""
        return self.listens_on or self.address

    @property
    def log_path(self) -> Path:
        return Path(self.log_dir) / f"{self.role}-{self.rank}.log"


class Worker:
    """Base of what hosts run. Its methods are called through ``WorkerGroup``."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._retries = 0

    def ready(self) -> int:
        return os.getpid()

    def memory(self, area: str = "") -> Metrics:
        """GiB of memory of this process, and what torch says of its GPU's.

        Since the last call: the most it allocated, and how often the GPU had no more. Torch then
        waits for the GPU, frees what it caches, and asks again.
        """
        held = {"memory_gib": psutil.Process().memory_info().rss / 2**30}
        if self.context.gpu_ids and "torch" in sys.modules:
            cuda = sys.modules["torch"].cuda
            if cuda.is_initialized():  # not where vLLM's processes have the GPU
                held["gpu_memory_gib"] = cuda.max_memory_allocated() / 2**30
                cuda.reset_peak_memory_stats()
                retries = cuda.memory_stats()["num_alloc_retries"]
                held["gpu_memory_retries"] = retries - self._retries
                self._retries = retries
        return {f"{area}{name}": Metric(of, reduce=Reduce.max) for name, of in held.items()}


def tokens_apart(
    method: Callable[P, Coroutine[Any, Any, tuple[R, Any]]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Mark a method that returns a result and its tokens, which Ray then returns separately.

    Tokens of less than 100 kB come with the answer, which saves two thirds of a call's time, and
    lie unread in the driver's process; others stay in the object store. The driver gets the result,
    a dataclass, with a reference as its ``tokens``.
    """
    vars(method)[_MARK] = True
    return cast("Callable[P, Coroutine[Any, Any, R]]", method)


def returns_tokens_apart(method: Callable[..., Any]) -> bool:
    """Whether it is marked so."""
    return hasattr(method, _MARK)


class Host:
    """The actor: devices, log file, and a worker, whose class the first call imports."""

    def __init__(self, context: WorkerContext, worker_class: Callable[[], type[Worker]]) -> None:
        self._context = context
        self._worker_class = worker_class
        self._worker: Worker | None = None
        self._trace = PhaseTrace(context.log_path.parent, context.log_path.stem)
        # Set here, before CUDA is initialised, rather than by Ray's num_gpus: a vLLM engine
        # needs the GPUs of all its bundles in one process, and policy and engine share a GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.gpu_ids)
        os.environ.update(context.environment)
        keep_compiler_cache()
        self._redirect_stderr()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._trace.phase(method):
            return self._call(method, *args, **kwargs)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._ready_worker(), method)(*args, **kwargs)

    def missing(self, paths: list[str]) -> list[str]:
        """Those of ``paths`` that this node does not see."""
        return [path for path in paths if not Path(path).exists()]

    def _ready_worker(self) -> Worker:
        if self._worker is None:
            with without_collector():
                worker_class = self._worker_class()
            self._worker = worker_class(self._context)
        return self._worker

    def _redirect_stderr(self) -> None:
        """Send file descriptor 2 to the log: C++ aborts and child processes end up there too."""
        path = self._context.log_path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(sys.stderr)
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO,
            format=f"%(asctime)s {self._context.name} %(levelname)s %(name)s: %(message)s",
            force=True,
        )


class AsyncHost(Host):
    """The host of a worker whose methods are coroutines: many calls are under way at once."""

    def __init__(self, context: WorkerContext, worker_class: Callable[[], type[Worker]]) -> None:
        super().__init__(context, worker_class)
        import asyncio  # 60 ms, which commands that import this file do without

        self._importing, self._in_thread = asyncio.Lock(), asyncio.to_thread

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._trace.phase(method):
            if self._worker is None:
                async with self._importing:
                    # In a thread: the event loop would answer nobody for seconds.
                    await self._in_thread(self._ready_worker)
            result = self._call(method, *args, **kwargs)
            return await result if inspect.isawaitable(result) else result


def keep_compiler_cache() -> None:
    """Keep compiled code of this process, and those that it starts, in the user's cache folder.

    Call it before torch is imported, which makes a folder in TMPDIR by then, and leaves it there.
    """
    with contextlib.suppress(OSError, RuntimeError):  # no home, or a read-only one: as torch has it
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = Path(os.environ.get(_VARIABLE) or caches / "nemo_like" / "inductor")
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[_VARIABLE] = str(folder)
        # Torch sets it when it compiles, but not when it loads what it had compiled: the second run
        # would look elsewhere for the kernels of others (vLLM's sampler), and compile them again.
        if "TRITON_HOME" not in os.environ:
            os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


@dataclass(frozen=True)
class RankLayout:
    """A grid of ranks; the last axis varies fastest, so its ranks are physical neighbours.

    >>> layout = RankLayout({"dp": 2, "tp": 2})
    >>> layout.coordinate(2, "dp"), layout.output_ranks("dp")
    (1, (0, 2))
    >>> RankLayout({"pp": 2, "dp": 2}).output_ranks("dp", last="pp")
    (2, 3)
    """

    sizes: dict[str, int]

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    def coordinate(self, rank: int, axis: str) -> int:
        names = list(self.sizes)
        stride = math.prod(self.sizes[name] for name in names[names.index(axis) + 1 :])
        return rank // stride % self.sizes[axis]

    def output_ranks(self, axis: str, last: str | None = None) -> tuple[int, ...]:
        """The rank at each position of ``axis``: first along every other, but last on ``last``."""
        wanted = {name: 0 for name in self.sizes if name != axis}
        if last is not None:
            wanted[last] = self.sizes[last] - 1
        return tuple(
            rank
            for rank in range(self.world_size)
            if all(self.coordinate(rank, name) == at for name, at in wanted.items())
        )


_BACKLOG = 4096
"""Thousands of ranks connect at once."""


def listening_store(
    address: str, world_size: int | None, timeout: timedelta = timedelta(seconds=300)
) -> "TCPStore":
    """Where ranks meet, on a port that the system picks; an empty ``address``: on all interfaces.

    torch's key-value store has no authentication: who can connect can read and write what ranks
    say there. Left alone, torch listens on every interface of the node.
    """
    from torch._C._distributed_c10d import TCPStore  # The driver does without torch at first.

    host = address or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        options = {"wait_for_workers": False, "master_listen_fd": listener.fileno()}
        store = TCPStore(host, port, world_size, True, timeout, **options)
        listener.detach()  # it is the store's now
    return store
