"""Processes that stay: many small distributed tests import torch and transformers once."""

import importlib
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore

from tests.warm_process import WarmProcess

_MOST_WORLDS = 6
"""Of one process. Gloo's threads outlive their group, and each wakes a hundred times a second."""


class ProcessPool:
    """``size`` processes; ``run(world_size, "module:function", *args)`` makes the first of them a
    world of their own and returns what the function returned on each rank.

    They start with ``preload`` imported, which must leave CUDA alone.
    """

    def __init__(self, size: int, backend: str = "gloo", preload: tuple[str, ...] = ()) -> None:
        self._size, self._backend = size, backend
        self._warm = WarmProcess(*preload)
        self._start()

    def _start(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[int] = []
        self._worlds = [0] * self._size
        for _ in range(self._size):
            pipe, process = self._start_one()
            self._pipes.append(pipe)
            self._processes.append(process)

    def _start_one(self) -> tuple[Connection, int]:
        ours, theirs = multiprocessing.Pipe()
        process = self._warm.start(f"{__name__}:serve", theirs, self._backend)
        theirs.close()
        return ours, process

    def run(self, world_size: int, target: str, *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """Results in rank order; after a failure the processes are new ones."""
        # Here, so that its port is taken from the moment in which it is chosen.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, pipe in enumerate(self._pipes[:world_size]):
            pipe.send((rank, world_size, store.port, target, args))
        try:
            results = self._collect(world_size, f"{target}{args}", timeout_s)
        except AssertionError:
            self._kill()
            self._start()
            raise
        for rank in range(world_size):
            self._worlds[rank] += 1
            if self._worlds[rank] == _MOST_WORLDS:
                self._warm.kill(self._processes[rank])
                self._pipes[rank], self._processes[rank] = self._start_one()
                self._worlds[rank] = 0
        return results

    def _collect(self, world_size: int, what: str, timeout_s: float) -> list[Any]:
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout_s
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), end - time.monotonic())
            assert ready, f"{what}: ranks {sorted(waiting.values())} did not answer"
            for pipe in ready:
                rank = waiting.pop(pipe)  # pyright: ignore
                try:
                    ok, results[rank] = pipe.recv()  # pyright: ignore
                except EOFError:
                    ok, results[rank] = False, f"rank {rank} died"
                # The others may wait for it for ever: what it says is the news.
                assert ok, results[rank]
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        self._kill()
        self._warm.close()

    def _kill(self) -> None:
        for process in self._processes:
            self._warm.kill(process)


def serve(pipe: Connection, backend: str) -> None:
    """What each process does until its pipe is closed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, port, target, args = pipe.recv()
        except EOFError:
            return
        try:
            if "nccl" in backend:
                torch.cuda.set_device(rank)
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
            module, _, function = target.partition(":")
            value = getattr(importlib.import_module(module), function)(*args)
            pipe.send((True, value))
        except BaseException:  # the boundary of a process: the test must see why it failed
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
